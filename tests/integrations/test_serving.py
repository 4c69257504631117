"""The serving example: which processes of an sglang- or vLLM-like server are ranks, and what a hang of one looks like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allranks.stacktraces import CollectOptions, classify, collect
from allranks.stacktraces.find import Selection, find_targets

SERVER = Path(__file__).parents[2] / "examples" / "serving" / "server.py"


@pytest.mark.parametrize(
    "kind, titles", [("sglang", "^sglang::scheduler_TP[01]$"), ("vllm", "^VLLM::Worker_TP[01]$")]
)
def test_the_rank_that_hangs_in_a_server_is_named_with_its_line(kind: str, titles: str) -> None:
    """The other one waits for it in a collective; routers, detokenizers and API servers are not ranks."""
    pytest.importorskip("setproctitle", reason="setproctitle is not installed")
    server = subprocess.Popen([sys.executable, str(SERVER), kind, "hang"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        pids = [int(word) for word in server.stdout.readline().split()[1:]]
        for _ in range(30):  # until both have come to the fourth request
            report = classify(
                collect(find_targets(Selection(pids=tuple(pids))), CollectOptions(interval_s=1.0))
            )
            if report.ranks[0].cause == "collective_wait" and report.ranks[1].cause == "sleep":
                break
        assert [target.pid for target in find_targets(Selection(name=titles)) if target.pid in pids] == pids
        assert set(pids) <= {target.pid for target in find_targets(Selection())}
        assert report.culprits == (1,), report
        assert "load_adapter" in report.ranks[1].where and "server.py" in report.ranks[1].where
    finally:
        server.terminate()
        server.communicate(timeout=30)
