"""Where one rank's program leaves the others', on small imaginary jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from allranks.diagnosis.alignment import CallDifference, CallPair, usual_next
from allranks.model.formatting import one_line


def pair(mine: str, theirs: str, my_steps: str = "", their_steps: str = "") -> CallPair:
    """Calls as letters: equal letters are equal calls at one line."""

    def numbers(text: str, length: int) -> np.ndarray:
        return np.array([int(c) for c in text] if text else [-1] * length, np.int64)

    letters = [np.array([ord(c) for c in text], np.uint64) for text in (mine, theirs)]
    length = min(map(len, letters))
    one_line = letters[0][:length] == letters[1][:length]
    steps = numbers(my_steps, len(mine)), numbers(their_steps, len(theirs))
    return CallPair(1, 0, 1, *letters, *steps, letters[1], one_line)


def _told(found: CallDifference | None) -> tuple[str, int, int] | None:
    return None if found is None else (found.kind, found.seq, found.count)


def test_step_marks_show_a_skipped_call_long_before_the_calls_differ() -> None:
    """All calls are alike; rank 1 made none in step 3."""
    found = pair("AAAAAB", "AAAAAA", "012455", "012345").by_steps()
    assert _told(found) == ("skipped", 4, 1)


def test_step_marks_show_an_added_call() -> None:
    """Two calls in step 2, where the other made one."""
    told = pair("AAAAA", "AAAAB", "01223", "01234")
    assert _told(told.by_steps()) == ("extra", 4, 1)
    assert told.unusual_in_step(4) == 1


def test_step_marks_that_agree_again_tell_nothing() -> None:
    """A mark made a moment later on one rank is not a divergence."""
    assert pair("AAAA", "AAAA", "0123", "0023").by_steps() is None


def test_a_round_left_out_is_skipped_and_a_new_call_is_extra() -> None:
    """What always came next decides."""
    assert _told(pair("ABCABCAC", "ABCABCAB").by_habit(7)) == ("skipped", 8, 1)
    found = pair("ABABABX", "ABABABA").by_habit(6)
    assert _told(found) == ("extra", 7, 1) and found is not None and found.either


def test_many_calls_of_several_lines_left_out_are_skipped_unless_the_one_behind_them_is_rare() -> None:
    """A rank that returns early from its loss misses all its gathers; one that saves too early has made a call more."""
    rounds = 5 * "GHIJKLA"
    assert _told(pair(rounds + "A", rounds + "G").by_habit(35)) == ("skipped", 36, 6)
    rounds = 5 * "ABCDEFABCDEFX"
    assert _told(pair(rounds + "AX", rounds + "AB").by_habit(66)) == ("extra", 67, 1)


def test_a_call_made_once_more_than_ever_in_a_row_is_extra_although_it_also_comes_later() -> None:
    """FSDP2: gathers and scatters of one line; rank 1 uses one expert more and gathers it in backward."""
    rounds = 3 * "GAAXY"
    assert _told(pair(rounds + "GAAA", rounds + "GAAX").by_habit(18)) == ("extra", 19, 1)


def test_a_rank_that_stops_repeating_a_call_and_is_back_in_its_main_loop_skipped_it() -> None:
    """The first validation: rank 1 has one batch fewer and trains on. A call more often made than the loop's is none more."""
    assert _told(pair("TTTTVVVT", "TTTTVVVV").by_habit(7)) == ("skipped", 8, 1)
    assert _told(pair("TVVVVT", "TVVVVV").by_habit(5)) == ("extra", 6, 1)


def test_what_never_came_before_has_no_usual_successor() -> None:
    """No earlier round, no habit; of several the one that was reached by the same calls."""
    assert len(usual_next(np.array([1, 2, 3]), 2)) == 0
    assert usual_next(np.array([1, 2, 1, 2, 1]), 5).tolist() == [3]


@pytest.mark.parametrize(
    ("mine", "theirs", "seq", "wanted"),
    [
        ("ABCDABCDACDAB", "ABCDABCDABCDA", 10, ("skipped", 10, 1)),  # fits again when moved
        ("ABABABXABAB", "ABABABABABC", 11, ("extra", 7, 1)),
        ("AAAABA", "AAAAAB", 5, ("swapped", 5, 1)),
    ],
)
def test_calls_behind_a_divergence_tell_what_it_was(
    mine: str, theirs: str, seq: int, wanted: tuple[str, int, int]
) -> None:
    """A shift, an insertion, two calls in the other order."""
    assert _told(pair(mine, theirs).first_difference(seq)) == wanted


def test_a_long_exception_is_one_line_of_a_sentence() -> None:
    """The first line, cut."""
    assert one_line("exception: X: a\nb") == "exception: X: a"
    assert one_line("\n  Failed to run stage backward:\n    Output: None\n  Input: []") == (
        "Failed to run stage backward: Output: None"
    )
    assert len(one_line("x" * 500)) == 200


def test_a_line_that_is_skipped_with_all_its_calls_is_one_skip() -> None:
    """However many calls it makes: rank 1 is in the call that has always come behind it."""
    usual, line = "ABCDEFG", np.array([ord(c) for c in "ABBBBBG"])
    calls = pair(usual * 3 + "AG", usual * 4)
    lines = np.tile(line, 4)
    assert _told(replace(calls, their_lines=lines).by_habit(22, True)) == ("skipped", 23, 5)
    assert _told(calls.by_habit(22, True)) == ("extra", 23, 1)  # five lines: rather was the last one added
