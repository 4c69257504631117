"""Whatever of ours fails beside the collectives of a program and at its end: it computes, says and returns the same as alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, os, sys, warnings
import torch
import torch.distributed as dist
import allranks
from allranks.blackbox import phases
from allranks.recording import hook, recorder, side_thread, stack

def broken(*_, **__):
    open(os.environ["FIRED"], "w").close()
    raise LookupError("a bug of ours")

what, end = sys.argv[1:3]
warnings.simplefilter("ignore")
if what:
    owner, _, name = what.rpartition(".")
    setattr(eval(owner), name, broken)
    allranks.record()
dist.init_process_group("gloo", init_method=sys.argv[3], rank=0, world_size=1)
torch.manual_seed(3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
with allranks.expect("load", up_to_s=5.0):
    model(torch.ones(1, 4)).sum().backward()
allranks.step(1, loss=1.0, tokens=2.0)
gc.collect()
child = os.fork()
if child == 0:
    os._exit(7 if model.module.weight.grad.sum() > 0 else 8)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(model.module.weight.grad.tolist(), model.module.weight.tolist())
dist.destroy_process_group()
if end == "raises":
    raise ValueError("of the program")
sys.exit(int(end))
"""

FAULTS = {
    "side_thread.SideThread._note_exception": "raises",
    "side_thread.SideThread._close": "0",
    "side_thread.SideThread._dump": "raises",
    "recorder.Recorder.abandon_in_child": "0",
    "recorder.Recorder.close": "3",
    "phases._mark": "0",
    "recorder.phases.begin": "0",
}


def _run(folder: Path, what: str, end: str) -> tuple[int, str, str]:
    """(exit code, output, errors)"""
    env = {**os.environ, "ALLRANKS_DIR": str(folder / "boxes"), "ALLRANKS_DUMP_ON": "exception,exit"}
    words = [sys.executable, "-c", PROGRAM, what, end, f"file://{folder}/{what or 'alone'}{end}"]
    env["FIRED"] = str(folder / "fired")
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("end", ["0", "3", "raises"])
def test_a_fault_of_ours_beside_the_collectives_changes_nothing(
    end: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The output has every bit of the gradients and the weights, and the exit code of a forked child."""
    if end != "raises":  # Python itself calls the hook of an exception
        request.getfixturevalue("forks")
    alone = _run(tmp_path, "", end)
    for what in (name for name, its_end in FAULTS.items() if its_end == end):
        found = _run(tmp_path, what, end)
        assert (tmp_path / "fired").exists(), f"{what} was not reached"
        (tmp_path / "fired").unlink()
        assert found[:2] == alone[:2], (what, found)
        if end == "raises":
            assert "excepthook" not in found[2]
            assert found[2].count("ValueError: of the program") == 1, found[2]
