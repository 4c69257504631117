"""`allranks checkpoint` over folders and a real bucket, and single files in and out."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from allranks.checkpoint import CheckpointLoadConfig, NVMeBackend, S3Backend, StorageReader, import_checkpoint
from allranks.checkpoint.manifest import MANIFEST, decode_manifest, encode_manifest
from allranks.checkpoint.restore.opened_checkpoint import opened
from allranks.checkpoint.state import create_checkpoint_state
from allranks.checkpoint.stores.file_store import FileStore
from allranks.cli import main
from allranks.errors import CheckpointLoadError, InputError

from .jobs import contents, flip, make_state, same, same_state
from .s3server import S3Server


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three checkpoints."""
    for step in (1, 2, 3):
        NVMeBackend(tmp_path / "run").save(make_state(step, seed=step), f"checkpoint_step_{step:08d}")
    return tmp_path / "run"


def _json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main(["checkpoint", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_ls_lists_steps_sizes_and_damage(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table and as JSON; a broken manifest is listed as what it is."""
    (store / "checkpoint_step_00000002" / "manifest.json").write_text("{}")
    found = _json(capsys, "ls", str(store))["checkpoints"]
    assert [one["step"] for one in found] == [-1, 1, 3] and found[0]["problem"]
    assert main(["checkpoint", "ls", str(store)]) == 0
    text = capsys.readouterr().out
    assert "checkpoint_step_00000003" in text and "damaged" in text


def test_show_tells_what_is_inside(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a store it shows the newest; of a checkpoint that one."""
    assert _json(capsys, "show", str(store))["step"] == 3
    shown = _json(capsys, "show", str(store / "checkpoint_step_00000001"))
    assert shown["step"] == 1 and shown["tensors"]["model_state_dict.0.weight"]["shape"] == [16, 16]
    assert main(["checkpoint", "show", str(store), "--tensors"]) == 0
    assert "model_state_dict.0.weight  F32 [16, 16]" in capsys.readouterr().out


def test_verify_finds_every_damaged_tensor_and_exits_1(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad checkpoint does not hide the good ones; --quarantine moves it away."""
    assert _json(capsys, "verify", str(store))["ok"] is True
    flip(store / "checkpoint_step_00000002" / "rank-00000.safetensors", -1, -8000)
    result = _json(capsys, "verify", str(store), code=1)
    bad = {one["step"]: one["problems"] for one in result["checkpoints"]}
    assert bad[1] == bad[3] == [] and len(bad[2]) == 2
    moved = _json(capsys, "verify", str(store), "--quarantine", code=1)["checkpoints"][1]["quarantined"]
    assert Path(moved).parent == store / "quarantine" and (Path(moved) / "manifest.json").exists()
    assert _json(capsys, "verify", str(store))["ok"] is True


def test_verify_never_passes_what_is_not_there(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint without its manifest is damaged; a place without any checkpoint is a wrong address."""
    (store / "checkpoint_step_00000002" / "manifest.json").unlink()
    assert main(["checkpoint", "verify", str(store / "checkpoint_step_00000002")]) == 1
    assert "DAMAGED" in (text := capsys.readouterr().out) and "manifest.json is missing" in text
    assert main(["checkpoint", "verify", str(store.parent)]) == 2
    assert "no checkpoints in" in capsys.readouterr().err


def test_prune_keeps_the_newest(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--dry-run only says; keeping none is refused."""
    dry = _json(capsys, "prune", str(store), "--keep", "1", "--dry-run")
    assert (
        dry["would_remove"] == ["checkpoint_step_00000001", "checkpoint_step_00000002"]
        and dry["removed"] == []
    )
    assert _json(capsys, "prune", str(store), "--keep-last", "1")["removed"] == dry["would_remove"]
    assert main(["checkpoint", "prune", str(store), "--keep", "0"]) == 2
    assert contents(store) == ["checkpoint_step_00000003"]


def test_prune_never_removes_the_last_good_one(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A newest one that is damaged does not count: the older good one stays, whatever --keep says."""
    flip(store / "checkpoint_step_00000003" / "rank-00000.safetensors", -1)
    result = _json(capsys, "prune", str(store), "--keep", "1")
    assert result["removed"] == ["checkpoint_step_00000001"]
    assert "damaged and not counted: checkpoint_step_00000003" in result["reason"]
    assert NVMeBackend(store).cleanup_old_checkpoints(keep_last=1) == []
    assert same_state(NVMeBackend(store).load("checkpoint_step_00000002"), make_state(2, seed=2))


def test_nothing_is_replaced_without_force(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """copy and import onto a checkpoint that is there are refused; --force replaces it."""
    torch.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "other.pt")
    copy = [
        "checkpoint",
        "copy",
        str(store / "checkpoint_step_00000001"),
        str(store / "checkpoint_step_00000003"),
    ]
    for words in (copy, ["checkpoint", "import", str(tmp_path / "other.pt"), str(store)]):
        assert main(words) == 2
        assert "already exists\n--force" in capsys.readouterr().err
        assert main([*words, "--force"]) == 0
    assert list(NVMeBackend(store).load("checkpoint_step_00000003").model_state_dict) == ["w"]


def test_copy_goes_between_a_folder_and_a_bucket_and_back(
    s3: S3Server, bucket: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte is checked on the way, and the state is the same at the end."""
    words = [word for key, value in s3.options().items() for word in ("--option", f"{key}={value}")]
    target = [word.replace("--option", "--target-option") for word in words]
    url = f"s3://{bucket}/run"
    there = _json(capsys, "copy", str(store / "checkpoint_step_00000002"), url, *target)
    assert there["path"] == f"{url}/checkpoint_step_00000002"
    assert [one["step"] for one in _json(capsys, "ls", url, *words)["checkpoints"]] == [2]
    assert _json(capsys, "verify", url, *words)["ok"] is True
    assert _json(capsys, "show", url, *words)["tensors"]["model_state_dict.0.weight"]["shape"] == [16, 16]
    assert _json(capsys, "prune", url, "--keep", "1", *words)["removed"] == []
    out = tmp_path / "model.safetensors"
    assert _json(capsys, "export", url, str(out), *words)["bytes"] == out.stat().st_size
    assert main(["checkpoint", "verify", f"{url}/checkpoint_step_00000009", *words]) == 1
    assert "manifest.json is missing" in capsys.readouterr().out
    assert main(["checkpoint", "verify", f"s3://{bucket}/nothing", *words]) == 2
    assert "no checkpoints in" in capsys.readouterr().err
    back = tmp_path / "back" / "checkpoint_step_00000099"
    assert _json(capsys, "copy", f"{url}/checkpoint_step_00000002", str(back), *words)["step"] == 2
    assert same_state(NVMeBackend(tmp_path / "back").load("checkpoint_step_00000099"), make_state(2, seed=2))
    assert S3Backend(bucket, "run", options=s3.options()).exists("checkpoint_step_00000002")


def test_export_writes_one_file_that_plain_tools_read(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """.safetensors has the model's own names, .pt everything; nothing is overwritten without --force."""
    from safetensors.torch import load_file

    out = tmp_path / "model.safetensors"
    assert _json(capsys, "export", str(store), str(out))["tensors"] == len(make_state().model_state_dict)
    expected = make_state(3, seed=3)
    assert same(load_file(str(out)), expected.model_state_dict)
    assert main(["checkpoint", "export", str(store), str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(store), str(out), "--force"]) == 0
    assert main(["checkpoint", "export", str(store), str(tmp_path / "all.pt")]) == 0
    capsys.readouterr()
    whole = NVMeBackend(tmp_path).load("all.pt", CheckpointLoadConfig(trusted_source=True))
    assert same_state(whole, expected)


def test_import_takes_single_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A state and a bare state_dict become checkpoints."""
    from safetensors.torch import save_file

    state = make_state(7)
    state.rng_states = {}
    torch.save(state.to_dict(), tmp_path / "state.pt")
    save_file(state.model_state_dict, str(tmp_path / "model.safetensors"))
    folder = str(tmp_path / "run")
    _json(capsys, "import", str(tmp_path / "state.pt"), folder)
    _json(capsys, "import", str(tmp_path / "model.safetensors"), folder, "--step", "8")
    backend = NVMeBackend(folder)
    assert same_state(backend.load("checkpoint_step_00000007"), state)
    loaded = backend.load("checkpoint_step_00000008")
    assert loaded.step == 8 and same(loaded.model_state_dict, state.model_state_dict)


def _parts(state: Any) -> tuple[Any, Any, Any]:
    return state.model_state_dict, state.optimizer_state_dict, {"last_epoch": 7}


@pytest.mark.parametrize(
    "shape",
    [
        lambda m, o, s: {
            "model_state_dict": m,
            "optimizer_state_dict": o,
            "scheduler_state_dict": s,
            "step": 7,
        },
        lambda m, o, s: {"state_dict": m, "optimizer": o, "scheduler": s, "step": 7, "best_acc": 0.9},
        lambda m, o, s: {
            "state_dict": m,
            "optimizer_states": [o],
            "lr_schedulers": [s],
            "global_step": 7,
            "loops": {},
        },
        lambda m, o, s: {
            "model": m,
            "optimizer": o,
            "lr_scheduler": s,
            "iter_num": 7,
            "config": {"n_layer": 2},
        },
        lambda m, o, s: {"app": {"model": m, "optim": o, "lr_scheduler": s, "step": 7}},
    ],
    ids=["torch's tutorial", "torch's examples", "Lightning", "nanoGPT", "DCP's tutorial"],
)
def test_import_knows_the_parts_of_a_state_by_the_names_of_other_programs(tmp_path: Path, shape: Any) -> None:
    """They became a model that holds its optimizer, at step 0."""
    expected = make_state(7)
    torch.save(shape(*_parts(expected)), tmp_path / "file.pt")
    import_checkpoint(tmp_path / "file.pt", str(tmp_path / "run"))
    loaded = NVMeBackend(tmp_path / "run").load("checkpoint_step_00000007")
    expected.lr_scheduler_state_dict = {"last_epoch": 7}
    assert same_state(loaded, expected)


@pytest.mark.parametrize("shards", [1, 2])
def test_import_takes_a_checkpoint_of_hugging_faces_trainer(tmp_path: Path, shards: int) -> None:
    """Weights in one file or several; optimizer, scheduler and step lie beside them."""
    from safetensors.torch import save_file

    expected, folder = make_state(7), tmp_path / "checkpoint-7"
    model, optimizer, scheduler = _parts(expected)
    folder.mkdir()
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-00002.safetensors" for i in range(2)]
    )
    where = {name: names[number % shards] for number, name in enumerate(model)}
    for file in names:
        save_file({name: value for name, value in model.items() if where[name] == file}, str(folder / file))
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": where})
        )
    torch.save(optimizer, folder / "optimizer.pt")
    torch.save(scheduler, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7, "epoch": 1.5}))
    import_checkpoint(folder, str(tmp_path / "run"))
    loaded = NVMeBackend(tmp_path / "run").load("checkpoint_step_00000007")
    expected.lr_scheduler_state_dict, expected.epoch = scheduler, 1
    assert same_state(loaded, expected)


def test_import_refuses_what_holds_no_model(tmp_path: Path) -> None:
    """Names what is there, and how it can be saved."""
    torch.save({"net": {"w": torch.ones(2)}, "notes": "x"}, tmp_path / "file.pt")
    with pytest.raises(InputError, match="'net', 'notes': none of them is the state_dict"):
        import_checkpoint(tmp_path / "file.pt", str(tmp_path / "run"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is not a folder of Hugging Face"):
        import_checkpoint(tmp_path / "folder", str(tmp_path / "run"))


def test_a_checkpoint_of_another_program_is_told_how_to_be_imported(tmp_path: Path) -> None:
    """DCP's own folder, given to our manager; the commands in the hints make it loadable."""
    dcp.save(
        {"model": make_state(9).model_state_dict, "step": 9},
        checkpoint_id=str(tmp_path / "dcp"),
        no_dist=True,
    )
    with pytest.raises(CheckpointLoadError) as caught:
        NVMeBackend(tmp_path).load("dcp")
    command = re.search(r"allranks (checkpoint import .*) STORE", caught.value.hint or "")
    assert command is not None
    with pytest.raises(InputError) as refused:
        import_checkpoint(shlex.split(command[1])[2], str(tmp_path / "run"))
    words = shlex.split((refused.value.hint or "").partition("that: ")[2])
    assert words[:4] == ["python", "-m", dcp_to_torch_save.__module__, "dcp_to_torch"]
    dcp_to_torch_save(words[4], tmp_path / words[5])  # what that program calls
    assert main(["checkpoint", "import", str(tmp_path / "state.pt"), str(tmp_path / "run")]) == 0
    assert NVMeBackend(tmp_path / "run").load("checkpoint_step_00000009").step == 9


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s3://", "'s3://' names no store"),
        ("", "'' names no store"),
        ("s3:/bucket/run", "two slashes: s3://bucket/run"),
        ("peer://keeper", "'keeper' in 'peer://keeper' is not HOST:PORT"),
        ("file:///nowhere/run", "no such folder: '/nowhere/run'"),
        ("ftp://host/run", "'ftp://host/run' is not a store"),
    ],
)
def test_an_address_that_is_none_is_not_an_empty_store(
    address: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`s3://$BUCKET` of an empty variable was a folder of the name "s3:", without checkpoints."""
    assert main(["checkpoint", "ls", address]) == 2
    assert says in capsys.readouterr().err


def test_plain_dcp_loads_ours_through_our_reader_and_notices_damage(store: Path) -> None:
    """The same call as for any DCP checkpoint, with every byte checked."""
    path = store / "checkpoint_step_00000003"
    state = {"model_state_dict.0.weight": torch.zeros(16, 16)}
    dcp.load(state, storage_reader=StorageReader(str(path)), no_dist=True)
    assert same(state["model_state_dict.0.weight"], make_state(3, seed=3).model_state_dict["0.weight"])
    with opened(FileStore(store), path.name) as checkpoint:
        start = next(s.start for _, s in checkpoint.shards() if s.shard.name == "model_state_dict.0.weight")
    flip(path / "rank-00000.safetensors", start)
    with pytest.raises(BaseException, match=r"model_state_dict\.0\.weight .* does not match its checksum"):
        dcp.load(state, storage_reader=StorageReader(str(path)), no_dist=True)


def test_addresses_that_lead_nowhere_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, one sentence, no traceback."""
    for words in (
        ["ls", str(tmp_path / "none")],
        ["show", str(tmp_path)],
        ["ls", "ftp://x/y"],
        ["verify", "s3://b/x", "--option", "oops"],
    ):
        assert main(["checkpoint", *words]) == 2
        assert "allranks checkpoint" in capsys.readouterr().err


def test_an_imported_pickle_must_be_trusted(tmp_path: Path) -> None:
    """As everywhere: weights only, unless the user vouches for it."""
    torch.save({**make_state(1).to_dict(), "args": argparse.Namespace(lr=1)}, tmp_path / "full.pt")
    with pytest.raises(Exception, match="holds more than tensors"):
        import_checkpoint(tmp_path / "full.pt", str(tmp_path / "run"))
    path = import_checkpoint(
        tmp_path / "full.pt", str(tmp_path / "run"), config=CheckpointLoadConfig(trusted_source=True)
    )
    assert Path(path).is_dir()


def test_looking_and_copying_need_no_torch(store: Path, tmp_path: Path) -> None:
    """The base install, without torch or numpy's help, lists, shows, verifies, copies and prunes."""
    code = """
import sys
sys.modules["torch"] = None
from allranks.cli import main
store, other = sys.argv[1:]
for words in (["ls", store], ["show", store], ["verify", store], ["copy", store, other], ["prune", store, "--keep", "1"]):
    assert main(["checkpoint", *words]) == 0, words
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(store), str(tmp_path / "other")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert same_state(NVMeBackend(tmp_path / "other").load("checkpoint_step_00000003"), make_state(3, seed=3))


def test_a_checkpoint_of_a_newer_version_is_not_called_damaged(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quarantine would take it out of sight of the version that can read it."""
    folder = store / "checkpoint_step_00000002"
    head = decode_manifest((folder / MANIFEST).read_bytes(), "")
    (folder / MANIFEST).write_bytes(encode_manifest(replace(head, schema=2)))
    assert main(["checkpoint", "ls", str(store)]) == 0
    assert "newer version" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(folder), "--quarantine"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("NEWER") and "schema 2 is newer than 1" in printed
    assert folder.is_dir() and not (store / "quarantine").exists()


@pytest.mark.needs_root
@pytest.mark.parametrize("action", ["copy", "export .pt", "export .safetensors"])
def test_a_disk_that_is_too_small_is_one_clear_error(
    action: str, tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing stays on it."""
    model = torch.nn.Linear(1000, 1000)
    NVMeBackend(tmp_path / "run").save(create_checkpoint_state(1, model, None), "checkpoint_step_00000001")
    verb, _, suffix = action.partition(" ")
    target = str(small_disk / f"model{suffix}") if suffix else str(small_disk)
    command = ["checkpoint", verb, str(tmp_path / "run/checkpoint_step_00000001"), target]
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert "No space left on device" in printed and "df -h" in printed and "Traceback" not in printed
    assert list(small_disk.iterdir()) == []
