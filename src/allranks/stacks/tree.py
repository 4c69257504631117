"""One prefix tree over all ranks, snapshots and threads, so that an outlier stands out by its branch. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from allranks.model.stacks import Capture, ProcessCapture, StackFrame, ThreadStack
from allranks.stacks.user_code import cut_fork


@dataclass(frozen=True)
class Node:
    """A frame that some ranks share, with all frames outside of it. Children are sorted by rank count."""

    frame: StackFrame | None  # None at a root
    role: str
    ranks: tuple[int, ...]
    looks: int  # (rank, snapshot, thread) triples that pass here
    always: bool  # every look at these ranks in this role passed here
    children: tuple[Node, ...] = ()


@dataclass
class _Growing:
    """A node while the tree grows."""

    frame: StackFrame | None
    ranks: set[int] = field(default_factory=set)
    looks: int = 0
    children: dict[StackFrame, _Growing] = field(default_factory=dict)


def grow_tree(capture: Capture, all_threads: bool = False) -> tuple[Node, ...]:
    """A root for each role of thread; main threads first, then by number of ranks."""
    seen: dict[str, dict[tuple[StackFrame, ...], list[int]]] = {}
    for process in capture.processes:
        for snapshot in process.snapshots:
            for stack in snapshot.stacks:
                role = _role(process, stack)
                if role and (all_threads or role in ("main", "child")):
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
    root = _Growing(None)
    for frames, ranks in stacks.items():
        _insert(root, [frame for frame in cut_fork(frames) if not frame.native], ranks)
    totals: dict[int, int] = {}
    for ranks in stacks.values():
        for rank in ranks:
            totals[rank] = totals.get(rank, 0) + 1
    return _freeze(root, role, totals)


def _insert(root: _Growing, frames: list[StackFrame], ranks: list[int]) -> None:
    """Adds one stack, outermost frame first, for all the ranks that stand on it."""
    distinct = set(ranks)
    node = root
    node.ranks |= distinct
    node.looks += len(ranks)
    for frame in reversed(frames):
        node = node.children.setdefault(frame, _Growing(frame))
        node.ranks |= distinct
        node.looks += len(ranks)


def _freeze(node: _Growing, role: str, totals: dict[int, int]) -> Node:
    """The finished tree, without recursion: stacks may be deep."""
    order: list[_Growing] = []
    todo = [node]
    while todo:
        one = todo.pop()
        order.append(one)
        todo.extend(one.children.values())
    done: dict[int, Node] = {}
    for one in reversed(order):
        children = sorted(
            (done[id(child)] for child in one.children.values()),
            key=lambda child: (-len(child.ranks), child.ranks[:1]),
        )
        always = one.looks == sum(totals[rank] for rank in one.ranks)
        done[id(one)] = Node(one.frame, role, tuple(sorted(one.ranks)), one.looks, always, tuple(children))
    return done[id(node)]


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
