"""Every second of every rank is booked once, and to the right row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.ledger.records import Outage
from goodput.timelines import T0, PaperRank, book, ns, totals


def near(expected: float) -> object:
    return pytest.approx(expected, abs=0.02)


def outage(id: str, begin: float, end: float = 0.0, kind: str = "hang") -> Outage:
    return Outage(
        id,
        kind,
        kind,
        "n",
        (1,),
        T0 + begin,
        T0 + begin,
        T0 + begin,
        T0 + end if end else 0.0,
        T0 + end if end else 0.0,
    )


def test_a_plain_job_starts_compiles_trains_and_ends() -> None:
    ranks = [PaperRank(n) for n in range(2)]
    for rank in ranks:
        rank.start(3.0)
        rank.mark(8.0, 0)  # the first step takes 4 s
        rank.steps(12.0, 1, 40, 1.0)
        rank.exit(53.0)  # the last step ends at 52
    found = totals(book(ranks, 60.0))
    assert found == {
        "starting": near(2 * 8.0),
        "compiling": near(2 * 4.0),
        "useful": near(2 * 40.0),
        "idle": near(2 * 8.0),
    }
    assert sum(found.values()) == near(2 * 60.0)


def test_phases_are_cut_out_of_steps_however_short() -> None:
    rank = PaperRank(0)
    rank.start(0.0)
    rank.mark(1.0, 0)
    rank.mark(2.0, 1)
    rank.mark(3.0, 2)
    rank.phase("saving", 3.1, 3.3)
    rank.mark(4.2, 3)
    rank.phase("evaluate", 4.5, 9.5)
    rank.phase("custom", 9.6, 9.8)
    rank.mark(10.4, 4)
    rank.exit(11.4)
    found = totals(book([rank], 11.4))
    assert found["saving"] == near(0.2)
    assert found["evaluation"] == near(5.0)
    assert found["phase:custom"] == near(0.2)
    assert sum(found.values()) == near(11.4)


def test_a_hang_that_is_noticed_late_is_booked_from_the_last_step() -> None:
    ranks = [PaperRank(n) for n in range(4)]
    for rank in ranks:
        rank.start(0.0)
        end = rank.steps(2.0, 0, 30, 1.0)
        assert end == 32.0
        rank.steps(72.0, 30, 20, 1.0)  # step 29 took 41 s
        rank.exit(92.0)
    found = totals(book(ranks, 92.0, [(45.0, outage("h1", 31.0)), (73.0, outage("h1", 31.0, 72.0))]))
    assert found["stalled:h1"] == near(4 * 40.0)
    assert found["useful"] == near(4 * 49.0)
    assert sum(found.values()) == near(4 * 92.0)


def test_a_death_restarts_the_job_and_repeats_steps() -> None:
    ranks = [PaperRank(n) for n in range(2)]
    for rank in ranks:
        rank.start(0.0)
        rank.steps(2.0, 0, 20, 1.0)  # steps 0-19, the last begins at 21
        rank.kill(21.5)
        rank.start(26.0)
        rank.phase("restoring", 28.0, 29.0)
        # the checkpoint of step 10: steps 10-18 are done again, the first of them compiles
        rank.mark(30.0, 10)
        rank.steps(31.0, 11, 20, 1.0)
        rank.exit(51.0)
    found = totals(
        book(
            ranks, 51.0, [(24.0, outage("d1", 21.5, 0.0, "death")), (32.0, outage("d1", 21.5, 31.0, "death"))]
        )
    )
    assert found["stalled:d1"] == near(2 * (4.5 + 0.5))  # no process, and the step that was lost
    assert found["restoring"] == near(2 * 1.0)
    assert found["starting"] == near(2 * (2.0 + 3.0))
    assert found["compiling"] == near(2 * 2.0)  # the first step of both processes
    assert found["repeated"] == near(2 * 8.0)  # steps 11-18
    assert sum(found.values()) == near(2 * 51.0)


def test_a_run_of_the_same_name_knows_how_far_the_earlier_one_came() -> None:
    rank = PaperRank(0)
    rank.start(0.0)
    rank.mark(2.0, 100)
    rank.steps(3.0, 101, 20, 1.0)
    rank.exit(23.0)
    found = totals(book([rank], 23.0, reached=111))
    assert found["repeated"] == near(10.0)
    assert found["useful"] == near(10.0)


def test_a_replica_that_heals_repeats_nothing() -> None:
    survivor, victim = PaperRank(0), PaperRank(1)
    survivor.start(0.0)
    survivor.steps(2.0, 0, 60, 1.0)
    survivor.exit(62.0)
    victim.start(0.0)
    victim.steps(2.0, 0, 20, 1.0)
    victim.kill(21.5)
    victim.start(23.0)
    victim.mark(25.0, 0)
    victim.phase("healing", 25.1, 27.1)
    victim.mark(28.0, 26)
    victim.steps(29.0, 27, 33, 1.0)
    victim.exit(62.0)
    found = totals(book([survivor, victim], 62.0, [(25.0, outage("d", 21.5, 22.0, "death"))]))
    assert "repeated" not in found
    assert found["healing"] == near(2.0)
    assert found["stalled:d"] == near(2.0)


def test_a_script_without_marks_is_booked_by_its_calls() -> None:
    rank = PaperRank(0)
    rank.start(0.0)
    for turn in range(20):
        old = rank._last()
        at = 5.0 + turn
        rank._add(at, replace(old, calls_completed=turn + 1, last_ns=ns(at)))
    rank.exit(24.0)
    found = totals(book([rank], 24.0))
    assert found["starting"] == near(5.0)
    assert found["useful"] == near(19.0)


def test_a_hang_that_never_ends_is_stalled_until_the_end() -> None:
    ranks = [PaperRank(n) for n in range(2)]
    for rank in ranks:
        rank.start(0.0)
        rank.steps(2.0, 0, 30, 1.0)  # the last mark is at 31, and nothing follows
    found = totals(book(ranks, 92.0, [(45.0, outage("h1", 31.0))]))
    assert found["stalled:h1"] == near(2 * 60.0)
    assert "idle" not in found


def test_steps_that_were_done_again_between_two_looks_are_counted() -> None:
    """The first look at the new process comes when it is past the step that was reached before."""
    rank = PaperRank(0)
    rank.start(0.0)
    rank.steps(2.0, 0, 37, 0.1)  # step 36 begins at 5.6
    rank.kill(5.65)
    rank.start(8.0)
    rank.steps(9.0, 30, 50, 0.1)
    rank.exit(14.0)
    found = totals(book([rank], 14.0, poll_s=2.0))
    # steps 31-35; 36 is lost, and the death is seen at 6.0
    assert found["repeated"] == pytest.approx(0.5 + 0.4, abs=0.11)


def test_ranks_that_get_other_numbers_by_a_resize_are_booked_once() -> None:
    """Another node joins, and the two ranks of this one are ranks 2 and 3 from then on."""
    ranks = [PaperRank(n) for n in range(2)]
    for rank in ranks[:2]:
        rank.start(0.0)
        rank.steps(2.0, 0, 20, 1.0)
        rank.kill(21.5)
        ranks.append(other := PaperRank(rank.number + 2, pid=5000))
        other.start(24.0)
        other.mark(26.0, 20)
        other.steps(27.0, 21, 20, 1.0)
        other.exit(47.0)
    found = totals(book(ranks, 47.0))
    assert sum(found.values()) == near(2 * 47.0)
    assert found["useful"] == near(2 * (18.0 + 20.0))
    assert "idle" not in found


def test_tokens_count_once_although_steps_are_done_again() -> None:
    """From the first look at a process on; a restart from step 20 does ten steps a second time."""
    rank = PaperRank(0)
    rank.start(0.0)
    rank.steps(1.0, 0, 31, 1.0)
    rank.kill(31.5)
    rank.start(35.0)
    rank.steps(36.0, 20, 41, 1.0)
    rank.changes = [(at, replace(sample, tokens=100.0)) for at, sample in rank.changes]
    rows = book([rank], 80.0)
    assert rows[-1].step == 60 and sum(row.tokens for row in rows) == pytest.approx(100 * 60, abs=100)
