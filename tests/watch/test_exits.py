"""How processes end: what counts as a death, which of several was the first, and that no ending is missed."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.blackbox import header
from allranks.blackbox.header import process_state
from allranks.blackbox.layout import wakeup_address
from allranks.watch.exits import Death, Ending, ExitWatcher, find_deaths, find_first
from allranks.watch.samples import read_samples
from boxes import write_box

GONE = 2**22  # no process has such a number


def found(folder: Path, endings: dict[int, Ending]) -> dict[int, str]:
    """Rank -> how it died."""
    return {death.rank: death.reason for death in find_deaths(read_samples(folder), endings, since_ns=1)}


@contextlib.contextmanager
def watched(program: str = "input()") -> Iterator[tuple[ExitWatcher, subprocess.Popen[bytes]]]:
    """A watcher, and a child that runs until it is told to end."""
    lines = ExitWatcher()
    lines.start()
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        yield lines, child
    finally:
        child.kill()
        child.communicate()
        lines.close()


def test_a_death_is_told_from_an_end_that_was_asked_for(tmp_path: Path) -> None:
    """A signal, a code and an exception are deaths; SIGTERM, code 0 and a rank that lives on are not."""
    write_box(tmp_path, 0, 5)
    codes = {1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: 0, 4: 3}
    for rank in codes:
        write_box(tmp_path, rank, 5, pid=GONE + rank)
    write_box(tmp_path, 5, 5, closed=b"exception: ValueError (train.py:44): bad batch", closed_ns=10**9)
    write_box(tmp_path, 6, 5, closed=b"exception: KeyboardInterrupt: ", closed_ns=10**9)
    write_box(tmp_path, 7, 5, pid=GONE + 7)
    write_box(tmp_path, 8, 5, closed=b"exit code 3 (sys.exit at train.py:8)", closed_ns=10**9)
    write_box(tmp_path, 9, 5, closed=b"exit code 143 (sys.exit at train.py:8)", closed_ns=10**9)
    endings = {GONE + rank: Ending(GONE + rank, code, 1.0) for rank, code in codes.items()}
    assert found(tmp_path, endings) == {
        1: "died of SIGKILL", 4: "exited with code 3", 5: "raised ValueError", 7: "exited without shutting down",
        8: "exited with code 3 (sys.exit)",
    }  # fmt: skip


def test_who_only_echoes_another_end_is_not_the_first() -> None:
    """A broken connection is reported earlier than the death that broke it was seen, and is still not the cause."""
    echo = Death(0, 10, 1.0, "raised RuntimeError", "", "Connection closed by peer", secondary=True)
    cause = Death(2, 12, 1.2, "died of SIGKILL")
    later = Death(1, 11, 1.5, "raised ValueError")
    assert find_first([echo, later, cause]) == cause
    assert find_first([echo]) == echo
    assert find_first([]) is None


def test_a_pidfd_or_a_wakeup_ends_the_wait_and_tells_how_a_child_ended() -> None:
    """No polling: with an hour to wait both come back at once, and the code is left for the parent's own wait."""
    with watched() as (lines, child):
        lines.hold([child.pid])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
            rank.sendto(b"!", wakeup_address(os.getpid()))
        lines.wait(3600)
        assert not lines.endings
        child.kill()
        lines.wait(3600)
        assert lines.endings[child.pid].words == "died of SIGKILL"
        assert child.wait() == -signal.SIGKILL


def test_how_a_rank_ended_is_known_also_when_its_box_was_read_first() -> None:
    """A segmentation fault between two turns of the watch was "exited without shutting down"."""
    with watched() as (lines, child):
        lines.hold([child.pid])
        child.send_signal(signal.SIGSEGV)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        lines.note_dead([child.pid, os.getpid()])
        assert {pid: end.words for pid, end in lines.endings.items()} == {child.pid: "died of SIGSEGV"}


_LEADER_FIRST = """
import ctypes, os, platform, signal, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(1), os.kill(os.getpid(), signal.SIGSEGV))).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # ends this thread alone
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the number of the system call")
def test_how_a_rank_ended_is_known_also_when_its_first_thread_ends_before_the_others() -> None:
    """Its box says dead then, and nothing tells how: a segmentation fault was "exited without shutting down"."""
    with watched(_LEADER_FIRST) as (lines, child):
        lines.hold([child.pid])
        while process_state(child.pid) != "Z":
            time.sleep(0.01)
        assert lines.note_dead([child.pid]) == {child.pid}
        assert not lines.endings
        assert child.stdin is not None
        child.stdin.write(b"!")
        child.stdin.flush()
        lines.wait(3600)
        assert {pid: end.words for pid, end in lines.endings.items()} == {child.pid: "died of SIGSEGV"}


@pytest.mark.parametrize("held", [True, False])
def test_how_a_rank_ended_is_known_also_when_the_launcher_has_waited_for_it_first(held: bool) -> None:
    """torchrun polls its ranks ten times a second. On a busy node it was there before the watch: "exited without shutting down"."""
    with watched() as (lines, child):
        if held:
            lines.hold([child.pid])
        lines.know(child)
        child.send_signal(signal.SIGSEGV)
        assert child.wait() == -signal.SIGSEGV
        assert not lines.note_dead([child.pid])
        assert {pid: end.words for pid, end in lines.endings.items()} == {child.pid: "died of SIGSEGV"}


_AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
door = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
door.sendto(b"!", "\\0" + sys.argv[1])
"""


@pytest.mark.needs_root
def test_another_user_cannot_end_the_wait() -> None:
    """Abstract sockets have no owner: anyone who sends without pause would keep the agent reading boxes without pause."""
    lines = ExitWatcher()
    lines.start()
    try:
        unknown = [sys.executable, "-c", _AS_NOBODY, wakeup_address(os.getpid())[1:]]
        assert subprocess.run(unknown, check=False).returncode == 0
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]) as child:
            lines.hold([child.pid])
            lines.wait(3600)
            assert lines.endings[child.pid].words == "exited with code 0"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rank:
            rank.sendto(b"!", wakeup_address(os.getpid()))
        lines.wait(3600)  # it is heard again
    finally:
        lines.close()


@pytest.mark.parametrize(
    ("state", "flags", "told"),
    [("D", 0x40040C, "X"), ("S", 0x400400, "S"), ("Z", 0x40040C, "Z"), ("T", 0x400000, "T")],
)
def test_a_process_that_the_kernel_takes_down_does_not_run_any_more(
    monkeypatch: pytest.MonkeyPatch, state: str, flags: int, told: str
) -> None:
    """Killed with a GPU's memory it is not a zombie for half a second, and was called cut off from the network."""
    fields = [state, "1", "1", "1", "0", "-1", str(flags), *["0"] * 40]
    monkeypatch.setattr(header, "process_stat", lambda pid: fields)
    assert header.process_state(4711) == told


def test_a_rank_that_gave_up_after_another_had_gone_is_not_the_first(tmp_path: Path) -> None:
    """Its program caught the error and called sys.exit(1): that says as little of the cause as the error itself."""
    closed = b"exit code 1 (sys.exit at train.py:9): after RuntimeError: Connection closed by peer [::1]:4711"
    write_box(tmp_path, 0, 5, exit_message=closed, closed=closed[:63], closed_ns=10**9)
    write_box(tmp_path, 1, 5, closed=b"exit code 2 (sys.exit at train.py:7): no data", closed_ns=2 * 10**9)
    deaths = find_deaths(read_samples(tmp_path), {}, since_ns=1)
    assert [death.secondary for death in deaths] == [True, False]
    first = find_first(deaths)
    assert first is not None
    assert first.sentence == "rank 1 exited with code 2 (sys.exit) at train.py:7: no data"


def test_a_message_of_several_lines_is_one_line_of_the_sentence() -> None:
    """torch's pipelining begins its message with a line break, and announces the cause by a colon."""
    death = Death(2, 7, 1.0, "raised RuntimeError", "train.py:26", "Failed to run stage:\n    Output: None\n")
    assert death.sentence == "rank 2 raised RuntimeError at train.py:26: Failed to run stage: Output: None"
