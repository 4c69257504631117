"""The report as lines of text: the tree first, then the table of ranks, then the verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allranks.model.stacks import RankState, StacksReport
from allranks.stacks.rank_sets import compress
from allranks.stacks.tree import Node
from allranks.stacks.user_code import is_user_file, short_name

MAX_LINES = 400  # of the tree; the HTML report has no limit


def render_text(report: StacksReport, roots: Sequence[Node]) -> Iterator[str]:
    """Everything a person needs at three in the morning, in reading order."""
    yield from _tree_lines(roots, frozenset(report.culprits))
    yield ""
    yield from _table(report)
    yield ""
    yield from _verdict(report)


def _verdict(report: StacksReport) -> Iterator[str]:
    word = {True: "HUNG", False: "NOT HUNG", None: "UNCLEAR"}[report.hung]
    yield f"{word}: {report.sentence}"
    if report.hung is not False and report.reason and report.reason not in report.sentence:
        yield f"  because {report.reason}"
    for rank in report.culprits[:5]:
        state = report.ranks[rank]
        yield f"  rank {rank}: {state.evidence}"
    for line in report.ras:
        yield f"  NCCL RAS: {line}"
    for note in report.notes[:20]:
        yield f"  note: {note}"
    if len(report.notes) > 20:
        yield f"  and {len(report.notes) - 20} more notes (--json has them all)"


def _table(report: StacksReport) -> Iterator[str]:
    """One line for each group of ranks that do the same at the same place."""
    groups: dict[tuple[str, str, str], list[RankState]] = {}
    for state in report.ranks.values():
        groups.setdefault((state.cause, state.where, state.operation), []).append(state)
    rows = [("RANKS", "CAUSE", "WHERE", "EVIDENCE")]
    ordered = sorted(
        groups.values(), key=lambda states: (states[0].rank not in report.culprits, states[0].rank)
    )
    for states in ordered:
        first = states[0]
        mark = "*" if first.rank in report.culprits else ""
        rows.append(
            (compress(s.rank for s in states) + mark, first.cause, first.where or "-", first.evidence)
        )
        rows += [
            (f"  └ child {child.child}", child.cause, child.where or "-", child.evidence)
            for child in first.children[:8]
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    widths = [min(width, limit) for width, limit in zip(widths, (32, 20, 48), strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        yield "  ".join([*cells, row[3]]).rstrip()


def _tree_lines(roots: Sequence[Node], culprits: frozenset[int]) -> Iterator[str]:
    count = 0
    for root in roots:
        name = {"main": "main thread", "child": "child processes, main thread"}.get(root.role, root.role)
        yield f"{name} · ranks {compress(root.ranks)}"
        for line in _branches(root, "  ", culprits):
            count += 1
            if count > MAX_LINES:
                yield "  … cut; the HTML report has the whole tree"
                return
            yield line


def _branches(node: Node, indent: str, culprits: frozenset[int]) -> Iterator[str]:
    """Chains stay on one level; a fork opens a branch for each side. An explicit stack: trees may be deep."""
    todo: list[tuple[Node, str, str]] = []
    _push(todo, node, indent)
    while todo:
        one, lead, deeper = todo.pop()
        yield lead + _label(one, culprits)
        while len(one.children) == 1 and one.children[0].ranks == one.ranks:
            one = one.children[0]
            yield deeper + _label(one, culprits, ranks=False)
        _push(todo, one, deeper)


def _push(todo: list[tuple[Node, str, str]], node: Node, indent: str) -> None:
    if len(node.children) == 1:
        todo.append((node.children[0], indent, indent))
        return
    last = len(node.children) - 1
    for index in range(last, -1, -1):
        corner, run = ("└─ ", "   ") if index == last else ("├─ ", "│  ")
        todo.append((node.children[index], indent + corner, indent + run))


def _label(node: Node, culprits: frozenset[int], ranks: bool = True) -> str:
    frame = node.frame
    if frame is None:
        return "?"
    file = frame.file if is_user_file(frame.file) and len(frame.file) < 60 else frame.file.rsplit("/", 1)[-1]
    text = f"{short_name(frame.name)} ({file.rsplit('/', 1)[-1]}:{frame.line})"
    if not ranks:
        return text
    sign = " ◄" if culprits and set(node.ranks) <= culprits else ""
    return f"[{compress(node.ranks)}]{sign} {text}"
