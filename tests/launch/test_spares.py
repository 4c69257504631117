"""Warm processes: one becomes a rank with everything that the rank was promised, the others leave nothing behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.launch.rank_entry import FILE
from allranks.launch.spares import Spares

SCRIPT = """
import os, sys
print(sys.argv[1:], os.environ["RANK"], os.environ.get("ONLY_HERE"), __name__, os.getsid(0) == os.getpid(), "torch" in sys.modules)
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


def test_a_spare_becomes_the_rank_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, environment, output files, session and exit code are those of a rank started the ordinary way."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = (sys.executable, "-u", FILE, str(tmp_path / "script.py"), "--a", "b c")
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


FAILS_WHEN_TOLD = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["SPARE_FOLDER"])
if (folder / "fail").exists():
    sys.exit(3)
(folder / "imported").touch()
"""
WAITS = """
import os, pathlib, sys, time
while not (pathlib.Path(os.environ["SPARE_FOLDER"]) / "end").exists():
    time.sleep(0.02)
sys.exit(7)
"""


@pytest.mark.usefixtures("forks")
def test_a_spare_that_fails_to_start_does_not_end_running_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel ends a rank with the thread that started it: that thread outlives the failure of a later spare."""
    (tmp_path / "fails_when_told.py").write_text(FAILS_WHEN_TOLD)
    (tmp_path / "script.py").write_text(WAITS)
    for name, value in {
        "SPARE_FOLDER": str(tmp_path), "ALLRANKS_PRELOAD": "fails_when_told",
        "ALLRANKS_AGENT_PID": str(os.getpid()), "ALLRANKS_RECORD": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = (sys.executable, "-u", FILE, str(tmp_path / "script.py"))
    spares = Spares(delay_s=0.0)
    spares.start()
    assert spares._thread is not None
    try:
        assert spares.take(words, dict(os.environ), None, None) is None
        _wait_until((tmp_path / "imported").exists)
        (tmp_path / "fail").touch()
        _wait_until(lambda: bool(spares._idle))
        rank = spares.take(
            words, {k: v for k, v in os.environ.items() if k != "ALLRANKS_PRELOAD"}, None, None
        )
        assert rank is not None
        _wait_until(lambda: "ended: restarts will be slower" in caplog.text)
        spares._thread.join(0.5)
        (tmp_path / "end").touch()
        assert rank.wait(150) == 7
    finally:
        spares.close()
    assert not spares._thread.is_alive()


def _wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_unusual_command_is_left_alone() -> None:
    """Another interpreter, another program: the agent starts it itself."""
    spares = Spares()
    assert spares.take(("numactl", "python", "-u", FILE, "x.py"), {}, None, None) is None
