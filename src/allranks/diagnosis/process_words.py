"""The sentences of a verdict on several processes, and the chain of those that wait. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allranks.diagnosis.process_roots import Root
from allranks.diagnosis.process_units import Unit
from allranks.model.formatting import rank_runs
from allranks.model.stacks import ChainLink, Guilty


def guilty_of(unit: Unit) -> Guilty:
    frame = unit.thread.user or next((f for f in unit.thread.frames if not f.native), None)
    where = (frame.file, frame.line, frame.name.rsplit(".", 1)[-1]) if frame is not None else ("", 0, "")
    thread = "" if unit.thread.main or unit.thread.task else f" (thread {unit.thread.name})"
    return Guilty(
        unit.process.pid,
        unit.process.name,
        *where,
        wait=unit.thread.wait.says + thread,
        node=unit.process.node,
    )


def describe(unit: Unit) -> str:
    """ "reward (pid 7) is at reward.py:41 in judge and waits for the answer to its request"."""
    thread = "" if unit.thread.main or unit.thread.task else f", thread {unit.thread.name}"
    left = None if unit.thread.task or unit.thread.wait.kind == "poll" else unit.thread.wait.left_s
    rest = f" for {left:.0f} s more" if left is not None else ""
    at = f" is at {unit.thread.at} and" if unit.thread.at else ""
    return f"{unit.process.name} (pid {unit.process.pid}{thread}){at} {unit.thread.wait.says}{rest}"


def sentence_of(root: Root) -> str:
    """The process that must move first, then those that wait for it."""
    first, waiters = _first_words(root), describe_waiters(root)
    return f"{first}. {waiters}" if waiters else first


def _first_words(root: Root) -> str:
    units = list({(u.process.where, u.thread.user): u for u in root.units}.values())
    blamed = [u for u in units if u in root.blamed]
    first = "; ".join(describe(u) for u in (blamed or units)[:4])
    if 0 < len(blamed) < len(units):
        others = [u for u in units if u not in blamed]
        where = others[0].thread.wait.says.removeprefix("waits ").removeprefix("for ")
        return f"{first}. {_names(others)} wait for {'it' if len(blamed) == 1 else 'them'} ({where})"
    if root.circle and len(units) > 1:
        return f"these wait for each other: {first}"
    if root.circle:
        return f"{first}, and only this process can end that wait"
    return first if units[0].active else f"{first}, while others wait for it"


def _names(units: Sequence[Unit]) -> str:
    names = [f"{u.process.name} (pid {u.process.pid})" for u in units]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def describe_waiters(root: Root) -> str:
    links = [link for link in chain_of(root) if link.waits_for]
    return "; ".join(f"{link.role} {link.waits_for}" for link in links[:4])


def listed(texts: Iterable[str]) -> str:
    return "; ".join(texts)


def chain_of(root: Root) -> tuple[ChainLink, ...]:
    """Who waits for whom, from the root outwards: one link for each role and line."""
    waits, done = root.waits, {u.process.where for u in root.units}
    links: list[ChainLink] = []
    seen, level = set(root.nodes), list(root.nodes)
    while level and len(links) < 20:
        next_level: list[int] = []
        groups: dict[tuple[object, ...], list[tuple[Unit, str]]] = {}
        for node in level:
            for n in waits.graph.waits_for_me.get(node, ()):
                if n in seen or n not in root.behind:
                    continue
                seen.add(n)
                next_level.append(n)
                unit, target = waits.units[n], waits.units[node]
                if unit.process.where not in done:
                    done.add(unit.process.where)
                    user = unit.thread.user
                    line = user and (user.file, user.line)
                    key = (unit.process.role, unit.thread.wait.says, line, target.process.role)
                    ends = [waits.units[m] for m in waits.edges[n] if unit.thread.wait.kind in _ENDS]
                    names = (f"{u.process.name} (pid {u.process.pid})" for u in (target, *ends))
                    groups.setdefault(key, []).append((unit, " or ".join(list(dict.fromkeys(names))[:3])))
        links += [_link(pairs) for pairs in groups.values()]
        level = next_level
    return tuple(links)


#: Waits on one end of a connection or pipe, whose other end several processes may have open.
_ENDS = frozenset({"socket", "pipe"})


def _link(pairs: Sequence[tuple[Unit, str]]) -> ChainLink:
    unit, target = pairs[0]
    processes = [one.process for one, _ in pairs]
    numbers = [p.number for p in processes if p.number is not None]
    name = (
        processes[0].name
        if len(processes) == 1
        else f"{processes[0].role} {','.join(rank_runs(numbers))}".strip()
    )
    says, waits = unit.thread.wait.says, "waits"
    if len(processes) > 1:
        first, _, rest = says.partition(" ")
        says, waits = f"{first.removesuffix('s')} {rest}", "wait"
    to, what = f"{waits} for {target}", f"{waits} for "
    text = f"{to}: {says.removeprefix(what)}" if says.startswith(what) else f"{says} and {to}"
    return ChainLink(name, tuple(p.pid for p in processes), text, unit.thread.at)
