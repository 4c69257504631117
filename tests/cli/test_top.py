"""The full screen of `allranks top`, with textual's own pilot."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.incidents.job_overview import Overview
from allranks.model.cluster import JobView, RankRow

pytest.importorskip("textual", reason="textual is not installed: pip install 'allranks[tui]'")

from textual.widgets import DataTable, Input, Static

from allranks.cli.top import Top

ANSWER = "Hung for 73 s, at step 7: rank 2 (vm) never entered all_reduce #156 of group default_pg; it sleeps at hang.py:7 in load_batch"


def view_of(ranks: int, still: bool = True) -> JobView:
    rows = tuple(
        RankRow(rank, 100 + rank, f"node{rank // 8}", True, 7, 14_000, float(rank), "all_reduce #156 of default_pg", (2,), gpu="97 %, 61.0 GB")
        for rank in range(ranks)
    )  # fmt: skip
    stuck = replace(rows[2], doing="sleeps", waits_for=())
    state = ("hung", "bad", ANSWER) if still else ("training", "good", "Training: step 7, 2.0 steps/s")
    incident = f"20260101-030000 (hang, open): {ANSWER.partition(': ')[2]}"
    return JobView(
        "job", "/x", 0.0, (*rows[:2], stuck, *rows[3:]), "", state[2], state[1], state[0], (incident,)
    )


class Fixed(Overview):
    """A job that always looks the same."""

    def __init__(self, folder: Path, view: JobView) -> None:
        super().__init__(folder)
        self.view = view

    def look(self) -> JobView:
        return self.view


def words(app: Top, name: str) -> str:
    return str(app.query_one(name, Static).content)


async def ready(app: Top, pilot: object) -> DataTable[object]:
    while app.view is None:
        await pilot.pause()  # type: ignore[attr-defined]
    await pilot.pause()  # type: ignore[attr-defined]
    return app.query_one(DataTable)


def test_the_answer_is_whole_every_rank_can_be_reached_and_filter_and_sort_work(tmp_path: Path) -> None:
    """1,024 ranks on a screen of 24 lines and 80 columns."""

    async def drive() -> None:
        app = Top(Fixed(tmp_path, view_of(1024)), 60.0)
        async with app.run_test(size=(80, 24)) as pilot:
            table = await ready(app, pilot)
            shown = app.query_one("#line", Static)
            assert "it sleeps at hang.py:7 in load_batch" in words(app, "#line")
            assert shown.size.height >= 3  # wrapped, not cut
            assert table.row_count == 1024
            await pilot.press("ctrl+end")
            assert app.chosen() is not None and app.chosen().rank == 1023  # type: ignore[union-attr]
            await pilot.press("s", "s")  # by silence, then by who is waited for
            assert app.by == "doing" and app.shown[0].rank == 2
            await pilot.press("slash", *"node3")
            assert {row.host for row in app.shown} >= {"node3"} and all(
                "node3" in row.host for row in app.shown
            )
            await pilot.press("enter", "escape")
            assert table.row_count == 1024 and app.query_one("#filter", Input).value == ""
            row = [str(one) for one in table.get_row("2")]
            assert "<- 1,023 ranks wait for it: sleeps" in row and "97 %, 61.0 GB" in row and "node0" in row

    asyncio.run(drive())


def test_while_the_job_moves_nobody_is_marked(tmp_path: Path) -> None:
    """The detector decides, not the table."""

    async def drive() -> None:
        app = Top(Fixed(tmp_path, view_of(4, still=False)), 60.0)
        async with app.run_test(size=(120, 24)) as pilot:
            table = await ready(app, pilot)
            assert not any("wait" in str(one) for key in "0123" for one in table.get_row(key))
            await app.query("*").remove()
            app.show(view_of(4))  # a state that was read while the screen was closed was an exception

    asyncio.run(drive())


def test_enter_shows_the_stack_l_the_log_and_i_the_incident(tmp_path: Path) -> None:
    """Of the rank under the cursor; here it is this very process."""
    incident = tmp_path / "incidents" / "20260101-030000"
    incident.mkdir(parents=True)
    (incident / "diagnosis.txt").write_text("fault: rank 2 never entered all_reduce #156\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank2.log").write_text("step 6\nstep 7\n")
    (tmp_path / "job.json").write_text(json.dumps({"incidents": str(tmp_path / "incidents")}))
    view = view_of(4)
    own = replace(view.rows[2], pid=os.getpid(), box=str(tmp_path / "a.box"))
    view = replace(view, rows=(*view.rows[:2], own, view.rows[3]))

    async def drive() -> None:
        app = Top(Fixed(tmp_path, view), 60.0)
        async with app.run_test(size=(120, 40)) as pilot:
            await ready(app, pilot)
            await pilot.press("down", "down", "l")
            assert "step 7" in words(app, "#text")
            await pilot.press("escape", "i")
            assert "never entered all_reduce #156" in words(app, "#text")
            await pilot.press("escape", "enter")
            until = time.monotonic() + 60
            while "reading" in words(app, "#text") and time.monotonic() < until:
                await pilot.pause(0.05)
            assert "Stack of rank 2" in words(app, "#text")
            await pilot.press("q")

    asyncio.run(drive())


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_q_and_ctrl_c_end_it(tmp_path: Path, key: str) -> None:
    """textual takes Ctrl-C for a key of its own: it asked for Ctrl-Q."""

    async def drive() -> None:
        app = Top(Fixed(tmp_path, view_of(4)), 60.0)
        async with app.run_test(size=(120, 40)) as pilot:
            await ready(app, pilot)
            await pilot.press("slash", key if key == "ctrl+c" else "escape", key)
        assert app.return_code == 0 and app.return_value == 0

    asyncio.run(drive())
