"""Nodes are remembered across jobs; whatever happens to the database, no training notices."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.ledger.history import (
    BadNode,
    HistoryWriter,
    NodeEvent,
    NodeHistory,
    default_place,
    judge_nodes,
    known_bad,
    outage_events,
)
from allranks.ledger.records import Outage

NOW = 1_790_000_000.0
DAY = 86400.0


def event(node: str, job: str, days_ago: float, cause: str = "rank_died") -> NodeEvent:
    return NodeEvent(node, job, NOW - days_ago * DAY, cause, "rank 3 died of SIGKILL")


def judged(events: list[NodeEvent], nodes: int = 20) -> list[BadNode]:
    return judge_nodes(events, [f"n{number}" for number in range(nodes)], NOW)


def test_a_node_that_fails_again_and_again_is_bad_with_a_reason() -> None:
    found = judged(
        [event("n3", "j1", 1), event("n3", "j2", 2, "gpu_lost"), event("n3", "j2", 3), event("n5", "j2", 2)]
    )
    assert [one.node for one in found] == ["n3"]
    assert found[0].confidence == 0.99
    assert found[0].reason == "3 incidents in 2 jobs (2 x rank died, 1 x gpu lost); other nodes have 0.1"


def test_one_failure_or_failures_everywhere_accuse_nobody() -> None:
    assert judged([event("n3", "j1", 1)]) == []
    assert judged([event(f"n{n}", f"j{k}", k) for n in range(20) for k in range(3)]) == []


def test_the_only_node_there_is_cannot_be_compared() -> None:
    """On a laptop or a single machine every incident is of the same node."""
    assert judge_nodes([event("n3", f"j{days}", days) for days in range(9)], ["n3"], NOW) == []


def test_a_node_is_forgiven_after_a_while() -> None:
    old = [event("n3", f"j{days}", days) for days in (15, 16, 17)]
    assert judged(old) == []
    assert judge_nodes(old, ["n1", "n2"], NOW, forgive_s=30 * DAY)[0].node == "n3"


def test_an_error_of_the_program_says_nothing_of_the_node() -> None:
    raised = Outage("i", "death", "rank_died", "n1", (3,), NOW, text="rank 3 raised ValueError at train.py:8")
    killed = Outage("i", "death", "rank_died", "n1", (3,), NOW, text="rank 3 died of SIGKILL")
    assert outage_events("j", raised, {3: "n2"}) == []
    assert [one.node for one in outage_events("j", killed, {3: "n2"})] == ["n2"]
    assert [one.node for one in outage_events("j", killed, {})] == ["n1"]


def test_commands_and_doctor_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "state" / "history.sqlite")
    monkeypatch.setenv("ALLRANKS_HISTORY", place)
    here, now = socket.gethostname(), time.time()
    runs = [("another", "j1", now - 9, now, 9.0, 9.0)]
    NodeHistory(place).record(
        [NodeEvent(here, f"j{k}", now - k, "rank_died", "x" * 120) for k in range(4)], runs
    )
    assert main(["history", "--slurm-exclude"]) == 0
    assert capsys.readouterr().out == f"{here}\n"
    assert main(["slurm", "submit", "--dry-run", "--exclude-bad-nodes", "train.py"]) == 0
    assert f"#SBATCH --exclude={here}\n" in capsys.readouterr().out
    assert main(["history", "--week"]) == 1
    shown = capsys.readouterr().out
    assert (
        shown.startswith(f"{here} is bad (") and shown.count(f"{'x' * 99}…\n") == 4
    )  # a cut sentence says so
    assert main(["history", "--node", "nope"]) == 0
    assert capsys.readouterr().out == "No incident that fits these flags is on record.\n"  # others have some
    bad = known_bad(here)
    assert bad is not None and bad.events == 4
    assert known_bad("another") is None
    assert default_place({"ALLRANKS_HISTORY": "off"}) == ""


def writes_in_time(place: str, caplog: pytest.LogCaptureFixture) -> str:
    """The warning of an agent that writes there; putting and closing return within their limits."""
    writer = HistoryWriter(NodeHistory(place))
    for number in range(3):
        writer.put([event("n1", f"j{number}", 0)])
    writer.close()
    return " ".join(record.message for record in caplog.records)


def test_a_damaged_file_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "h").write_bytes(b"not a database" * 1000)
    said = writes_in_time(str(tmp_path / "h"), caplog)
    assert said.count("history not written") == 1 and "not a database" in said
    assert known_bad("n1", {"ALLRANKS_HISTORY": str(tmp_path / "h")}) is None


def test_a_missing_or_forbidden_folder_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert "history not written" in writes_in_time(str(tmp_path / "file" / "h"), caplog)
    assert known_bad("n1", {"ALLRANKS_HISTORY": str(tmp_path / "none")}) is None


def test_a_full_disk_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """/dev/full takes no byte; the rollback journal of a database in a read-only place is refused alike."""
    place = tmp_path / "h"
    NodeHistory(str(place)).record([event("n1", "j", 1)])
    with sqlite3.connect(place) as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    full = NodeHistory(str(place))

    class Full(NodeHistory):
        def _open_file(self, make: bool) -> sqlite3.Connection:
            connection = super()._open_file(make)
            connection.execute(f"PRAGMA max_page_count = {pages}")
            return connection

    writer = HistoryWriter(Full(str(place)))
    writer.put([NodeEvent(f"n{k}", "j" * 500, float(k), "c", "x" * 500) for k in range(200)])
    writer.close()
    assert "full" in " ".join(record.message for record in caplog.records)
    assert len(full.events()) == 1  # none of the others, not a part of them


def test_a_locked_file_does_not_hold_up_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "h")
    NodeHistory(place).record([event("n1", "j", 1)])
    monkeypatch.setattr("allranks.ledger.history.BUSY_S", 0.05)
    monkeypatch.setattr("allranks.ledger.history.CLOSE_S", 0.5)
    holder = sqlite3.connect(place, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    writer = HistoryWriter(NodeHistory(place))
    writer.put([event("n2", "j", 1)])  # returns at once
    writer.close()  # and so does this, after its limit
    holder.execute("ROLLBACK")
    holder.close()
    assert {one.node for one in NodeHistory(place).events()} <= {"n1", "n2"}


def start_writer(place: str, writer: int, first: int) -> tuple[int, int]:
    """A process that writes until it is killed: its pid, and a pipe with each number that was acknowledged to it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    with suppress(BaseException):
        history = NodeHistory(place)
        for number in itertools.count(first):
            events = [
                NodeEvent(f"n{writer}", f"job{number}", float(number), cause) for cause in ("a", "b", "c")
            ]
            written = False
            while not written:
                with suppress(OSError):  # locked
                    history.record(events)
                    written = True
            os.write(writing, f"{number}\n".encode())
    os._exit(1)


def storm(place: str, rounds: int, writers: int = 8, crash: Callable[[], None] = lambda: None) -> None:
    """Writers at once, all killed at random moments: what was acknowledged is there, and every write as a whole."""
    chance, firsts, acknowledged = random.Random(7), itertools.count(0, 1_000_000), set()
    for turn in range(rounds):
        running = [start_writer(place, n, next(firsts)) for n in range(writers)]
        seen = {n: os.read(reading, 4096) for n, (_, reading) in enumerate(running)}  # all of them write
        if turn % 10 == 9:
            crash()
        for n in chance.sample(range(writers), writers):
            time.sleep(chance.uniform(0.0, 0.03))  # the random moment, nothing is awaited
            pid, reading = running[n]
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL
            with open(reading, "rb") as pipe:
                numbers = (seen[n] + pipe.read()).split()
            acknowledged |= {(f"n{n}", f"job{int(number)}") for number in numbers}
    found: dict[tuple[str, str], set[str]] = {}
    for one in NodeHistory(place).events():
        if one.job.startswith("job"):  # not what the test wrote before
            found.setdefault((one.node, one.job), set()).add(one.cause)
    assert len(acknowledged) >= rounds * writers
    assert acknowledged <= found.keys()
    assert all(causes == {"a", "b", "c"} for causes in found.values())


def test_eight_writers_that_are_killed_lose_nothing_in_sqlite(tmp_path: Path) -> None:
    storm(str(tmp_path / "h"), rounds=1)


@pytest.mark.everything
@pytest.mark.timeout(1800)
def test_a_hundred_kills_of_eight_writers_in_sqlite(tmp_path: Path) -> None:
    storm(str(tmp_path / "h"), rounds=100)


@contextmanager
def postgres() -> Iterator[tuple[str, Callable[[], None]]]:
    """A PostgreSQL of this test alone, over a Unix socket, and what crashes it. As root it runs as the user `postgres`."""
    binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    found = str(binaries[-1]) if binaries else os.path.dirname(shutil.which("initdb") or "")
    if not found:
        pytest.skip("postgresql is not installed")
    pytest.importorskip("psycopg")
    # not below pytest's folder, which only its owner may enter
    data = Path(tempfile.mkdtemp(prefix="allranks-pg-"))
    user = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    if user:
        shutil.chown(data, "postgres")

    def run(*words: str) -> None:
        with (data / "said").open("a") as said:  # not a pipe: the server would keep it open
            subprocess.run([*user, *words], check=True, stdout=said, stderr=said, cwd="/")

    run(f"{found}/initdb", "-D", f"{data}/db", "-U", "allranks", "-A", "trust")
    options = f"-c listen_addresses='' -c unix_socket_directories='{data}'"
    start = [f"{found}/pg_ctl", "-D", f"{data}/db", "-o", options, "-l", f"{data}/log", "-w"]
    run(*start, "start")
    try:
        yield (
            f"postgresql://allranks@/postgres?host={data}",
            lambda: run(*start, "-m", "immediate", "restart"),
        )
    finally:
        run(f"{found}/pg_ctl", "-D", f"{data}/db", "-m", "immediate", "stop")
        shutil.rmtree(data)


def test_postgres_remembers_the_same() -> None:
    with postgres() as (place, _):
        history = NodeHistory(place)
        history.record(
            [event("n3", "j1", 1), event("n3", "j2", 2), event("n3", "j2", 2)],
            [("n3", "j1", 1.0, NOW, 8.0, 4.0), ("n5", "j1", 1.0, NOW, 8.0, 8.0)],
        )
        assert len(history.events()) == 2  # the same event twice is one
        assert history.events(node="n4") == []
        assert sorted(history.nodes()) == ["n3", "n5"]
        assert history.bad_nodes(NOW)[0].node == "n3"
        storm(place, rounds=1)
    with pytest.raises(OSError, match="the history"):
        history.events()


@pytest.mark.everything
@pytest.mark.timeout(1800)
def test_a_hundred_kills_of_eight_writers_in_postgres() -> None:
    """And ten crashes of the server."""
    with postgres() as (place, crash):
        storm(place, rounds=100, crash=crash)
