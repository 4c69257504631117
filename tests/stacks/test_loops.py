"""Loops without end on several lines: moving between its lines does not count as progress; a loop that computes moves."""

from __future__ import annotations

import gc
import os
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.stacks.test_process_tree import look_at, running

from allranks.diagnosis.process_verdict import explain_processes
from allranks.model.stacks import StackFrame, StacksReport, ThreadStack
from allranks.stacktraces import CollectOptions, Selection, classify, collect, find_targets, source
from allranks.stacktraces.collect import SourceLines
from allranks.stacktraces.debuggers import find_pyspy
from allranks.stacktraces.variables import Variables, counted

needs_pyspy = pytest.mark.skipif(find_pyspy() is None, reason="py-spy is not installed")

LOOPS = """
while True:
    pass
while not flag.value:
    time.sleep(0.001)
while True:
    seen = ring[0]
    if seen != last:
        break
while True:
    count += 1
while left > 0:
    left = left // 2
while True:
    ring[0] = 1
while time.monotonic() < end:
    pass
while not step():
    pass
while True:
    item = queue.get_nowait()
while True:
    for item in items:
        pass
while True:
    print("alive")
"""


@pytest.mark.parametrize(
    ("line", "first"),
    [(3, 2), (5, 4), (8, 6), (11, 0), (13, 0), (15, 0), (17, 0), (19, 0), (21, 0), (24, 0), (26, 0)],
)
def test_a_loop_that_changes_nothing_is_known_by_its_source(line: int, first: int) -> None:
    assert source.idle_loop(LOOPS, line) == first


def test_a_number_around_such_a_loop_is_progress(tmp_path: Path) -> None:
    """The third step of a loop of steps, each of which waits for memory to change."""
    path = tmp_path / "job.py"
    path.write_text("def f(ring):\n    for step in range(9):\n        while not ring[0]:\n            pass\n")
    inner = ThreadStack(7, "", (StackFrame("f", str(path), 4), StackFrame("<module>", str(path), 9)))
    stacks = SourceLines().attach((inner,), os.getpid())
    now, called = {7: Variables(plain=((("step", "3"),), ()))}, Variables(plain=((), (("step", "3"),), ()))
    assert counted(stacks, {7: Variables(plain=((("step", "2"),), ()))}, now) == {7}
    assert counted(stacks, {7: called}, now) == set()  # it had called something


SPIN = """
    import os, signal, sys, threading

    def endless():
        while True:
            pass

    def flag():
        done = threading.Event()
        while not done.is_set():
            pass

    def computes():
        low, high = 1, 2
        while True:
            low, high = high, low + high
            if high > 10**400:
                low, high = 1, 2

    print("ready")
    {name}()
    """


@needs_pyspy
@pytest.mark.parametrize(
    ("name", "state"), [("endless", "unclear"), ("flag", "unclear"), ("computes", "moving")]
)
def test_an_endless_loop_on_two_lines_is_not_called_moving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str
) -> None:
    """As a process of a job of several roles, and as a rank."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with running(tmp_path, textwrap.dedent(SPIN).replace("{name}", name)) as job:
        look = look_at(job.pid)
        report = _rank(job.pid)
    found = explain_processes(look)
    if state == "unclear":
        assert found.state == state and "in a loop that changes nothing" in found.sentence, found
        assert report.hung is None and "same line" in report.reason, report
    else:
        assert found.state != "stuck" and report.hung is not True, (found, report)


def _rank(pid: int) -> StacksReport:
    targets = find_targets(Selection(pids=(pid,)))
    return classify(collect(targets, CollectOptions(interval_s=1.0, rounds=3)))


def test_threads_may_read_sources_at_the_same_time() -> None:
    """A garbage collection while Python 3.11 parses lets another thread parse, and one of the two gets a SystemError."""
    body = "    for x in a:\n        if x:\n            while True:\n                y = [[(x + 1) * [a[0]][0]]]\n"
    texts = ["".join(f"def f{number}_{text}(a):\n{body}" for number in range(40)) for text in range(64)]
    before, switch = gc.get_threshold(), lambda *_: time.sleep(0)
    gc.callbacks.append(switch)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(lambda text: source.only_sleeps(text, 4), texts)) == {False}
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(switch)
