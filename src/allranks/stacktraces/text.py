"""The report as lines of text: the tree first, then the table of ranks, then the verdict. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from allranks.model.formatting import rank_runs
from allranks.model.stacks import (
    Capture,
    ProcessCapture,
    RankState,
    StackFrame,
    StacksReport,
    ThreadStack,
    is_user_file,
)
from allranks.stacktraces.views import cut_fork, place, short_name, user_frame


def compress(ranks: Iterable[int]) -> str:
    """`0-3,5,7-1023` for a set of ranks; "" for none."""
    return ",".join(rank_runs(ranks))


@dataclass
class Node:
    """A frame that some ranks share, with all frames outside of it."""

    frame: StackFrame | None  # None at a root
    role: str
    looks: int = 0  # (rank, snapshot, thread) triples that pass here
    seen: set[int] = field(default_factory=set)
    inside: dict[StackFrame, Node] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.seen))

    @cached_property
    def children(self) -> list[Node]:
        """By rank count."""
        return sorted(self.inside.values(), key=lambda child: (-len(child.ranks), child.ranks[:1]))


def grow_tree(capture: Capture, all_threads: bool = False) -> tuple[Node, ...]:
    """A root for each role of thread; main threads first, then by number of ranks."""
    seen: dict[str, dict[tuple[StackFrame, ...], list[int]]] = {}
    for process in capture.processes:
        for snapshot in process.snapshots:
            for stack in snapshot.stacks:
                role = _role(process, stack)
                trains = stack.name.startswith("TrainingThread")  # Ray Train's: the main thread only serves
                if role and (all_threads or trains or role in ("main", "child")):
                    seen.setdefault(role, {}).setdefault(stack.frames, []).append(process.rank)
    roots = [_root(role, stacks) for role, stacks in seen.items()]
    roots.sort(key=lambda node: (node.role != "main", node.role != "child", -len(node.ranks), node.role))
    return tuple(roots)


def _role(process: ProcessCapture, stack: ThreadStack) -> str:
    """Threads of different ranks with the same role belong together."""
    main = stack.name == "MainThread" or (stack.tid is not None and stack.tid == process.pid)
    start = "" if process.child is None else "child"
    if main:
        return start or "main"
    name = re.sub(r"\d+", "#", stack.name) or "unnamed"
    return f"{start} thread {name}".strip()


def _root(role: str, stacks: dict[tuple[StackFrame, ...], list[int]]) -> Node:
    root = Node(None, role)
    for frames, ranks in stacks.items():
        python = _from_user([frame for frame in cut_fork(frames) if not frame.native])
        distinct, node = set(ranks), root
        for frame in (None, *reversed(python)):  # the outermost first
            node = node if frame is None else node.inside.setdefault(frame, Node(frame, role))
            node.seen |= distinct
            node.looks += len(ranks)
    return root


def _from_user(frames: list[StackFrame]) -> list[StackFrame]:
    """Without the outermost frames that only start the user's script, runpy and our own, and without how Python imports."""
    frames = [frame for frame in frames if not frame.file.startswith("<frozen importlib")] or frames
    last = len(frames)
    while last and ("runpy" in frames[last - 1].file or "/allranks/" in frames[last - 1].file):
        last -= 1
    return frames[:last] or frames


def find_outliers(roots: Iterable[Node]) -> tuple[tuple[tuple[int, ...], Node], ...]:
    """Branches of main threads taken by fewer than half of the ranks that reached the fork, smallest first."""
    found = []
    for root in roots:
        if root.role != "main":
            continue
        todo = [root]
        while todo:
            node = todo.pop()
            for child in node.children:
                if len(child.ranks) * 2 < len(node.ranks):
                    found.append((child.ranks, child))
                else:
                    todo.append(child)
    found.sort(key=lambda pair: (len(pair[0]), pair[0]))
    return tuple(found)


MAX_LINES = 400  # of the tree; the HTML report has no limit


def render_text(report: StacksReport, roots: Sequence[Node]) -> Iterator[str]:
    """Everything a person needs at three in the morning, in reading order."""
    yield from _verdict(report)
    yield ""
    yield from _table(report)
    yield ""
    yield from _tree_lines(roots, frozenset(report.culprits))


def _verdict(report: StacksReport) -> Iterator[str]:
    word = {True: "STUCK", False: "MOVING", None: "UNCLEAR"}[report.hung]
    yield f"{word}: {report.sentence.removeprefix('not hung: ')}"
    if report.hung is not False and report.reason and report.reason not in report.sentence:
        yield f"  because {report.reason}"
    for rank in report.culprits[:5]:
        seen = report.ranks[rank].evidence
        if seen.partition(" (")[0] not in report.sentence:
            yield f"  rank {rank}: {seen}"
    for line in report.ras:
        yield f"  NCCL RAS: {line}"
    notes = list(_fold_notes(report.notes))
    for note in notes[:20]:
        yield f"  note: {note}"
    if len(notes) > 20:
        yield f"  and {len(notes) - 20} more notes (--json has them all)"


def _fold_notes(notes: Sequence[str]) -> Iterator[str]:
    """Notes that differ only in numbers are one line: a missing right concerns every process alike."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\d+", "#", note), []).append(note)
    for same in alike.values():
        yield same[0] if len(same) == 1 else f"{same[0]} (and {len(same) - 1} others alike)"


def same_states(report: StacksReport) -> list[list[RankState]]:
    """Ranks that do the same at the same place, the culprits first."""
    groups: dict[tuple[str, str, str], list[RankState]] = {}
    for state in report.ranks.values():
        groups.setdefault((state.cause, state.where, state.operation), []).append(state)
    return sorted(groups.values(), key=lambda g: (g[0].rank not in report.culprits, g[0].rank))


def _table(report: StacksReport) -> Iterator[str]:
    """One line for each group of ranks that do the same at the same place."""
    rows = [("RANKS", "CAUSE", "WHERE", "EVIDENCE")]
    for states in same_states(report):
        first = states[0]
        ranks = compress(s.rank for s in states) + ("*" if first.rank in report.culprits else "")
        rows.append((ranks, first.cause, first.where or "-", first.evidence))
        children = ((f"  └ child {child.child}", child) for child in first.children[:8])
        rows += [(name, child.cause, child.where or "-", child.evidence) for name, child in children]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    widths = [min(width, limit) for width, limit in zip(widths, (32, 20, 48), strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
        yield "  ".join([*cells, row[3]]).rstrip()


def role_name(role: str) -> str:
    return {"main": "main thread", "child": "main thread of child processes"}.get(role, role)


def _tree_lines(roots: Sequence[Node], culprits: frozenset[int]) -> Iterator[str]:
    count = 0
    for root in roots:
        yield f"{role_name(root.role)} · rank{'s' if len(root.ranks) > 1 else ''} {compress(root.ranks)}"
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


SCHEMA = 1
Json = dict[str, object]


def report_json(report: StacksReport, roots: Sequence[Node] = ()) -> Json:
    """The public shape; fields may be added, never taken away."""
    return {
        "schema": SCHEMA,
        "state": {True: "stuck", False: "moving", None: "unclear"}[report.hung],
        "guilty": [_guilty(report.ranks[rank]) for rank in report.culprits if rank in report.ranks],
        "hung": report.hung,
        "culprits": list(report.culprits),
        "sentence": report.sentence,
        "reason": report.reason,
        "ranks": {str(rank): _rank(state) for rank, state in sorted(report.ranks.items())},
        "outliers": [
            {"ranks": compress(ranks), "at": place(node.frame) if node.frame else ""}
            for ranks, node in find_outliers(roots)[:20]
        ],
        "ras": list(report.ras),
        "notes": list(report.notes),
    }


def _guilty(state: RankState) -> Json:
    """A rank in the shape that processes of several roles have."""
    frame = user_frame(state.stack)
    at = (frame.file, frame.line, short_name(frame.name)) if frame is not None else ("", 0, "")
    names = dict(zip(("file", "line", "function"), at, strict=True))
    return {
        "pid": state.pid,
        "role": f"rank {state.rank}",
        **names,
        "wait": state.evidence,
        "node": state.host,
    }


def _rank(state: RankState) -> Json:
    facts = {name: value for name, value in vars(state).items() if name != "rank"}
    children = [dict(vars(child)) for child in state.children]
    stack = [place(frame) for frame in state.stack[:60]]
    return {**facts, "children": children, "stack": stack, "notes": list(state.notes)}
