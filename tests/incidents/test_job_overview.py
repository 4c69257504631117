"""The screen of `allranks status` and `allranks top`."""

from __future__ import annotations

from allranks.cli.status import render
from allranks.model.job import JobView, RankRow


def row(rank: int, doing: str, waits_for: tuple[int, ...] = (), alive: bool = True) -> RankRow:
    """One rank at step 7."""
    return RankRow(rank, 100 + rank, "n", alive, 7, 14, 3.0, doing, waits_for)


VIEW = JobView(
    "job", "/x", 0.0,
    (row(0, "all_reduce #8 of dp", (1,)), row(1, "computes"), row(2, "all_reduce #8 of dp", (1,)), row(3, "died", alive=False)),
    incidents=("20260101-030000-hang (hang, open): rank 1 never entered all_reduce #8",),
)  # fmt: skip


def test_the_rank_that_others_wait_for_stands_out() -> None:
    """Who waits says for whom, and the one waited for says how many wait."""
    lines = list(render(VIEW, colour=True))
    assert lines[0] == "job: 3 of 4 ranks run, step 7"
    assert "waits for rank 1" in lines[2] and "\x1b" not in lines[2]
    assert lines[3].startswith("\x1b[31m") and "computes  <- 2 ranks wait for it" in lines[3]
    assert lines[5].startswith("\x1b[31m") and "died" in lines[5]


def test_lines_fit_the_terminal_and_silent_ranks_come_first_when_not_all_fit() -> None:
    """A narrow and low window."""
    lines = list(render(VIEW, width=50, height=12))
    assert all(len(line) <= 50 for line in lines[1:])
    assert lines[-1].endswith("…")
    many = JobView("job", "/x", 0.0, tuple(row(rank, "computes") for rank in range(40)))
    assert "… and 30 more" in "\n".join(render(many, height=16))
