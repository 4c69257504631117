"""`allranks top` as a full screen, on textual (extra `[tui]`, imported here only): filter, sort, scroll, stack, log, incident.

What it shows comes from `cli/status.py`, so that both say the same; without textual `status` draws the plain form.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from allranks.cli.status import (
    cell,
    chosen_columns,
    count_waiters,
    doing_text,
    headline,
    incident_lines,
    render,
)
from allranks.cli.terminal import use_color
from allranks.errors import AllranksError
from allranks.incidents.job_overview import Overview, read_job
from allranks.incidents.rank_logs import find_logs, tail
from allranks.model.cluster import JobView, RankRow
from allranks.model.parsing import printable

LEVELS = {"good": "green", "warn": "yellow", "bad": "bold red"}
LOG_LINES = 200


def take_stack(row: RankRow) -> list[str]:
    """The Python stack of a rank's main thread, innermost first: with py-spy, which does not stop the process."""
    from allranks.stacktraces import CollectOptions, Selection, collect, find_targets

    if not row.box:
        return [
            f"rank {row.rank} runs on {row.host}: run `allranks stacks --all-nodes`, or `allranks top` there"
        ]
    try:
        chosen = Selection(pids=(row.pid,), box_folders=(Path(row.box).parent,))
        capture = collect(find_targets(chosen), CollectOptions(rounds=1, native="never"))
    except AllranksError as error:
        return [f"no stack: {error}", error.hint]
    own = [one for one in capture.processes if one.pid == row.pid and one.snapshots]
    threads = own[0].snapshots[-1].stacks if own else ()
    main = next((stack for stack in threads if stack.tid == row.pid), threads[0] if threads else None)
    if main is None:
        return [
            "no stack could be read",
            *capture.notes,
            *(note for one in capture.processes for note in one.notes),
        ]
    return [f"{frame.file}:{frame.line} in {frame.name}" for frame in main.frames]


def sort_rows(rows: Iterable[RankRow], by: str, view: JobView) -> list[RankRow]:
    """By a column; silence and waiters with the largest first."""
    waiters = count_waiters(view)
    if by == "silent":
        return sorted(rows, key=lambda row: (row.alive, -(row.silent_s or 0.0), row.rank))
    if by == "doing":
        return sorted(rows, key=lambda row: (-waiters[row.rank], row.doing, row.rank))
    if by == "step":
        return sorted(rows, key=lambda row: (row.step, row.rank))
    return sorted(rows, key=lambda row: (row.host, row.rank) if by == "node" else ("", row.rank))


class RanksWidget(DataTable[Text]):
    """The table; its key for the stack is in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Stack")]


class Top(App[int]):
    """The screen. `look` runs on a thread: a slow disk does not freeze the keys."""

    CSS = """
    #line { height: auto; padding: 0 1; } #filter { display: none; height: 3; } #filter.shown { display: block; }
    #incidents { height: auto; max-height: 8; padding: 0 1; } #pane { display: none; height: 50%; border-top: solid $accent; padding: 0 1; }
    #pane.shown { display: block; } DataTable { height: 1fr; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Quit"),
        Binding("slash", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("l", "log", "Log"),
        Binding("i", "incident", "Incident"),
        Binding("p", "pause", "Pause"),
        Binding("escape", "close", "Close", show=False),
        Binding("ctrl+c", "leave", "Quit", show=False, priority=True),
    ]
    SORTS: ClassVar[tuple[str, ...]] = ("rank", "silent", "doing", "step", "node")

    def __init__(self, overview: Overview, interval_s: float = 1.0) -> None:
        super().__init__()
        self.overview, self.interval_s = overview, interval_s
        self.view: JobView | None = None
        self.by, self.wanted, self.paused = "rank", "", False
        self.shown: list[RankRow] = []
        self._columns: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static(id="line", markup=False)
        yield Input(placeholder="rank, node, or what it does", id="filter")
        yield RanksWidget(cursor_type="row", zebra_stripes=False)
        yield VerticalScroll(Static(id="text", markup=False), id="pane")
        yield Static(id="incidents", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self._look()
        self.set_interval(self.interval_s, self._look)

    def _look(self) -> None:
        if not self.paused:
            self.run_worker(
                lambda: self.call_from_thread(self.show, self.overview.look()), thread=True, exclusive=True
            )

    def show(self, view: JobView) -> None:
        """Puts a new state on the screen; the cursor stays at its rank."""
        if not self.is_running or not self.query("#line"):
            return  # the screen was closed while the job was read
        self.view = view
        text = Text(f"{headline(view)}\n")
        text.append(view.line, style=LEVELS.get(view.level, ""))
        self.query_one("#line", Static).update(text)
        self.query_one("#incidents", Static).update(
            "\n".join(list(incident_lines(view, "i shows its evidence"))[-3:])
        )
        self._fill(view)
        if not view.running and view.rows:
            self.exit(1)

    def _fill(self, view: JobView) -> None:
        table, waiters = self.query_one(DataTable), count_waiters(view)
        here = self.chosen()
        wide = chosen_columns(view)
        if wide != self._columns:
            self._columns = wide
            table.clear(columns=True)
            for name in ("rank", *wide, "doing"):
                table.add_column(name, key=name)
        rows = [
            row
            for row in view.rows
            if self.wanted in f"{row.name or row.rank} {row.host} {row.doing}".lower()
        ]
        if self.wanted.isdigit():
            rows = [row for row in view.rows if row.rank == int(self.wanted)]
        self.shown = sort_rows(rows, self.by, view)
        top = table.scroll_offset
        table.clear()
        for row in self.shown:
            held = waiters[row.rank] if row.alive else 0
            style = (
                "red" if row.doing == "died" else LEVELS[view.level] if held else "" if row.alive else "dim"
            )
            words = (
                row.name or str(row.rank),
                *(cell(row, name) for name in wide),
                doing_text(row, held, view.still),
            )
            table.add_row(
                *(Text(printable(word, len(word)), style=style) for word in words), key=str(row.rank)
            )
        if (
            here is not None
            and (at := next((i for i, row in enumerate(self.shown) if row.rank == here.rank), None))
            is not None
        ):
            table.move_cursor(row=at, scroll=False)
        table.scroll_to(y=top.y, animate=False)

    def chosen(self) -> RankRow | None:
        """The rank under the cursor."""
        at = self.query_one(DataTable).cursor_row
        return self.shown[at] if 0 <= at < len(self.shown) else None

    def pane(self, title: str, lines: Iterable[str]) -> None:
        """Shows lines below the table."""
        body = "\n".join(printable(line, len(line)) for line in (title, *lines) if line)
        self.query_one("#text", Static).update(body)
        self.query_one("#pane").add_class("shown")

    def on_data_table_row_selected(self) -> None:
        row = self.chosen()
        if row is None or not row.alive:
            return
        self.pane(f"Stack of rank {row.rank}", ["reading …"])

        def work() -> None:
            found = take_stack(row)
            self.call_from_thread(self.pane, f"Stack of rank {row.rank}, innermost frame first", found)

        self.run_worker(work, thread=True)

    def action_log(self) -> None:
        row = self.chosen()
        if row is not None:
            paths = find_logs(self.overview.folder, row.rank, row.box) if row.box else []
            lines = tail(paths, LOG_LINES) or ["no output file of this rank was found on this node"]
            self.pane(f"Output of rank {row.rank} ({', '.join(map(str, paths))})", lines)
            self.query_one("#pane", VerticalScroll).scroll_end(animate=False)

    def action_incident(self) -> None:
        folder = str(read_job(self.overview.folder).get("incidents") or self.overview.folder / "incidents")
        newest = self.view.incidents[-1] if self.view is not None and self.view.incidents else ""
        path = Path(folder, newest.partition(" ")[0], "diagnosis.txt")
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if newest else []
        except OSError:
            lines = [newest.partition("): ")[2]]
        self.pane(newest.partition(" ")[0] or "no incident", lines)

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("shown")
        box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.wanted = event.value.strip().lower()
        if self.view is not None:
            self._fill(self.view)

    def on_input_submitted(self) -> None:
        self.query_one(DataTable).focus()

    def action_close(self) -> None:
        """The pane, else the filter."""
        if self.query_one("#pane").has_class("shown"):
            self.query_one("#pane").remove_class("shown")
        else:
            self.query_one("#filter", Input).value = ""
            self.query_one("#filter").remove_class("shown")
        self.query_one(DataTable).focus()

    def action_sort(self) -> None:
        self.by = self.SORTS[(self.SORTS.index(self.by) + 1) % len(self.SORTS)]
        self.sub_title = f"sorted by {self.by}"
        if self.view is not None:
            self._fill(self.view)

    def action_pause(self) -> None:
        self.paused = not self.paused

    def action_leave(self) -> None:
        self.exit(0 if self.view is None or self.view.running else 1)


def run(overview: Overview, interval_s: float) -> int:
    """Until q, Ctrl-C or the end of the job; leaves the last state behind."""
    app = Top(overview, interval_s)
    code = app.run(mouse=False)
    if app.view is not None:
        print("\n".join(render(app.view, colour=use_color())), flush=True)
    return code or 0
