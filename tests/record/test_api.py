"""The ways to start recording, and what the progress mark tells."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.ports import held_port

import allranks
from allranks import recording as record
from allranks.blackbox import files
from allranks.blackbox.header import read_header
from allranks.blackbox.reader import find_boxes, read_trace
from allranks.drill.ranks import Ranks
from allranks.recording.options import from_environment, tolerant

PLAIN = """
import sys, torch, torch.distributed as dist
def train():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
if __name__ == "__main__":
    train()
    print(sys.argv[1:], sys.path[0])
"""


def _env() -> dict[str, str]:
    return {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(held_port()),
    }


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("local_rank", [(), ("--local_rank=0",)], ids=["torchrun", "deepspeed"])
def test_the_wrapper_records_a_script_that_knows_nothing_of_us(
    local_rank: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """It sees its own arguments and import path, also where a launcher puts one first; its line is on the recorded stack."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    words = [sys.executable, "-m", "allranks.recording", *local_rank, str(script), "--lr", "1"]
    done = subprocess.run(words, env=_env(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{[*local_rank, '--lr', '1']} {tmp_path}"
    (box,) = find_boxes(folder)
    trace = read_trace(box)
    assert [frame.name for frame in trace.stacks[int(trace.calls[0]["stack"])]][:2] == ["train", "<module>"]
    assert trace.header.versions[-1][0] == "torch"


def test_the_wrapper_without_a_script_says_how_to_use_it() -> None:
    """Exit code 2 and one line."""
    done = subprocess.run(
        [sys.executable, "-m", "allranks.recording"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m allranks.recording")


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("module", ["allranks.recording", "allranks.launch.rank_entry"])
def test_a_script_that_raises_shows_its_own_frames_only(module: str, folder: Path, tmp_path: Path) -> None:
    """Ten frames of runpy and of this package stood before its line. Of one that cannot be compiled: its line."""
    shown = []
    for number, text in enumerate(("def train():\n    raise ValueError('x')\ntrain()", "def train(:")):
        script = tmp_path / f"train{number}.py"
        script.write_text(text)
        words = [sys.executable, "-m", module, str(script)]
        done = subprocess.run(words, env=_env(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 1
        shown.append([line for line in done.stderr.splitlines() if re.match("  File|[A-Z].*Error", line)])
    script = str(tmp_path / "train")
    assert shown[0] == [
        f'  File "{script}0.py", line 3, in <module>',
        f'  File "{script}0.py", line 2, in train',
        "ValueError: x",
    ]
    assert shown[1][0] == f'  File "{script}1.py", line 1' and shown[1][1].startswith("SyntaxError")


def test_the_recorders_names_need_no_torch_to_import() -> None:
    """`allranks.record` is the function of `allranks.recording`; no name imports torch."""
    code = (
        "import sys, allranks; f = allranks.record; import allranks.recording as m; assert f is m.record;"
        "allranks.step(1); allranks.Recorder; allranks.FlightRecorderHook;\n"
        "with allranks.expect('eval', up_to_s=1): pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr


def _marks(rank: int, world: int) -> list[object]:
    first = allranks.record()
    assert allranks.record() is first  # idempotent
    assert first.path is not None
    allranks.step(41, label="warm-up")
    before = time.time_ns()
    allranks.step(42)
    seen: list[object] = []
    with allranks.expect("checkpoint", up_to_s=300):
        inside = read_trace(first.path).progress
        seen += [inside.step, inside.phase, 299e9 < inside.expect_until_ns - before < 301e9]
    after = read_trace(first.path).progress
    seen += [after.phase, after.expect_until_ns, after.step_ns >= before]
    record.announce("leaving", up_to_s=120)
    last = read_trace(first.path).progress
    seen += [last.phase, last.expect_until_ns > before + 119e9]
    return seen


def test_steps_and_declared_silences_are_in_the_header(folder: Path) -> None:
    """What the agent reads to tell a hang from a long evaluation."""
    with Ranks(_marks, 1) as ranks:
        (seen,) = ranks.values()
    assert seen == [42, "checkpoint", True, "", 0, True, "leaving", True]


def _without_environment(rank: int, world: int) -> str:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    import torch
    import torch.distributed as dist

    recorder = allranks.record()
    assert recorder.rank == -1
    dist.all_reduce(torch.ones(1))
    return str(recorder.path)


def test_a_rank_that_the_environment_does_not_tell_is_learnt_from_the_first_group(folder: Path) -> None:
    """The header and the file name are put right."""
    with Ranks(_without_environment, 2) as ranks:
        paths = ranks.values()
    for rank, path in enumerate(paths):
        assert f".r{rank}." in Path(path).name
        header = read_header(path)
        assert (header.rank, header.world_size) == (rank, 2)


def test_settings_of_a_wrong_type_are_converted_or_ignored_with_a_warning(tmp_path: Path) -> None:
    """record() never raises for a setting: each bad one is named with its value, and the others are used."""
    given: dict[str, Any] = {
        "folder": str(tmp_path), "capacity": "64", "stack_depth": 4.0, "poll_s": 1, "dump_on": "exit",
        "job": 7, "heap_bytes": None, "rank": "first", "accelerate": "no", "world_size": 2.5, "color": "red", "attempt": True,
    }  # fmt: skip
    options, complaints = tolerant(given)
    assert (options.folder, options.capacity, options.stack_depth, options.poll_s) == (tmp_path, 64, 4, 1.0)
    assert options.dump_on == frozenset({"exit"})
    for name in ("job", "rank", "accelerate", "world_size", "color", "attempt"):
        assert len([text for text in complaints if f"record({name}=" in text or f"'{name}'" in text]) == 1
    assert len(complaints) == 6
    for name, bad in (
        ("capacity", 3),
        ("folder", 5),
        ("dump_on", {"lunch"}),
        ("poll_s", 0),
    ):
        options, complaints = tolerant({name: bad})
        assert getattr(options, name) == getattr(from_environment(), name)
        assert [name in text for text in complaints] == [True]


def _in_text(rank: int, world: int, folder: str) -> None:
    with pytest.warns(RuntimeWarning, match="record\\(capacity='many'\\) is ignored"):
        recorder = allranks.record(folder=folder, capacity="many")
    assert recorder.path is not None and recorder.path.parent == Path(folder)


def test_a_folder_may_be_text(tmp_path: Path) -> None:
    """As everywhere else in Python; a wrong setting beside it is one warning."""
    with Ranks(_in_text, 1, (str(tmp_path / "boxes"),), backend=None) as ranks:
        ranks.values()


def test_a_folder_that_cannot_be_used_is_replaced_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`allranks run` takes the default folder then; a wanted one that works is taken, and nothing is left in it."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "file").touch()
    folder, problem = files.usable_folder(tmp_path / "file" / "boxes", "job")
    assert folder == files.job_folder("job")
    assert str(tmp_path / "file" / "boxes") in problem and "Not a directory" in problem
    assert files.usable_folder(tmp_path / "mine", "job") == (tmp_path / "mine", "")
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_script_that_imported_the_recorder_can_be_sent_to_other_processes() -> None:
    """Ray and others pickle what a script's functions use, modules by their name."""
    assert pickle.loads(pickle.dumps(allranks.record)) is allranks.record
    assert pickle.loads(pickle.dumps(allranks.stacks)) is allranks.stacks
