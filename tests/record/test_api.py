"""The ways to start recording, and what the progress mark tells."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import allranks
from allranks import record
from allranks.blackbox.reader import find_boxes, read_header, read_trace
from allranks.drill.ranks import Ranks, free_port

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
        "MASTER_PORT": str(free_port()),
    }


def test_the_wrapper_records_a_script_that_knows_nothing_of_us(folder: Path, tmp_path: Path) -> None:
    """It sees its own arguments and import path; its line is on the recorded stack."""
    script = tmp_path / "plain.py"
    script.write_text(PLAIN)
    words = [sys.executable, "-m", "allranks.record", str(script), "--lr", "1"]
    done = subprocess.run(words, env=_env(), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"['--lr', '1'] {tmp_path}"
    (box,) = find_boxes(folder)
    trace = read_trace(box)
    assert [frame.name for frame in trace.stacks[int(trace.calls[0]["stack"])]][:2] == ["train", "<module>"]
    assert trace.header.versions[-1][0] == "torch"


def test_the_wrapper_without_a_script_says_how_to_use_it() -> None:
    """Exit code 2 and one line."""
    done = subprocess.run(
        [sys.executable, "-m", "allranks.record"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m allranks.record")


def test_record_is_a_module_and_a_function_and_needs_no_torch_to_import() -> None:
    """`allranks.record()` and `allranks.record.step` both work; neither name imports torch."""
    code = (
        "import sys, allranks; f = allranks.record; import allranks.record as m; assert f is m and callable(m);"
        "allranks.step(1); allranks.Recorder; allranks.FlightRecorderHook;\n"
        "with allranks.expect('eval', up_to_s=1): pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
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


def test_steps_and_declared_silences_are_in_the_header(folder: Path, engine: str) -> None:
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
