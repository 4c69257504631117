"""How long a system call may last: from its arguments, and from the memory of a real process."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from allranks.model.stacks import ThreadFacts
from allranks.stacktraces.procfs import parse_facts, read_facts, turns_of_threads
from allranks.stacktraces.wait_limits import FOR_EVER, wait_limit_s


@pytest.mark.parametrize(
    ("name", "args", "limit_s"),
    [
        ("poll", (1, 1, 5000), 5.0),
        ("poll", (1, 1, 0xFFFFFFFF), FOR_EVER),
        ("epoll_wait", (3, 1, 1, 0xFFFFFFFFFFFFFFFF), FOR_EVER),
        ("nanosleep", (64, 0), 7.0),
        ("pselect6", (0, 0, 0, 0, 0), FOR_EVER),
        ("futex", (1, 0x80, 0, 0), FOR_EVER),
        ("futex", (1, 0x80, 0, 64), 7.0),
        ("futex", (1, 0x81, 0, 0), None),  # it wakes another
        ("recvfrom", (4,), FOR_EVER),
        ("clock_nanosleep", (1, 0, 64), 7.0),
        ("clock_nanosleep", (1, 1, 64), 0.0),  # until 7 s after the start of this machine
        ("ioctl", (1, 2), None),
        ("poll", (), None),
    ],
)
def test_the_limit_is_in_the_arguments(name: str, args: tuple[int, ...], limit_s: float | None) -> None:
    assert wait_limit_s(name, args, lambda address: 7.0 if address == 64 else None) == limit_s


@pytest.mark.parametrize(
    ("program", "least_s", "most_s"),
    [
        ("import time; time.sleep(500)", 300, 500),
        ("import threading; threading.Event().wait(400)", 200, 400),
        ("import threading; threading.Event().wait()", FOR_EVER, FOR_EVER),
        ("import subprocess; subprocess.run(['sleep', '60'])", FOR_EVER, FOR_EVER),
    ],
)
def test_the_limit_of_a_live_thread_is_read_without_its_help(
    program: str, least_s: float, most_s: float
) -> None:
    """A sleep that ends in minutes and one that never ends have the same stack."""
    script = f"import os, sys; print(1, flush=True); {program}"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            main = ThreadFacts(0)
            while main.wait_s is None or not main.switches or main.syscall in ("read", "openat"):
                time.sleep(0.05)
                main = parse_facts(json.dumps(read_facts(process.pid))).threads[0]
            assert least_s <= main.wait_s <= most_s
        finally:
            process.kill()


def test_a_thread_that_waits_is_given_no_processor() -> None:
    """By schedstat, else by the context switches: one that has run since is told from one that has not."""
    script = "import sys\nfor line in sys.stdin: print(line, flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-u", "-c", script], text=True, **pipes) as process:  # type: ignore[call-overload]
        seen = []
        for _ in range(2):
            process.stdin.write("x\n")
            process.stdin.flush()
            process.stdout.readline()
            before, now = {}, {0: 0}
            while before != now:  # until it waits again
                time.sleep(0.1)
                before, now = now, turns_of_threads(process.pid)
            seen.append(now)
        process.kill()
    assert seen[0].keys() == seen[1].keys() == {process.pid}
    assert seen[1][process.pid] > seen[0][process.pid] > 0
    assert turns_of_threads(process.pid) == {}


@pytest.mark.parametrize(
    ("program", "file"),
    [
        ("import asyncio; asyncio.run(asyncio.Event().wait())", "epoll 1"),
        ("import os; os.read(os.pipe()[0], 1)", "pipe:"),
        ("import socket; mine, theirs = socket.socketpair(); mine.recv(1)", "socket:"),
        ("import threading; threading.Event().wait()", ""),
    ],
)
def test_what_a_live_thread_waits_on(program: str, file: str) -> None:
    """A command that reads a pipe and one that reads from another machine are both in a system call without limit."""
    script = f"import os, sys; print(1, flush=True); {program}"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            main, before = ThreadFacts(0), ThreadFacts(1)
            while main.wait_s is None or main.syscall in ("openat", "wait4") or main != before:
                assert process.poll() is None
                time.sleep(0.1)
                before, main = main, parse_facts(json.dumps(read_facts(process.pid))).threads[0]
            assert main.file.startswith(file) and bool(main.file) == bool(file)
        finally:
            process.kill()


def test_a_wait_that_an_alarm_may_end_has_no_known_limit() -> None:
    """A program puts a limit of its own around calls that have none: nothing shows when the alarm comes."""
    program = "import signal, threading; signal.signal(signal.SIGALRM, print); threading.Event().wait()"
    script = f"import os, sys; print(1, flush=True); {program}"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            main = ThreadFacts(0)
            while main.syscall != "futex":
                time.sleep(0.05)
                main = parse_facts(json.dumps(read_facts(process.pid))).threads[0]
            assert main.wait_s is None
        finally:
            process.kill()
