"""Holds every rank, call, size, tag, step and line that a finding names against the calls of the traces.

Sentences are read by the phrases that `diagnose` builds them of; each phrase is a claim that can be checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from allranks.diagnosis.context import place
from allranks.model.diagnosis import Diagnosis, Finding, RankNow
from allranks.model.trace import Flag, RankTrace, State

RANKS = r"ranks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)"
CALL = r"([A-Za-z_]\w*) #(\d+) of group (\S+?(?:\[[^\]]*\])?)(?=[\s,;:)]|$)"
PLACE = r"([\w.\-]+\.py:\d+)"


def _row(trace: RankTrace, row: np.void, op: str, at: str) -> dict[str, object]:
    """What sentences say of single calls."""
    shapes = trace.shapes[int(row["shapes"])]
    state = State(int(row["state"]))
    return {
        "op": op,
        "at": at,
        "done": state is State.COMPLETED,
        "failed": state in (State.FAILED, State.TIMED_OUT),
        "known": not int(row["flags"]) & int(Flag.STATE_UNKNOWN | Flag.COMPLETION_UNRELIABLE),
        "inputs": [list(size) for size in shapes.inputs],
        "outputs": [list(size) for size in shapes.outputs],
        **{name: int(row[name]) for name in ("peer", "tag", "root", "step", "seq")},
    }


class Facts:
    """What the traces say."""

    def __init__(
        self, traces: Sequence[RankTrace], seen: Iterable[RankNow], labels: dict[str, set[str]]
    ) -> None:
        self.by_rank = {trace.header.rank: trace for trace in traces}
        self.world = max((trace.header.world_size or 0 for trace in traces), default=0)
        self.world = max(self.world, *((rank or 0) + 1 for rank in self.by_rank), 0)
        self.labels = labels
        self.calls: dict[tuple[int, str, int], list[tuple[str, str, str, int]]] = {}
        self.places: set[str] = {now.where.split(" ")[0] for now in seen if now.where}
        self.tags: set[int] = set()
        self.last: dict[int, tuple[str, int]] = {}
        self.rows: dict[int, list[dict[str, object]]] = {}
        for rank, trace in self.by_rank.items():
            self.places |= set(re.findall(PLACE, trace.progress.closed))
            for row in trace.calls:
                at = place(trace.stacks[int(row["stack"])]).split(" ")[0]
                shapes, name = trace.shapes[int(row["shapes"])], trace.groups[int(row["group"])].name
                sizes = (
                    " ".join(map(str, map(list, shapes.inputs)))
                    + " | "
                    + " ".join(map(str, map(list, shapes.outputs)))
                )
                op = trace.names[int(row["op"])]
                self.calls.setdefault((rank or 0, name, int(row["seq"])), []).append(
                    (op, at, sizes, int(row["step"]))
                )
                self.places.add(at)
                self.tags.add(int(row["tag"]))
                self.last[rank or 0] = (op, int(row["seq"]))
                self.rows.setdefault(rank or 0, []).append(_row(trace, row, op, at))

    def of(self, rank: int, label: str, seq: int) -> list[tuple[str, str, str, int]]:
        return [
            call for name in self.labels.get(label, {label}) for call in self.calls.get((rank, name, seq), [])
        ]

    def made(self, rank: int, op: str, seq: int, label: str) -> bool:
        return any(call[0] == op for call in self.of(rank, label, seq))

    def made_by_anyone(self, op: str, seq: int, label: str) -> bool:
        return any(self.made(rank or 0, op, seq, label) for rank in self.by_rank)


def ranks_of(text: str) -> list[int]:
    """ "0, 2-4" → [0, 2, 3, 4]."""
    found: list[int] = []
    for part in text.replace(" ", "").strip(",").split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1) if low else []
    return found


def labels_of(diagnosis: Diagnosis) -> dict[str, set[str]]:
    """What findings call a group → its names in the traces."""
    found: dict[str, set[str]] = {}
    for group in diagnosis.groups:
        found.setdefault(group.label, set()).add(group.name)
    return found


def false_statements(
    diagnosis: Diagnosis, traces: Sequence[RankTrace], seen: Iterable[RankNow] = ()
) -> list[str]:
    """Every claim of every finding that the calls contradict."""
    facts = Facts(traces, seen, labels_of(diagnosis))
    return [
        f"{claim}   in: {text}"
        for finding in diagnosis.findings
        for text in (finding.sentence, *finding.evidence, *finding.advice)
        for claim in _false(facts, finding, text)
    ]


def _false(facts: Facts, finding: Finding, text: str) -> Iterator[str]:
    for match in re.finditer(RANKS, text):
        for rank in ranks_of(match[1]):
            if rank >= facts.world:
                yield f"there is no rank {rank}"
    for match in re.finditer(PLACE, text):
        if match[1] not in facts.places:
            yield f"nobody called at {match[1]}"
    for match in re.finditer(r"tag (\d+)", text):
        if int(match[1]) not in facts.tags:
            yield f"no message has tag {match[1]}"
    for match in re.finditer(CALL, text):
        op, seq, label = match[1], int(match[2]), match[3]
        if op in ("message", "call"):
            continue
        if not facts.made_by_anyone(op, seq, label):
            yield f"nobody called {match[0]}"
    yield from _claims(facts, text)
    yield from _sizes(facts, text)
    yield from _messages(facts, text)
    yield from _ends(facts, text)


def _claims(facts: Facts, text: str) -> Iterator[str]:
    """Who made, skipped or ended which call, at which line."""
    entered = (
        rf"{RANKS}(?: \([^)]*\))? (?:entered|called|made an extra|wait in|waits in) {CALL}(?: at {PLACE})?"
    )
    for match in re.finditer(entered, text):
        op, seq, label, at = match[2], int(match[3]), match[4], match[5]
        for rank in ranks_of(match[1]):
            calls = facts.of(rank, label, seq)
            if not any(op in ("call", call[0]) and at in (None, call[1]) for call in calls):
                yield f"rank {rank} did not call {op} #{seq} of {label}{f' at {at}' if at else ''}: {calls}"
    for match in re.finditer(rf"{RANKS}(?: \([^)]*\))? never entered {CALL}", text):
        for rank in ranks_of(match[1]):
            if any(call[0] == match[2] for call in facts.of(rank, match[4], int(match[3]))):
                yield f"rank {rank} did call {match[2]} #{match[3]} of {match[4]}"
    for match in re.finditer(rf"the last call of rank (\d+) was {CALL}", text):
        if facts.last.get(int(match[1])) != (match[2], int(match[3])):
            yield f"the last call of rank {match[1]} was {facts.last.get(int(match[1]))}"
    skipped = rf"{RANKS}(?: \([^)]*\))? skipped {CALL}(?: at {PLACE})?.*?, which {RANKS} made"
    for match in re.finditer(skipped, text):
        op, seq, label, at = match[2], int(match[3]), match[4], match[5]
        for rank in ranks_of(match[6]):
            if not any(call[0] == op and at in (None, call[1]) for call in facts.of(rank, label, seq)):
                yield f"rank {rank} did not make {op} #{seq} at {at}: {facts.of(rank, label, seq)}"
    for match in re.finditer(
        rf"#(\d+) of group (\S+)[^#]*?, where {RANKS} called (\w+)(?: at {PLACE})?", text
    ):
        for rank in ranks_of(match[3]):
            calls = facts.of(rank, match[2], int(match[1]))
            if not any(call[0] == match[4] and match[5] in (None, call[1]) for call in calls):
                yield f"rank {rank} did not call {match[4]} #{match[1]} at {match[5]}: {calls}"
    for match in re.finditer(r"rank (\d+) entered #(\d+) in step (\d+), rank (\d+) in step (\d+)", text):
        for rank, step in ((match[1], match[3]), (match[4], match[5])):
            steps = {
                c[3]
                for (r, _, s), calls in facts.calls.items()
                if (r, s) == (int(rank), int(match[2]))
                for c in calls
            }
            if int(step) not in steps:
                yield f"rank {rank} was not in step {step} at #{match[2]}"


def _sizes(facts: Facts, text: str) -> Iterator[str]:
    """Sizes that a rank is said to have passed."""
    for match in re.finditer(rf"{RANKS}: in ((?:\[[\d, ]*\] ?)+)out ((?:\[[\d, ]*\] ?)+)(?!or )", text):
        wanted = f"{match[2].strip()} | {match[3].strip()}"
        for rank in ranks_of(match[1]):
            sizes = {c[2] for (r, _, _), calls in facts.calls.items() if r == rank for c in calls}
            alternatives = " or in " in text
            if wanted not in sizes and not alternatives and "[]" not in (match[2].strip(), match[3].strip()):
                yield f"rank {rank} never passed {wanted}"


def _messages(facts: Facts, text: str) -> Iterator[str]:
    """Partners, tags, sizes and roots that a rank is said to have passed."""
    verbs = {"send to": "send", "recv from": "recv", "sends to": "send", "receives from": "recv"}
    for match in re.finditer(r"rank (\d+) waits in (send to|recv from) rank (\d+)", text):
        calls = [c for c in facts.rows.get(int(match[1]), []) if c["op"] == verbs[match[2]]]
        if not any(c["peer"] == int(match[3]) and not c["done"] for c in calls):
            yield f"rank {match[1]} has no open {match[2]} rank {match[3]}"
    for match in re.finditer(
        r"rank (\d+) sends to rank (\d+) with tag (\d+).*?receives with tag (\d+)", text
    ):
        for rank, peer, tag, op in (
            (match[1], match[2], match[3], "send"),
            (match[2], match[1], match[4], "recv"),
        ):
            wanted = {"op": op, "peer": int(peer), "tag": int(tag)}
            if not any(wanted.items() <= c.items() for c in facts.rows.get(int(rank), [])):
                yield f"rank {rank} made no {op} with rank {peer} and tag {tag}"
    for match in re.finditer(r"rank (\d+) sends (\[\[.*?\]\]), rank (\d+) expects (\[\[.*?\]\])", text):
        for rank, op, side, size in (
            (match[1], "send", "inputs", match[2]),
            (match[3], "recv", "outputs", match[4]),
        ):
            if not any(c["op"] == op and str(c[side]) == size for c in facts.rows.get(int(rank), [])):
                yield f"rank {rank} made no {op} of {size}"
    for match in re.finditer(rf"{RANKS}(?:: | had )root (\d+)", text):
        for rank in ranks_of(match[1]):
            if not any(c["root"] == int(match[2]) for c in facts.rows.get(rank, [])):
                yield f"rank {rank} named no root {match[2]}"


def _ends(facts: Facts, text: str) -> Iterator[str]:
    """How calls, ranks and steps ended, and how many there are."""
    for match in re.finditer(
        r"the last call of rank (\d+) was [^;]*?\((finished|not finished|failed)\)", text
    ):
        last = facts.rows[int(match[1])][-1]
        said = {"finished": last["done"], "not finished": not last["done"], "failed": last["failed"]}[
            match[2]
        ]
        if last["known"] and not said:
            yield f"the last call of rank {match[1]} was not {match[2]}"
    for match in re.finditer(rf"no file of {RANKS}", text):
        for rank in ranks_of(match[1]):
            if rank in facts.by_rank:
                yield f"there is a file of rank {rank}"
    for match in re.finditer(r"(\d+) of (\d+) ranks agree|(\d+) ranks? (?:have|has) waited", text):
        if not int(match[1] or match[3]) <= int(match[2] or facts.world) <= facts.world:
            yield f"{match[0]}: there are {facts.world} ranks"
    for match in re.finditer(
        r"in step (\d+) rank (\d+) made (\d+) calls? of the group, rank (\d+) (\d+)", text
    ):
        for rank, count in ((match[2], match[3]), (match[4], match[5])):
            made = sum(c["step"] == int(match[1]) for c in facts.rows.get(int(rank), []))
            if made < int(count):
                yield f"rank {rank} made {made} calls in step {match[1]}"
    for match in re.finditer(r"rank (\d+) ended with (exception|signal)", text):
        if not facts.by_rank[int(match[1])].progress.closed.startswith(match[2]):
            yield f"rank {match[1]} ended with {facts.by_rank[int(match[1])].progress.closed!r}"
    for match in re.finditer(r"it is inside (\w+)", text):
        if all(trace.progress.inside != match[1] for trace in facts.by_rank.values()):
            yield f"nobody is inside {match[1]}"
