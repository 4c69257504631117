"""Warm processes: one becomes a rank with everything that the rank was promised, the others leave nothing behind."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from allranks.agent.spares import RANK_MODULE, Spares

pytestmark = pytest.mark.timeout(200)  # for hanging only

SCRIPT = """
import os, sys
print(sys.argv[1:], os.environ["RANK"], os.environ.get("ONLY_HERE"), __name__, os.getsid(0) == os.getpid(), "torch" in sys.modules)
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


def test_a_spare_becomes_the_rank_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, environment, output files, session and exit code are those of a rank started the ordinary way."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = (sys.executable, "-u", "-m", RANK_MODULE, str(tmp_path / "script.py"), "--a", "b c")
    files = [str(tmp_path / "out"), str(tmp_path / "err")]
    monkeypatch.setenv("ONLY_HERE", "agent")
    environment = {k: v for k, v in os.environ.items() if k != "ONLY_HERE"}
    environment.update({"RANK": "3", "ALLRANKS_AGENT_PID": str(os.getpid()), "ALLRANKS_RECORD": "0"})
    spares = Spares(delay_s=0.0)
    spares.start()
    try:
        assert spares.take(words, environment, *files) is None, (
            "nothing is warm yet; one is made for next time"
        )
        deadline = time.monotonic() + 150
        while (process := spares.take(words, environment, *files)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert process.wait(150) == 7
    finally:
        spares.close()
    assert Path(files[0]).read_text().split("] ")[1].split() == ["3", "None", "__main__", "True", "True"]
    assert Path(files[0]).read_text().startswith("['--a', 'b c']")
    assert "to stderr" in Path(files[1]).read_text()
    assert spares.used == 1


def test_an_unusual_command_is_left_alone() -> None:
    """Another interpreter, another program: the agent starts it itself."""
    spares = Spares()
    assert spares.take(("numactl", "python", "-u", "-m", RANK_MODULE, "x.py"), {}, None, None) is None
