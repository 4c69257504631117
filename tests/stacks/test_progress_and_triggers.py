"""Stuck, slow or moving, and when to collect: decisions over marks, NCCL's counts and options."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.errors import ConfigurationError
from allranks.model.debug_options import (
    DebugOptions,
    parse_debug,
    read_debug_options,
)
from allranks.model.stacks import (
    Capture,
    Mark,
    RankMarks,
    RasReply,
)
from allranks.stacktraces import Stillness, classify, procfs, ras, read_capture
from allranks.stacktraces.progress import decide_progress
from allranks.watch.samples import RankSample
from allranks.watch.sidecar import Sidecar

CASES = Path(__file__).parent / "cases"
RAS = """Job summary
===========
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    0         1         1         2         2         2   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation {behind} -- GPU 3 managed by process 4711 on node node1
"""


def _timed(rank: int, times: list[float], seen: float, **more: object) -> RankMarks:
    return RankMarks(rank, tuple(Mark(t, i) for i, t in enumerate(times)), seen, **more)  # type: ignore[arg-type]


def test_shortly_after_the_last_progress_the_answer_says_when_to_ask_again() -> None:
    """Steps of 1 s, silent for 6 of 10 s; steps of 2 s; a pause that was declared."""
    decide = lambda *marks: decide_progress({m.rank: m for m in marks}, {}, {}, Stillness())  # noqa: E731
    first = decide(_timed(0, [float(second) for second in range(100)], 105.0))
    text = "the last progress was 6 s ago, and silence is a hang after 10 s here: ask again in 5 s"
    assert (first.hung, first.reason) == (None, text)
    slow = decide(_timed(0, [2.0 * step for step in range(20)], 46.0))
    assert (slow.hung, slow.reason.rsplit(": ", 1)[1]) == (None, "ask again in 3 s")
    declared = decide(_timed(0, [1.0, 2.0], 20.0, expect_until_s=50.0))
    assert (declared.hung, declared.reason) == (None, "rank 0 declared a pause: ask again in 31 s")


def test_the_clock_decides_where_it_is_known() -> None:
    """Old marks: hung; new ones: not; fresh but silent: cannot tell; a declared silence is not a hang."""
    steps = [float(second) for second in range(100)]
    decide = lambda *marks: decide_progress({m.rank: m for m in marks}, {}, {}, Stillness())  # noqa: E731
    assert decide(_timed(0, steps, 160.0)).hung is True
    assert decide(_timed(0, steps, 100.5)).hung is False
    assert decide(_timed(0, steps, 100.5)).reason == "the rank makes progress"
    assert decide(_timed(0, steps, 160.0)).reason == "1 of 1 rank made no progress for 61 s"
    assert decide(_timed(0, steps, 106.0)).hung is None
    assert decide(_timed(0, steps, 160.0, expect_until_s=500.0)).hung is None
    slow = [30.0 * number for number in range(10)]
    assert decide(_timed(0, slow, 270.0 + 45.0)).hung is not True
    assert decide().hung is None


def _replies(first: int, last: int, apart_s: float = 30.0) -> tuple[RasReply, RasReply]:
    return (
        RasReply("a", 100.0, RAS.replace("{behind}", str(first))),
        RasReply("a", 100.0 + apart_s, RAS.replace("{behind}", str(last))),
    )


def test_only_what_ras_says_twice_is_told() -> None:
    """Different operation counts for a moment are normal; the same ones twice name the rank that is behind."""
    assert ras.find_laggards(_replies(60, 63)) == ()
    assert ras.find_laggards(_replies(60, 60)[:1]) == ()
    behind = ras.find_laggards(_replies(60, 60))
    assert [(one.rank, one.pid, one.operation) for one in behind] == [(7, 4711, 60)]
    assert (
        "rank 7 (process 4711) has launched up to operation 60, others up to 64"
        in ras.describe(_replies(60, 60))[0]
    )


def test_operation_counts_stand_in_for_marks() -> None:
    """Without marks, counts that do not change for long enough mean hung; moving ones mean not; the process is named."""
    waiting = read_capture(CASES / "victims" / "hang_all.json").processes
    processes = (replace(waiting[0], pid=1), replace(waiting[1], pid=4711))
    hung = classify(Capture(processes, ras=_replies(60, 60)))
    assert (hung.hung, hung.culprits) == (True, (1,))
    assert classify(Capture(processes, ras=_replies(60, 63))).hung is False
    early = classify(Capture(processes, ras=_replies(60, 60, apart_s=1.0)))
    assert early.hung is None and early.culprits == (1,)


def test_who_watches_the_job_knows_better_than_counts_and_marks_whether_it_moves() -> None:
    """The agent has seen no step for a while: what the ranks do is not called slow or healthy then."""
    processes = read_capture(CASES / "victims" / "hang_all.json").processes
    found = classify(Capture(processes, ras=_replies(60, 63)), quiet_s=7.0)
    assert found.hung is True and "no rank has made progress for 7 s" in found.reason
    assert {state.cause for state in found.ranks.values()} == {"collective_wait"}


def test_a_job_that_builds_an_extension_is_not_called_hung() -> None:
    """A compiler works for rank 0, rank 1 waits for its lock; without the compiler's CPU time the same is a hang."""
    capture = read_capture(CASES / "victims" / "deepspeed_build.json")
    found = classify(capture)
    assert found.hung is None and "rank 0 waits for a command that works" in found.sentence
    idle = replace(capture, processes=tuple(p for p in capture.processes if "cc1plus" not in p.title))
    assert classify(idle).hung is True and classify(idle).culprits == (0, 1)


def test_ras_is_asked_over_tcp_and_silence_is_no_error() -> None:
    """The service answers and closes; where nobody listens there is simply no answer."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(100))
                connection.sendall(RAS.encode())

        thread = threading.Thread(target=serve, name="ras")
        thread.start()
        reply = ras.ask(f"127.0.0.1:{port}")
        thread.join()
    assert reply is not None and reply.text == RAS
    assert asked == [b"VERBOSE STATUS\n"]
    assert ras.ask(f"127.0.0.1:{port}") is None


RAS_SERVER = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
while True:
    with server.accept()[0] as connection:
        connection.recv(100)
        connection.sendall(b"counts")
"""


def test_the_ras_service_of_another_job_at_the_same_port_is_not_asked() -> None:
    """NCCL listens at one port, whichever job comes first: its counts move while ours hang."""
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RAS_SERVER!r}])",
        ],
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdout is not None
        address = f"127.0.0.1:{int(agent.stdout.readline())}"
        (rank,) = procfs.descendants(agent.pid)
        try:
            assert ras.ask(address, of=[os.getpid()]) is None
            reply = ras.ask(address, of=[rank])
            assert reply is not None and reply.text == "counts"
        finally:
            os.kill(rank, signal.SIGKILL)
            agent.wait()


def collected(
    options: DebugOptions, samples: Callable[[int], list[RankSample]], seconds: int
) -> dict[int, str]:
    """When `allranks watch` collects, and why, for what it sees each second."""
    sidecar = Sidecar(options, Path())
    reasons = {second: sidecar._decide(float(second), samples(second)) for second in range(seconds)}
    return {second: reason for second, reason in reasons.items() if reason}


def sample(rank: int = 0, step: int = 1, **facts: object) -> RankSample:
    return RankSample(rank, 100 + rank, "", **{"alive": True, "step": step, "calls_started": step,
                      "calls_completed": step, "last_ns": 0, "start_ns": 1, **facts})  # type: ignore[arg-type]  # fmt: skip


def test_a_standstill_is_collected_at_the_limit_and_again_later() -> None:
    """With growing pauses, three times; progress starts over."""
    options = DebugOptions(wait_s=0, no_progress_s=10, repeats=3, rank_lost=False)
    fired = collected(options, lambda second: [sample(step=1 if second < 100 else 2)], 200)
    assert list(fired) == [10, 20, 30, 110, 120, 130]
    assert fired[20] == "no progress for 20 s"


def test_collections_by_time_and_by_loss_and_none_in_an_announced_phase() -> None:
    """Each says its reason."""
    options = DebugOptions(wait_s=5, at_s=(8.0,), no_progress_s=30)
    busy = time.time_ns() + 10**15
    fired = collected(
        options, lambda second: [sample(0, expect_until_ns=busy), *([sample(1)] if second < 60 else [])], 120
    )
    wanted = {5: "5 s after the start", 8: "8 s after the start", 60: "rank 1 ended while 1 others run"}
    assert fired == wanted


def test_a_collection_at_a_set_time_waits_for_the_first_rank() -> None:
    """A job that starts slowly: otherwise nothing was collected, then or later."""
    options = DebugOptions(wait_s=2, no_progress_s=0)
    assert collected(options, lambda second: [sample()] if second >= 9 else [], 20) == {
        9: "2 s after the start"
    }


def test_the_debug_section_is_read_as_people_know_it(tmp_path: Path) -> None:
    """enabled, wait_seconds and output_dir, plus the triggers; mistakes are named."""
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: x\ndebug:\n  enabled: true\n  wait_seconds: 120\n  triggers: {no_progress_seconds: 30, at_seconds: [60]}\n"
    )
    options = read_debug_options(file)
    assert options.fixed_points() == (60.0, 120.0)
    assert options.no_progress_s == 30.0
    assert options.folder({"LOG_DIR": "/logs"}) == Path("/logs/backtraces")
    with pytest.raises(ConfigurationError, match=r"debug\.wait_second is unknown"):
        parse_debug({"wait_second": 1})
    with pytest.raises(ConfigurationError, match=r"debug\.enabled is 'maybe'"):
        parse_debug({"enabled": "maybe"})
    with pytest.raises(ConfigurationError, match=r"wait_seconds .* must not be negative"):
        parse_debug({"wait_seconds": -1})
    with pytest.raises(
        ConfigurationError, match=r"patterns: '\(\[' is not a regular expression: unterminated"
    ):
        parse_debug({"patterns": ["worker", "(["]})
