"""The verdict on a job of several processes: STUCK, MOVING or UNCLEAR, who must move first, and who waits for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.diagnosis.process_roots import Root, join_late, share_object, smallest_circle
from allranks.diagnosis.process_units import LIFE, Unit, Waits
from allranks.diagnosis.process_words import (
    chain_of,
    describe,
    describe_waiters,
    guilty_of,
    listed,
    sentence_of,
)
from allranks.diagnosis.processes import find_waits
from allranks.model.stacks import Guilty, JobLook, Process, ProcessFinding

MAX_NAMED = 6


def explain_processes(look: JobLook) -> ProcessFinding:
    """What a look at a job says."""
    waits = find_waits(look)
    roots = [Root(waits, smallest_circle(waits, nodes)) for nodes in waits.graph.sinks()]
    stuck = sorted((root for root in roots if root.accused), key=lambda root: root.rank)
    dead = [p for p in look.processes if not p.alive and p.ended and not p.system]
    # what was killed may have made others end, not the other way round
    dead = [p for p in dead if p.ended.startswith("killed")] or dead
    works = any(not u.still and not u.process.system for u in waits.units)
    missed = stuck or [root for root in roots if root.polls and not works]
    if dead and missed and not _joins_again(dead, missed[0]):
        return _dead(look, dead, missed[0])
    if stuck:
        return _stuck(look, [root for root in stuck if root.rank[:3] == stuck[0].rank[:3]])
    return _retries(look, waits) or _lost_task(look, waits) or _not_stuck(look, waits, roots)


def _lost_task(look: JobLook, waits: Waits) -> ProcessFinding | None:
    """A process waits for a result of its pool, and every worker waits for a task: one has died with it."""
    for unit in waits.units:
        frames = unit.thread.frames[:6]
        if unit.thread.wait.kind != "child" or not any(
            f.file.endswith("multiprocessing/pool.py") for f in frames
        ):
            continue
        family = {unit.process.pid, *unit.thread.wait.pids}
        near = [u for u in waits.units if u.process.pid in family and u is not unit]
        near = [
            u for u in near if not _calls(u, "_handle_workers")
        ]  # it only looks for workers that have ended
        if unit.still and not any(u.active or not u.still for u in near):
            takes = any(_calls(u, "_handle_results") for u in near)
            why = (
                "the one with this task has ended" if takes else "the thread that takes its results has ended"
            )
            says = f"{describe(unit)}, and every worker of its pool waits for a task: {why}"
            return ProcessFinding("stuck", says, (guilty_of(unit),), reason="no process works on the result")
    return None


def _calls(unit: Unit, function: str) -> bool:
    return any(f.name.endswith(function) for f in unit.thread.frames)


def _retries(look: JobLook, waits: Waits) -> ProcessFinding | None:
    """Processes that ask again and again, while those that could answer otherwise do nothing but answer: no answer will change.
    None where anything else works, or waits for something."""
    mine = [u for u in waits.units if not u.process.system]
    asking = [u for u in mine if u.thread.wait.operation == "retry" and u.thread.main]
    others = [u for u in mine if u not in asking and u.thread.wait.kind not in LIFE]
    asked = {u.process.where for u in asking}
    servers = [p for p in look.processes if p.where not in asked and any(x.kind == "listen" for x in p.links)]
    works = [u for u in others if (u.active or u.thread.busy) and not (u.thread.moved and u.thread.handles)]
    if not asking or not servers or works:
        return None
    names = listed(f"{p.name} (pid {p.pid})" for p in servers[:3])
    sentence = f"{describe(asking[0])}; {names} answers and does nothing else"
    guilty = tuple(guilty_of(unit) for unit in asking[:MAX_NAMED])
    return ProcessFinding(
        "stuck",
        sentence,
        guilty,
        reason=f"the same loop for {look.seconds:.0f} s, and no process works on an answer",
    )


# --- the answer -------------------------------------------------------------------------------------------


def _dead(look: JobLook, dead: Sequence[Process], root: Root) -> ProcessFinding:
    guilty = tuple(Guilty(p.pid, p.name, wait=p.ended, node=p.node) for p in dead[:MAX_NAMED])
    polls = root.polls and dead[0].ended.startswith("killed")  # for what the killed one would have made
    guilty += () if root.circle or polls else tuple(guilty_of(unit) for unit in root.units)
    names = listed(f"{p.name} (pid {p.pid}) has ended: {p.ended}" for p in dead[:3])
    tail = describe_waiters(root)
    blocked = "; ".join(dict.fromkeys(describe(u) for u in root.units[:2] if u.active))
    sentence = ". ".join(text for text in (names, blocked, tail) if text)
    return ProcessFinding(
        "stuck",
        sentence,
        guilty,
        chain_of(root),
        root.edges,
        "a process of the job has ended, and others wait",
    )


def _joins_again(dead: Sequence[Process], root: Root) -> bool:
    """Whether a process of the same role was started in place of a dead one, and waits to join the group that the others
    still use: they never form it again."""
    return any(u.process.role == p.role for u in join_late(root.units) for p in dead)


def _stuck(look: JobLook, roots: Sequence[Root]) -> ProcessFinding:
    best = roots[0]
    chosen = [best]
    guilty: dict[tuple[str, int, int], Guilty] = {}
    for root in chosen:
        for unit in (*root.blamed, *share_object(root)):
            one = guilty_of(unit)
            guilty.setdefault((one.node, one.pid, one.line), one)
    for unit in best.units if len(best.units) == 1 else ():
        if not unit.process.read:  # not Python: the line that started it is what people can see
            guilty |= {(g.node, g.pid, g.line): g for g in _starters(best, unit)}
    return ProcessFinding(
        "stuck",
        sentence_of(best),
        tuple(guilty.values())[: 2 * MAX_NAMED],
        chain_of(best),
        best.edges,
        "; ".join([f"nothing in this chain moved for {look.seconds:.0f} s", *_clues(look, best)]),
    )


def _clues(look: JobLook, root: Root) -> list[str]:
    """What no wait leads to: processes that those of a root started and that have ended without an error; who polls."""
    mine = {u.process.where for u in root.units}
    ended = [f"{p.name} (pid {p.pid})" for p in look.processes if (p.node, p.ppid) in mine and not p.alive]
    polls = [u for u in root.waits.units if u.thread.main and u.still and u.thread.wait.kind == "poll"]
    said = [f"ended: {', '.join(ended[:3])}{' …' if len(ended) > 3 else ''}"] if ended else []
    return said + [describe(unit) for unit in polls if unit.process.where not in mine][:3]


def _starters(root: Root, unit: Unit) -> list[Guilty]:
    direct = [root.waits.units[n] for n in root.waits.graph.waits_for_me.get(root.nodes[0], ())]
    reads = [u for u in direct if u.thread.wait.kind == "output" or u.process.pid == unit.process.ppid]
    return [guilty_of(one) for one in reads][:1]


def _computes(look: JobLook, waits: Waits) -> ProcessFinding:
    """The busy thread that most processes wait for. A look cannot distinguish a long computation from a loop without end, nor
    see what may end a loop from outside."""
    busy = [n for n, u in enumerate(waits.units) if u.thread.busy and not u.process.system]
    roots = (Root(waits, (n,)) for n in busy)
    root = max(roots, key=lambda one: (one.units[0].active, len(one.waiting)))
    unit, behind = root.units[0], describe_waiters(root)
    text = f"{describe(unit)} for the whole {look.seconds:.0f} s"
    at = unit.thread.at or "this line"
    advice = f"a long computation or a loop without end: --for 60 tells whether it leaves {at}"
    if unit.thread.wait.operation == "loop":
        advice = f"only something outside of this loop can end it: if {at} is still the same with --for 60, nothing does"
    return ProcessFinding("unclear", f"{text}; {behind}" if behind else text, reason=advice)


def _takes_inside(look: JobLook, waits: Waits) -> list[Unit]:
    """Main threads that take their work from processes of the job, if all do so and nothing from outside can come to any."""
    mains = [u for u in waits.units if u.thread.main and not u.process.system]
    mains = [u for u in mains if u.thread.wait.kind not in LIFE and not _keeps_objects(u.process)]
    served = any(
        x.kind == "listen" for p in look.processes if not _keeps_objects(p) and not p.system for x in p.links
    )
    inside = all(u.thread.wait.ends and u.still for u in mains)
    return mains if inside and not served and not waits.outside else []


def _keeps_objects(process: Process) -> bool:
    """Whether it is the server of a multiprocessing manager."""
    frames = (f for t in process.threads for f in t.frames if f.file.endswith("multiprocessing/managers.py"))
    return any(f.name.endswith("serve_forever") for f in frames)


def _not_stuck(look: JobLook, waits: Waits, roots: Sequence[Root]) -> ProcessFinding:
    moving = [u for u in waits.units if u.thread.moved and not u.process.system]
    busy = [u for u in waits.units if u.thread.busy and not u.process.system]
    links = [p for p in look.processes for link in p.links if link.moved and not p.system and p.read]
    polls = {u.process.where for u in waits.units if u.thread.wait.kind == "poll" and u.still}
    ticks = [
        p for p in look.processes if p.ticks > 10 and p.where not in polls and not p.system and not p.ours
    ]
    if moving:
        names = listed(dict.fromkeys(f"{u.process.name} (pid {u.process.pid})" for u in moving[:3]))
        return ProcessFinding("moving", f"stacks change in {names}", reason="stacks change")
    if soon := [
        root
        for root in roots
        if root.soon_s is not None
        and not root.units[0].process.system
        and root.still
        and (root.behind or root.units[0].thread.main)
    ]:
        unit = soon[0].units[0]
        return ProcessFinding(
            "moving", f"{describe(unit)}; then the job continues", reason="a sleep that ends soon"
        )
    if links:
        names = listed(dict.fromkeys(f"{p.name} (pid {p.pid})" for p in links[:3]))
        return ProcessFinding("moving", f"data moves between processes: {names}", reason="data moves")
    if busy:
        return _computes(look, waits)
    if ticks:
        return ProcessFinding(
            "unclear",
            f"{ticks[0].name} (pid {ticks[0].pid}) used {ticks[0].ticks / 100:.1f} s of CPU time in {look.seconds:.0f} s",
            reason="sample longer: --for 60",
        )
    if not any(p.alive for p in look.processes):
        ends = (
            f"{p.name} (pid {p.pid}) has ended{': ' * bool(p.ended)}{p.ended}" for p in look.processes[:3]
        )
        return ProcessFinding("unclear", listed(ends))
    if not any(p.read for p in look.processes):
        return ProcessFinding("unclear", "no stack of this job could be read", reason="see the notes")
    rests = {root.nodes[0] for root in roots if root.stays_alive}
    works = [u for n, u in enumerate(waits.units) if u.active and n not in rests and not u.process.system]
    if all(u.thread.wait.kind in LIFE for u in works):
        if closed := _takes_inside(look, waits):
            said = "; ".join(describe(u) for u in closed[:4])
            advice = (
                "idle if work comes from elsewhere; otherwise the process that sends it has ended or lost it"
            )
            return ProcessFinding(
                "unclear", f"no process works, and these wait for work from each other: {said}", reason=advice
            )
        return ProcessFinding("moving", "idle: every process waits for its next work", reason="idle")
    still = [root for root in roots if root.still and root.units[0].active]
    timed = [root for root in still if root.timed_s is not None or root.asked is not None]
    blocked = [u for u in waits.units if u.active and u.still and u.thread.wait.kind not in LIFE]
    text = describe(blocked[0]) if blocked else "no process could be judged"
    text = sentence_of((timed or still)[0]) if still else text
    advice = "no process waits for it; run the command again in a minute: if the line is still the same, it is stuck"
    if timed and timed[0].timed_s is not None:
        advice = f"this wait ends by itself: run the command again in {timed[0].timed_s:.0f} s"
    elif still and still[0].units[0].thread.wait.kind == "signal":
        advice = "no process of this job is about to send it, but another process may"
    elif timed and (link := timed[0].asked) is not None:
        there = link.peer.split(">")[0].rsplit(" ", 1)[-1]
        advice = f"no process of this job is at {there}, and data moved {link.quiet_s or 0:.0f} s ago: inspect that process"
        if link.named:
            advice = f"no process of this job is about to write into {link.named}, but another process may"
    return ProcessFinding("unclear", text, reason=advice)
