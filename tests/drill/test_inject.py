"""What is preloaded into the ranks of a drill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.drill.run import find_identical, read_marks

pytestmark = pytest.mark.usefixtures("forks")

SPARE = """
import os
import signal
import allranks.drill.preload as inject          # a warm process imports this before it knows its rank
os.environ["RANK"] = "2"
from allranks.recording.options import RecorderOptions
from allranks.recording.recorder import Recorder
Recorder(RecorderOptions(enabled=False)).step(7)
"""


def test_a_warm_process_marks_steps_under_the_rank_that_it_becomes(tmp_path: Path) -> None:
    """Its marks and its faults are those of rank 2, not of whatever it was before."""
    (tmp_path / "plan.json").write_text(
        json.dumps({"faults": [{"kind": "exit", "rank": 2, "at_step": 7, "for_s": 0}]})
    )
    environment = {**os.environ, "ALLRANKS_DRILL": str(tmp_path)}
    environment.pop("RANK", None)
    done = subprocess.run([sys.executable, "-c", SPARE], env=environment, check=False, timeout=300)
    assert done.returncode == 3
    assert [mark["step"] for mark in read_marks(tmp_path)[2]] == [7]
    assert json.loads((tmp_path / "fired.0").read_text())["rank"] == 2


def test_replicas_are_compared_by_what_they_report_of_the_same_part_and_step() -> None:
    """The script's own digest and the fingerprint of its parameters are never compared with each other."""
    same = {
        0: [{"at_step": 1, "state": "a"}, {"at_step": 1, "digest": "x"}],
        1: [{"at_step": 1, "state": "a"}],
    }
    assert find_identical(same) is True
    shards = {0: [{"at_step": 1, "state": "a", "part": 0}], 1: [{"at_step": 1, "state": "b", "part": 1}]}
    assert find_identical(shards) is None
    assert find_identical({**same, 2: [{"at_step": 1, "state": "b"}]}) is False


CUT_OFF = """
import os, subprocess
from allranks.drill.self_faults import inject
subprocess.Popen(["cat"])                        # a helper, as the liveness proxy is one
inject("partition", 0.2)
os.kill(os.getpid(), 9)
"""


def test_helpers_of_a_rank_that_dies_while_it_is_cut_off_run_again() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", CUT_OFF],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, _ = rank.communicate(b"the helper runs", timeout=300)  # until the helper has read its end, too
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    assert rank.returncode == -signal.SIGKILL and out == b"the helper runs"
