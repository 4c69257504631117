"""What each rank of an incident was doing: its stack and its last calls, for pages that show them on a click. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from allranks.model.incident import Incident
from allranks.model.trace import Flag, RankTrace, State
from allranks.pages import seconds
from allranks.pages.cards import is_library, short
from allranks.report.text import clean

MAX_GROUPS = 64
MAX_TRACES = 8  # of which the last calls are shown
MAX_CALLS = 10
MAX_FRAMES = 40


@dataclass(frozen=True)
class RankEvidence:
    """Ranks that did the same. `calls` are of the first of them."""

    ranks: tuple[int, ...]
    title: str  # "Ranks 0-7, 9"
    guilty: bool
    cause: str
    where: str
    evidence: str
    stack: tuple[str, ...]  # innermost first
    calls: tuple[str, ...] = ()  # oldest first

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def chosen_ranks(incident: Incident) -> frozenset[int]:
    """The ranks whose last calls are worth reading: the guilty ones, then one of each group."""
    groups = _groups(incident)
    ranks = [*incident.ranks, *(members[0] for _, members in groups)]
    return frozenset(list(dict.fromkeys(ranks))[:MAX_TRACES])


def rank_evidence(incident: Incident, traces: Sequence[RankTrace] = ()) -> list[RankEvidence]:
    """One entry for all ranks with the same stack, the guilty ones first; at most MAX_GROUPS."""
    calls = {trace.header.rank: last_calls(trace) for trace in traces if trace.header.rank is not None}
    found = []
    for (guilty, cause, where, evidence, stack), ranks in _groups(incident)[:MAX_GROUPS]:
        recent = next((calls[rank] for rank in ranks if rank in calls), ())
        title = f"Rank{'s' if len(ranks) > 1 else ''} {short(tuple(ranks))}"
        found.append(
            RankEvidence(tuple(ranks), title, guilty, cause, where, evidence, stack[:MAX_FRAMES], recent)
        )
    known = {rank for entry in found for rank in entry.ranks}
    found += [
        RankEvidence((rank,), f"Rank {rank}", rank in incident.ranks, "", "", "", (), recent)
        for rank, recent in sorted(calls.items())
        if rank not in known and recent
    ]
    return found


def last_calls(trace: RankTrace, limit: int = MAX_CALLS) -> tuple[str, ...]:
    """The last calls of a rank, one line each, the newest last."""
    begin = max(0, len(trace.calls) - limit)
    return tuple(_call(trace, index) for index in range(begin, len(trace.calls)))


def _call(trace: RankTrace, index: int) -> str:
    call = trace.calls[index]
    name = f"{trace.names[int(call['op'])]} #{int(call['seq'])}"
    group = trace.groups[int(call["group"])]
    created, completed = int(call["created_ns"]), int(call["completed_ns"])
    if completed > created:
        state = f"finished in {seconds((completed - created) / 1e9)}"
    elif int(call["state"]) == State.COMPLETED or int(call["flags"]) & Flag.RETIRED:
        state = "finished"
    else:
        open_s = max(0, trace.header.written_ns - created) / 1e9
        state = f"not finished after {seconds(open_s)}" if open_s else "not finished"
    frames = trace.stacks[int(call["stack"])]
    line = next((frame for frame in frames if not is_library(frame.file)), None)
    at = f", at {line.file.rpartition('/')[2]}:{line.line}" if line else ""
    return clean(f"{name} of {group.desc or group.name or 'a group'}: {state}{at}")


_Key = tuple[bool, str, str, str, tuple[str, ...]]


def _groups(incident: Incident) -> list[tuple[_Key, list[int]]]:
    ranks: Mapping[str, Mapping[str, object]] = (incident.stacks or {}).get("ranks") or {}
    same: dict[_Key, list[int]] = {}
    for rank, facts in ranks.items():
        cause, where, evidence = (str(facts.get(name) or "") for name in ("cause", "where", "evidence"))
        frames = facts.get("stack")
        stack = tuple(str(frame) for frame in frames) if isinstance(frames, list | tuple) else ()
        key = (int(rank) in incident.ranks, cause.replace("_", " "), where, evidence, stack)
        same.setdefault(key, []).append(int(rank))
    return sorted(same.items(), key=lambda item: (not item[0][0], min(item[1])))
