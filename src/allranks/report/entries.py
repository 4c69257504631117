"""Every recorded call, one column per rank, rows by position: what `-j/--just_print_entries` shows. Lines, no printing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from allranks.model.trace import RankTrace
from allranks.report.text import clean, frame_text, state_name


def render(
    traces: Sequence[RankTrace], *, pg_filters: Iterable[str] = (), with_stacks: bool = False
) -> Iterator[str]:
    """The table; then the stacks by number, if asked for."""
    wanted = set(pg_filters)
    ordered = sorted(traces, key=lambda trace: trace.header.rank if trace.header.rank is not None else -1)
    numbers: dict[tuple[int, int], int] = {}
    columns = [_column(trace, wanted, with_stacks, numbers) for trace in ordered]
    widths = [max([len(cell) for cell in column] + [8]) for column in columns]
    yield "  ".join(
        f"rank {trace.header.rank}".ljust(w) for trace, w in zip(ordered, widths, strict=True)
    ).rstrip()
    yield "  ".join("-" * width for width in widths)
    for row in range(max((len(column) for column in columns), default=0)):
        cells = (column[row] if row < len(column) else "" for column in columns)
        yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
    if with_stacks:
        yield from _stacks(ordered, numbers)


def _column(
    trace: RankTrace, wanted: set[str], with_stacks: bool, numbers: dict[tuple[int, int], int]
) -> list[str]:
    cells = []
    for call in trace.calls:
        group = trace.groups[int(call["group"])]
        if wanted and not wanted & {group.name, group.desc}:
            continue
        shapes = trace.shapes[int(call["shapes"])]
        name = trace.names[int(call["op"])]
        ends = ""
        if int(call["peer"]) >= 0:
            own, peer = trace.header.rank, int(call["peer"])
            source, target = (own, peer) if name.endswith("send") else (peer, own)
            ends = f"s={source} d={target}, "
        sizes = [list(size) for size in shapes.inputs]
        text = f"{name}({ends}input_sizes={sizes}, state={state_name(int(call['state']))}) {group.name}#{int(call['seq'])}"
        if with_stacks:
            key = (id(trace.stacks), int(call["stack"]))
            text += f" stack={numbers.setdefault(key, len(numbers))}"
        cells.append(clean(text))
    return cells


def _stacks(traces: Sequence[RankTrace], numbers: dict[tuple[int, int], int]) -> Iterator[str]:
    tables = {id(trace.stacks): trace.stacks for trace in traces}
    yield ""
    for (table, index), number in numbers.items():
        yield f"stack {number}"
        for frame in tables[table][index]:
            yield f"    {frame_text(frame)}"
