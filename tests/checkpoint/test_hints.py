"""Hints that work: every command in a hint of a checkpoint failure is run in the situation that it is for."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import allranks
from allranks import errors
from allranks.checkpoint import CheckpointConfig, CheckpointManager, NVMeBackend, S3Backend
from allranks.checkpoint.restore.candidates import RestoreRules, TiersSeen, choose, refuse_to_start_over
from allranks.checkpoint.restore.opened_checkpoint import opened
from allranks.checkpoint.restore.tensor_reader import require
from allranks.checkpoint.stores.file_store import FileStore
from allranks.cli import main
from allranks.errors import AllranksError, CheckpointError, CheckpointSaveError

from .jobs import flip, make_job, make_state, same_state
from .s3server import KEY, SECRET, Proxy, S3Server

#: What stands after ": " at the end of a line of a hint and begins like this is a command.
COMMAND = re.compile(r": ((?:allranks|df|ls|mkdir|grep|dmesg) .*)$", re.MULTILINE)


def commands_of(hint: str) -> list[str]:
    """The commands of a hint."""
    return COMMAND.findall(hint)


def run_all(hint: str, least: int = 1, may_fail: tuple[str, ...] = ("dmesg",), **env: str) -> str:
    """Runs every command of a hint in a shell as the user would; returns what they printed."""
    found = commands_of(hint)
    assert len(found) >= least, hint
    printed = ""
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in found:
        done = subprocess.run(
            command, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": tools, **env}
        )
        printed += done.stdout + done.stderr
        ok = done.returncode in ((0, 1) if "verify" in command else (0,))
        assert ok or command.startswith(may_fail), f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert "STORE" not in command, command
    return printed


def _failed_save(folder: Path, width: int = 16) -> CheckpointSaveError:
    """The error of a save through the helper process."""
    model, optimizer = make_job(width=width)
    config = CheckpointConfig(
        nvme_path=folder, memory_snapshot_interval=0, checkpoint_interval=1, save_on_close=False
    )
    with CheckpointManager(config) as manager:
        manager.step(9, model, optimizer)
        assert not manager.wait_for_pending_saves(60)
        (error,) = manager.saves.failures
    return error


@pytest.mark.needs_root
def test_a_full_disk_is_measured_and_pruned(small_disk: Path) -> None:
    """After the commands of the hint the save fits."""
    folder = small_disk / "run"
    for step in (1, 2, 3, 4):
        NVMeBackend(folder).save(make_state(step, width=128), f"checkpoint_step_{step:08d}")
    filler = small_disk / "filler"
    space = os.statvfs(small_disk)
    filler.write_bytes(bytes(space.f_bavail * space.f_frsize))
    error = _failed_save(folder, 128)
    assert "No space left" in str(error) and str(folder / "checkpoint_step_00000009") in str(error)
    printed = run_all(error.hint, 2)
    assert "100%" in printed and "removed checkpoint_step_00000001" in printed
    model, optimizer = make_job(width=128)
    config = CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0, checkpoint_interval=1)
    with CheckpointManager(config) as manager:
        manager.step(9, model, optimizer)
        assert manager.wait_for_pending_saves(60)


@pytest.mark.needs_root
def test_a_read_only_disk_is_shown_as_such(read_only_disk: Path) -> None:
    """Also where the job's own folder could not be made."""
    error = _failed_save(read_only_disk / "run" / "1")
    assert "Read-only file system" in str(error)
    assert re.search(r"\bro\b", run_all(error.hint, 2))


@pytest.mark.parametrize("what", ["a file", "a link to nowhere"])
def test_a_path_that_is_no_folder_is_shown(tmp_path: Path, what: str) -> None:
    """`ls` says what it is."""
    path = tmp_path / "nvme"
    if what == "a file":
        path.write_text("x")
    else:
        path.symlink_to(tmp_path / "gone" / "further")
    assert "nvme" in run_all(_failed_save(path).hint)


def _restore_error(folder: Path) -> AllranksError:
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0, wait_for_stores_s=0.0)
    with CheckpointManager(config) as manager, pytest.raises(AllranksError) as caught:
        manager.restore(model, optimizer)
    return caught.value


def test_damaged_checkpoints_are_shown_and_set_aside(tmp_path: Path) -> None:
    """The last command of the hint makes the next start one from scratch; the first shows what is damaged."""
    store = tmp_path / "it's a run"
    for step in (1, 2):
        NVMeBackend(store).save(make_state(step), f"checkpoint_step_{step:08d}")
        flip(store / f"checkpoint_step_{step:08d}" / "rank-00000.safetensors", -20)
    _restore_error(store)
    error = _restore_error(store)  # the restart: everything lies in quarantine now
    printed = run_all(error.hint, 1)
    assert "moved to" in printed
    model, optimizer = make_job()
    with CheckpointManager(CheckpointConfig(nvme_path=store)) as manager:
        assert manager.restore(model, optimizer) is None


def test_one_damaged_checkpoint_is_verified_by_its_hint(tmp_path: Path) -> None:
    """The error of a load by path."""
    NVMeBackend(tmp_path).save(make_state(1), "checkpoint_step_00000001")
    flip(tmp_path / "checkpoint_step_00000001" / "rank-00000.safetensors", -20)
    with pytest.raises(CheckpointError) as caught:
        NVMeBackend(tmp_path).load("checkpoint_step_00000001")
    assert "does not match its checksum" in run_all(caught.value.hint)


def _s3_error(config: CheckpointConfig) -> AllranksError:
    model, optimizer = make_job()
    with CheckpointManager(config) as manager, pytest.raises(AllranksError) as caught:
        manager.restore(model, optimizer)
    return caught.value


@pytest.mark.parametrize("outage", ["down", "wrong key", "damaged"])
def test_the_hint_of_an_object_store_works_once_the_cause_is_gone(
    s3: S3Server, bucket: str, outage: str
) -> None:
    """Its command names the endpoint; the keys come from the environment, and stand in no hint."""
    backend = S3Backend(bucket, "run", options=s3.options())
    backend.save(make_state(7), "checkpoint_step_00000007")
    options = {**s3.options(), "timeout_s": "3", "max_retries": "0"}
    judge: Callable[[str], int | str | None] = lambda line: None  # noqa: E731
    with Proxy(s3.ports["s3"], lambda line: judge(line)) as proxy:
        options["endpoint"] = proxy.endpoint
        if outage == "down":
            judge = lambda line: "cut"  # noqa: E731
        elif outage == "wrong key":
            options["secret_access_key"] = "wrong"
        else:
            store = backend.store
            key = next(key for key, _ in store.blobs.keys("") if key.endswith("safetensors"))  # type: ignore[attr-defined]
            store.blobs.put(key, [memoryview(b"gone")], 4)  # type: ignore[attr-defined]
        error = _s3_error(
            CheckpointConfig(s3_bucket=bucket, s3_prefix="run", s3_options=options, wait_for_stores_s=0.0)
        )
        judge = lambda line: None  # noqa: E731
        assert SECRET not in error.hint and "wrong" not in error.hint
        printed = run_all(error.hint, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    assert "moved to" in printed if outage == "damaged" else "checkpoint_step_00000007" in printed


def test_default_hints_of_errors_name_commands_that_exist(tmp_path: Path) -> None:
    """Errors that are raised without a hint of their own."""
    NVMeBackend(tmp_path).save(make_state(1), "checkpoint_step_00000001")
    path = str(tmp_path / "checkpoint_step_00000001")
    for error in (
        errors.CheckpointSaveError("why", tier="NVME", path=path),
        errors.CheckpointLoadError("why", tier="NVME", path=path),
        errors.CheckpointValidationError("why", path=path),
        errors.CheckpointDamaged("why", path=path),
    ):
        assert "checkpoint_step_00000001" in run_all(error.hint)


def test_a_pt_file_is_named_as_such_and_its_hint_makes_a_checkpoint_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify` and `ls` of it; the command of the hint needs only the store's name."""
    torch.save(make_state(4).to_dict(), tmp_path / "old.pt")
    for action in ("verify", "ls", "show"):
        assert main(["checkpoint", action, str(tmp_path / "old.pt")]) == 2
        said = capsys.readouterr().err
        assert (
            "file of torch.save" in said
            and f"allranks checkpoint import '{tmp_path / 'old.pt'}' STORE" in said
        )
    assert main(["checkpoint", "import", str(tmp_path / "old.pt"), str(tmp_path / "store")]) == 0
    assert same_state(NVMeBackend(tmp_path / "store").load("checkpoint_step_00000004"), make_state(4))


def test_our_own_export_comes_back_whole(tmp_path: Path) -> None:
    """Everything in a `.pt`, the model in a `.safetensors`; without --trusted-source."""
    NVMeBackend(tmp_path / "a").save(make_state(4), "checkpoint_step_00000004")
    for file in ("state.pt", "model.safetensors"):
        assert main(["checkpoint", "export", str(tmp_path / "a"), str(tmp_path / file)]) == 0
        assert (
            main(["checkpoint", "import", str(tmp_path / file), str(tmp_path / file[:5]), "--step", "4"]) == 0
        )
    whole = NVMeBackend(tmp_path / "state").load("checkpoint_step_00000004")
    assert same_state(whole, make_state(4)) and set(whole.rng_states) == {"python", "numpy", "torch"}
    model = NVMeBackend(tmp_path / "model").load("checkpoint_step_00000004")
    assert model.model_state_dict.keys() == whole.model_state_dict.keys()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


@pytest.mark.parametrize("how", ["cut", "flipped header", "empty", "text"])
@pytest.mark.parametrize("kind", [".pt", ".safetensors", "DCP"])
def test_what_cannot_be_imported_is_one_clear_error(
    tmp_path: Path, kind: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Never a traceback; nothing is written."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    source = tmp_path / f"source{kind if kind != 'DCP' else ''}"
    tensors = {"a": torch.arange(2000.0), "b": torch.ones(2000)}
    if kind == "DCP":
        dcp.save({"model": tensors}, checkpoint_id=str(source), no_dist=True)
        (file,) = source.glob("*.distcp")
    else:
        torch.save(tensors, source) if kind == ".pt" else save_file(tensors, str(source))
        file = source
    if how == "cut":
        _cut(file)
    elif how == "flipped header":
        flip(file, 0, 3, 5, 9, bit=6)
    else:
        file.write_bytes(b"" if how == "empty" else b"not a checkpoint at all\n" * 40)
    assert main(["checkpoint", "import", str(source), str(tmp_path / "store")]) == 2
    said = capsys.readouterr().err
    assert str(source) in said and "Traceback" not in said
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


def test_a_model_that_is_not_in_the_checkpoint_is_shown_what_is(tmp_path: Path) -> None:
    """The command lists the tensors that are there."""
    NVMeBackend(tmp_path).save(make_state(3), "checkpoint_step_00000003")
    model, _ = make_job()
    with opened(FileStore(tmp_path), "checkpoint_step_00000003") as checkpoint:
        with pytest.raises(AllranksError, match="1 tensors are missing") as caught:
            require(checkpoint, ["model_state_dict.no_such_layer"])
        printed = run_all(caught.value.hint)
    assert all(f"model_state_dict.{name}" in printed for name in model.state_dict())


def test_a_checkpoint_that_some_ranks_lack_is_copied_or_set_aside_as_the_hint_says(tmp_path: Path) -> None:
    """Only the name of the other node's folder is for the user to fill in."""
    there, here = tmp_path / "there", tmp_path / "here"
    NVMeBackend(there).save(make_state(3), "checkpoint_step_00000003")
    views = [TiersSeen({"NVME": [("checkpoint_step_00000003", 3)]}), TiersSeen({"NVME": []})]
    with pytest.raises(AllranksError, match="complete on 1 of 2 ranks only") as caught:
        refuse_to_start_over(views, choose([view.found for view in views]), RestoreRules(), [f"'{here}'"])
    printed = run_all(caught.value.hint.replace("OTHER_STORE", str(there)), least=2)
    assert "checkpoint_step_00000003" in printed and "set-aside" in printed
    assert not (here / "checkpoint_step_00000003").exists(), "it was copied, then set aside"


def _commands_in(folder: Path) -> set[tuple[str, ...]]:
    """Every command of ours that a text of the source recommends, down to its first placeholder."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for line in re.findall(r"(?:: |`)allranks ([a-z]+(?: [a-z][a-z-]*)?)", node.value):
                    found.add(tuple(line.split()))
    return found


@pytest.mark.parametrize("package", ["checkpoint", "elastic"])
def test_every_command_that_a_text_names_exists(package: str) -> None:
    """Also those for which no test makes the situation: the command line knows the words."""
    named = _commands_in(Path(allranks.__file__).parent / package)
    assert len(named) > 3
    for words in sorted(named):
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0, words
