"""The diagnosis as lines of text, made for 3 a.m.: the verdict, the evidence, what to do; and every recorded call, one column
per rank, rows by position (`-j/--just_print_entries`). Generators, no printing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from allranks.model.diagnosis import Diagnosis, Finding
from allranks.model.formatting import rank_list, ranks_text, rename
from allranks.model.stacks import is_user_file
from allranks.model.trace import Frame, RankTrace, State

MAX_FRAMES, MAX_STACKS, MAX_FILES = 4, 4, 8
#: Causes in which the guilty ranks lack in the call.
MISSING = frozenset({"missing_rank", "not_started", "stuck_before_collective", "rank_died"})
#: Puts text in a style, or leaves it as it is.
Painter = Callable[[str, str], str]


@dataclass(frozen=True)
class TextOptions:
    """How much to say, and whether in colour."""

    color: bool = False
    full_stacks: bool = False
    verbose: bool = False


def render(diagnosis: Diagnosis, options: TextOptions | None = None) -> Iterator[str]:
    """All lines of the report. The first line alone must be enough to act on."""
    return (rename(line, diagnosis.worlds) for line in _lines(diagnosis, options or TextOptions()))


def _lines(diagnosis: Diagnosis, options: TextOptions) -> Iterator[str]:
    paint = partial(_paint, options.color)
    yield headline(diagnosis, options)
    unsafe = [finding for finding in diagnosis.findings if finding.cause == "unsafe_pickle"]
    for finding in unsafe:
        yield paint("red", clean(f"security: {finding.sentence}; {'; '.join(finding.advice)}"))
    verdict = diagnosis.verdict
    if verdict is not None:
        yield paint("dim", f"cause {verdict.cause}, confidence {verdict.confidence:.0%}" + _scope(verdict))
        yield from _list(paint, "evidence", verdict.evidence)
        yield from _stacks(paint, verdict, options)
        yield from _others(paint, diagnosis)
        yield from _list(paint, "missing evidence", verdict.missing_evidence)
        yield from _list(paint, "what to do", verdict.advice)
        yield from _list(
            paint, "wrong if", (verdict.wrong_if,) if options.verbose and verdict.wrong_if else ()
        )
    elif diagnosis.status == "unclear" and diagnosis.findings:
        yield from _list(paint, "evidence", diagnosis.findings[0].evidence)
    warnings = [f.sentence for f in diagnosis.findings if f.severity == "warning" and f not in unsafe]
    yield from _list(paint, "also", [text for text in warnings if text != headline_text(diagnosis)])
    yield from _files(paint, diagnosis, options)
    if options.verbose:
        yield from _groups(paint, diagnosis)
    yield ""
    yield paint("dim", "; ".join(diagnosis.summary))


def headline(diagnosis: Diagnosis, options: TextOptions) -> str:
    word = {"fault": "", "unclear": "unclear: ", "ok": "nothing wrong: "}[diagnosis.status]
    color = {"fault": "red", "unclear": "yellow", "ok": "green"}[diagnosis.status]
    return _paint(options.color, color, word + clean(headline_text(diagnosis)))


def headline_text(diagnosis: Diagnosis) -> str:
    """The answer in one sentence, without the status."""
    if diagnosis.verdict is not None:
        return diagnosis.verdict.sentence
    if diagnosis.status == "ok":
        only_stacks = not diagnosis.ranks and any(note.kind == "stacks" for note in diagnosis.files)
        known = [f for f in diagnosis.findings if f.cause in ("pause", "unrecorded") and f.confidence == 1.0]
        calls = known[0].sentence if known else "the calls of all ranks fit together and none is stuck"
        return "the stacks show ranks that move on" if only_stacks else calls
    told = (f.sentence for f in diagnosis.findings if f.cause != "unsafe_pickle")
    calls = "the calls that could be read fit together, and none is stuck"
    return next(told, calls if diagnosis.ranks else "no calls to judge")


def clean(text: str) -> str:
    """Text of a dump without control characters: a hostile name must not steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def state_name(code: int) -> str:
    """ "completed", ...; a damaged record may hold any number."""
    return State(code).name.lower() if code in State._value2member_map_ else f"state {code}"


def frame_text(frame: Frame) -> str:
    """ "path/to/train.py:44 in sync_stats"."""
    return clean(f"{frame.file}:{frame.line} in {frame.name}")


def _scope(verdict: Finding) -> str:
    where = f", at {verdict.where}" if verdict.where else ""
    group = f", group {verdict.group}" if verdict.group else ""
    number = f" #{verdict.sequence}" if verdict.sequence is not None else ""
    return clean(f"{group}{number}{where}")


def _others(paint: Painter, diagnosis: Diagnosis) -> Iterator[str]:
    roots = [finding for finding in diagnosis.findings if finding.severity == "root"][1:]
    yield from _list(
        paint, "other root causes", [f"{f.cause}: {f.sentence} ({f.confidence:.0%})" for f in roots]
    )
    folded = [finding for finding in diagnosis.findings if finding.severity == "consequence"]
    yield from _list(paint, "follows from it", [finding.sentence for finding in folded])


def _stacks(paint: Painter, verdict: Finding, options: TextOptions) -> Iterator[str]:
    if not verdict.stacks:
        return
    yield ""
    yield paint("bold", "stacks")
    guilty = set(verdict.ranks)
    shown = verdict.stacks if options.full_stacks else verdict.stacks[:MAX_STACKS]
    labels = (*verdict.stack_labels, *("" for _ in shown))
    for (ranks, frames), label in zip(shown, labels, strict=False):
        role = ("guilty" if guilty & set(ranks) else "waiting") + (f", {label}" if label else "")
        yield clean(f"  {ranks_text(ranks)} ({role})")
        visible = frames if options.full_stacks else visible_frames(frames)
        for frame in visible:
            yield f"    {frame_text(frame)}"
        if len(frames) > len(visible):
            yield paint("dim", f"    … {len(frames) - len(visible)} more frames (--print_stack_trace)")
    if len(verdict.stacks) > len(shown):
        yield paint("dim", f"  … {len(verdict.stacks) - len(shown)} more stacks (--print_stack_trace)")


def visible_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The frames of the user's own code, a few; the innermost ones when there are none."""
    own = tuple(frame for frame in frames if is_user_file(frame.file))
    return (own or frames)[:MAX_FRAMES]


def _files(paint: Painter, diagnosis: Diagnosis, options: TextOptions) -> Iterator[str]:
    bad = [note for note in diagnosis.files if note.status != "ok" or note.note]
    shown = list(diagnosis.files) if options.verbose else bad[:MAX_FILES]
    if not shown:
        return
    lines = [
        f"{note.path}: {note.status}, {note.kind or 'unknown'}{', ' + note.note if note.note else ''}"
        for note in shown
    ]
    if len(bad) > len(shown):
        lines.append(f"… {len(bad) - len(shown)} more (-v)")
    yield from _list(paint, "files", lines)


def _groups(paint: Painter, diagnosis: Diagnosis) -> Iterator[str]:
    lines = []
    for group in diagnosis.groups:
        members = f"ranks {rank_list(group.members)}" + ("" if group.members_known else " (as seen in calls)")
        behind = f", behind: {rank_list(group.behind)}" if group.behind else ""
        lines.append(
            f"{group.label} ({group.backend or 'library unknown'}, name {group.name!r}): {members}; "
            f"calls #{group.first_sequence} to #{group.last_sequence}{behind}"
        )
    yield from _list(paint, "groups", lines)


def _paint(color: bool, style: str, text: str) -> str:
    codes = {"red": "1;31", "green": "1;32", "yellow": "1;33", "bold": "1", "dim": "2"}
    return f"\x1b[{codes[style]}m{text}\x1b[0m" if color else text


def _list(paint: Painter, title: str, lines: list[str] | tuple[str, ...]) -> Iterator[str]:
    if lines:
        yield ""
        yield paint("bold", title)
        for line in lines:
            yield f"  - {clean(line)}"


def render_entries(
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
        yield from _numbered_stacks(ordered, numbers)


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


def _numbered_stacks(traces: Sequence[RankTrace], numbers: dict[tuple[int, int], int]) -> Iterator[str]:
    tables = {id(trace.stacks): trace.stacks for trace in traces}
    yield ""
    for (table, index), number in numbers.items():
        yield f"stack {number}"
        for frame in tables[table][index]:
            yield f"    {frame_text(frame)}"
