"""Reads dumps of torch and torchcomms, as pickle or JSON. Handles all differences between versions and libraries.

Missing information becomes flags and notes, so that `diagnose` needs no versions: gloo does not distinguish scheduled from
completed; NCCL's coalesced parts have no state; torch's hook (2.15 and later), which records all other backends, may mark a
call as completed when it is issued; torchcomms counts sequence numbers over all communicators; dumps up to 2.3 have no sizes
for all_to_all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from allranks.blackbox.tables import Tables
from allranks.load.calls import MAX_GROUPS, GroupTable, Interner, default_group, numbers, read_calls
from allranks.load.regular import MIN_BYTES, Irregular, LayoutCache, shrink
from allranks.load.sources import Unreadable
from allranks.load.unpickle import MAX_CONTAINERS, read_pickle
from allranks.model.formatting import count
from allranks.model.trace import CALL, Flag, RankTrace, State, TraceHeader

KNOWN_MAJOR, KNOWN_MINOR = 2, 10
#: NCCL's watchdog checks all calls ten times a second; a call older than this that it has not seen never reached it.
UNSEEN_NS = 1_000_000_000
#: Libraries with their own recorder; torch's hook records all others.
OWN_RECORDER = frozenset(
    {"", "gloo", "nccl", "nccl-legacy", "ncclx", "rccl", "rcclx", "xccl", "mccl", "hccl"}
)
#: torch's hook marks each call of a batch as completed at once: one that ended this soon was part of a batch.
AT_ONCE_NS = 1_000_000
_BATCHES = frozenset({"batch_isend_irecv", "_coalescing_manager"})


def read_dump(
    dump: object,
    tables: Tables,
    member_cache: dict[str, tuple[int, ...]],
    form: str,
    expand: Callable[[np.ndarray], np.ndarray] | None = None,
) -> RankTrace:
    """Converts one dump into a trace without tables. Unreadable if the object is not a dump.

    `expand` restores the rows of all entries from those in the dump (see `regular.py`).
    """
    content: dict[str, object] = dump if isinstance(dump, dict) else {}
    entries, config, version = (content.get(key) for key in ("entries", "pg_config", "version"))
    if not isinstance(entries, list) and not {"version", "pg_config"} <= content.keys():
        raise Unreadable("not a flight recorder dump", kind=form, skip=True)
    version = version if isinstance(version, str) else ""
    groups = GroupTable(tables, config if isinstance(config, dict) else {}, member_cache)
    interner = Interner(tables, groups)
    notes = [] if version else ["the dump names no version"]
    if version and version_number(version)[0] > KNOWN_MAJOR:
        notes = [f"format {version} is newer than the newest known ({KNOWN_MAJOR}.{KNOWN_MINOR})"]
    if isinstance(entries, list):
        calls, bad = read_calls(entries, interner)
        if expand is not None:
            if bad:
                raise Irregular("entries without an operation")
            calls = expand(calls)  # raises Irregular when the number of entries is not the expected one
        notes += [f"{count(bad, 'entry', 'entries')} could not be read"] if bad else []
        damaged = bad > 0
        pg_ids = pg_names(entries)
    else:
        # torch omits the key if nothing was recorded (JSON) and with includeCollectives=False
        calls, pg_ids = np.zeros(0, CALL), {}
        damaged = entries is not None
        notes += ["its entries are not a list"] if damaged else []
    calls = in_record_order(calls)
    completed = last_completed(content.get("pg_status"), pg_ids, calls, groups)
    comms, more = settle_calls(content, calls, groups, version)
    hook = not comms and any(group.backend not in OWN_RECORDER for group in groups.groups)
    source = "torchcomms" if comms else "torch hook" if hook else "torch"
    more += [f"more than {MAX_GROUPS:,} groups: calls of the others are skipped"] if groups.left_out else []
    return RankTrace(
        read_header(content, calls, groups),
        calls,
        tuple(groups.groups),
        kind=f"{source} {form}{' ' + version if version else ''}",
        notes=(*notes, *more),
        last_completed=completed,
        damaged=damaged,
        rank_hint=next(iter(interner.own_ranks)) if len(interner.own_ranks) == 1 else None,
    )


def settle_calls(
    dump: dict[str, object], calls: np.ndarray, groups: GroupTable, version: str
) -> tuple[bool, list[str]]:
    """Corrects the quirks of the library in the rows; (whether it is torchcomms, notes)."""
    comms = is_torchcomms(dump, groups) or counts_over_all_groups(calls)
    backends = _backends(groups)
    groups.add_configured(backends[0] if len(backends) == 1 else "")
    names = groups.tables.names
    mark_coalesced(calls, names)
    mark_states(calls, groups, comms)
    notes = reopen_unlaunched(calls, groups)
    if comms:
        notes = notes + renumber(calls, [group.ranks for group in groups.groups if group.name])
    if version_number(version) < (2, 4):  # no usable sizes for all_to_all
        rows = np.array([name.startswith(("all_to_all", "alltoall")) for name in names])[calls["op"]]
        calls["shapes"][rows] = 0
        calls["in_numel"][rows] = calls["out_numel"][rows] = -1
    return comms, notes


def _backends(groups: GroupTable) -> list[str]:
    return sorted({group.backend for group in groups.groups if group.backend})


def read_header(dump: dict[str, object], calls: np.ndarray, groups: GroupTable) -> TraceHeader:
    """The header, from the facts in the dump."""
    library, backends = dump.get("comm_lib_version") or dump.get("nccl_version"), _backends(groups)
    world = default_group(groups.groups)
    known = isinstance(library, str) and library
    return TraceHeader(
        backend=",".join(backends),
        world_size=len(world.ranks) if world and world.ranks else None,
        versions=((backends[0] if backends else "library", str(library)),) if known else (),
        dropped=int(calls["begin"][0]) - 1 if len(calls) else 0,
    )


def version_number(version: str) -> tuple[int, int]:
    """(2, 10) for "2.10"; an unreadable version counts as the newest known."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return KNOWN_MAJOR, KNOWN_MINOR


def in_record_order(calls: np.ndarray) -> np.ndarray:
    """Rows sorted by record id; `begin` and `end` are set to the id plus one, as in a black box."""
    calls["begin"] += 1
    if len(calls) > 1 and (np.diff(calls["begin"].astype(np.int64)) < 0).any():
        calls = calls[np.argsort(calls["begin"], kind="stable")]
    calls["end"] = calls["begin"]
    calls["root"] = -1
    calls["tag"] = -1
    calls["step"] = -1
    return calls


def pg_names(entries: list[object]) -> dict[str, str]:
    """pg_id, as in pg_status, → group name. The last 1000 entries name all groups."""
    found: dict[str, str] = {}
    for entry in entries[-1000:]:
        if isinstance(entry, dict):
            group = entry.get("process_group")
            if isinstance(group, (list, tuple)) and group and isinstance(group[0], str):
                found[str(entry.get("pg_id"))[:32]] = group[0]
    return found


def last_completed(
    status: object, pg_ids: dict[str, str], calls: np.ndarray, groups: GroupTable
) -> dict[str, int]:
    """Group name → sequence number of the last completed collective, from pg_status; JSON has numbers as text.

    NCCL's recorder counts collectives there; gloo and torch's hook count all operations, including sends and receives.
    """
    found: dict[str, int] = {}
    names = np.array([group.name for group in groups.groups], object)[calls["group"]]
    for pg_id, entry in status.items() if isinstance(status, dict) else ():
        if not isinstance(entry, dict) or pg_id not in pg_ids:
            continue
        keys = ("last_enqueued_collective", "last_completed_collective")
        enqueued, completed = numbers([entry.get(key) for key in keys], missing=-1).tolist()
        mine = calls[names == pg_ids[pg_id]]
        collectives = mine[(mine["flags"] & Flag.P2P) == 0]
        if enqueued in mine["op_id"][-1:] or enqueued not in collectives["seq"][-1:]:
            completed = int(collectives["seq"][collectives["op_id"] <= completed].max(initial=-1))
        found |= {pg_ids[pg_id]: completed} if completed >= 0 else {}
    return found


def is_torchcomms(dump: dict[str, object], groups: GroupTable) -> bool:
    """Whether the dump is from torchcomms, which uses the library's name as description and writes "[0,1]" without blanks."""
    used = [group for group in groups.groups[1:] if group.backend]
    if used and all(group.desc == group.backend for group in used):
        return True
    texts = [entry.get("ranks") for entry in groups.config.values() if isinstance(entry, dict)]
    several = [text for text in texts if isinstance(text, str) and "," in text]
    return bool(several) and not any(", " in text for text in several) and not dump.get("pg_status")


def counts_over_all_groups(calls: np.ndarray) -> bool:
    """Whether sequence numbers count over all groups, as in torchcomms.

    torch numbers every group from 1, and records a partner and a number for every send and receive.
    """
    if not len(calls):
        return False
    p2p = (calls["flags"] & Flag.P2P) != 0
    if (p2p & (calls["p2p_seq"] == 0) & (calls["peer"] < 0)).any():
        return True
    seqs = calls["seq"]
    one_counter = int(calls["begin"][0]) == 1 and np.array_equal(
        seqs, np.arange(seqs[0], seqs[0] + len(seqs))
    )
    return one_counter and int(seqs[0]) in (0, 1) and len(np.unique(calls["group"])) > 1


def mark_states(calls: np.ndarray, groups: GroupTable, comms: bool) -> None:
    """Flags unreliable states, and converts NCCL's "retired but not completed" into TIMED_OUT."""
    flags, state = calls["flags"], calls["state"]
    backends = [group.backend for group in groups.groups]
    stateless = np.array([backend == "gloo" for backend in backends])[calls["group"]]
    hooked = np.array([not comms and backend not in OWN_RECORDER for backend in backends])[calls["group"]]
    retired = (flags & Flag.RETIRED) != 0
    undone = (state == State.SCHEDULED) | (state == State.STARTED)
    if comms:
        # on CPU the state stays "scheduled"; on CUDA a retired row has a real state
        stateless |= (state == State.SCHEDULED) & (calls["started_ns"] == 0)
    # for a backend without completions the hook retires calls when they are issued
    issued = hooked & retired & (state == State.SCHEDULED)
    flags[issued | _in_batches(calls, groups.tables, hooked)] |= np.uint16(Flag.ENDED_UNSEEN)
    unknown = issued | (stateless & (state == State.SCHEDULED))
    flags[unknown] |= np.uint16(Flag.STATE_UNKNOWN)
    part = (flags & Flag.COALESCED_PART) != 0
    state[retired & undone & ~unknown & ~part] = State.TIMED_OUT


def _in_batches(calls: np.ndarray, tables: Tables, hooked: np.ndarray) -> np.ndarray:
    """Sends and receives in batches, which torch's hook marks as completed when they are issued."""
    found: np.ndarray = hooked & ((calls["flags"] & Flag.P2P) != 0) & (calls["state"] == State.COMPLETED)
    if found.any():
        frames = [any(frame.name in _BATCHES for frame in stack) for stack in tables.stacks]
        at_once = (calls["stack"] == 0) & (calls["completed_ns"] - calls["created_ns"] < AT_ONCE_NS)
        found &= np.array(frames, bool)[calls["stack"]] | at_once
    return found


def reopen_unlaunched(calls: np.ndarray, groups: GroupTable) -> list[str]:
    """Marks a send, receive or batch for which NCCL is still connecting as not completed.

    Its end event is not recorded yet, and a query of such an event returns "completed". This shows only in a dump long after
    the call: the watchdog, which retires completed calls quickly, has never seen it. It is always the newest call, because
    the thread is inside it. The flag COMPLETION_UNRELIABLE remains, in case the partner has completed the call.
    """
    if not len(calls):
        return []
    last = calls[-1:]
    nccl = groups.groups[int(last["group"][0])].backend.startswith("nccl")
    stands = (last["state"] == State.COMPLETED) & ((last["flags"] & Flag.RETIRED) == 0)
    stands &= (last["flags"] & Flag.P2P) != 0
    stands &= last["completed_ns"] - last["created_ns"] > UNSEEN_NS
    if not nccl or not stands.all():
        return []
    last["state"] = State.SCHEDULED
    last["completed_ns"] = 0
    last["flags"] |= np.uint16(Flag.COMPLETION_UNRELIABLE)
    return [
        "the newest send or receive is marked completed, but the watchdog never saw it: treated as unfinished"
    ]


def mark_coalesced(calls: np.ndarray, names: list[str]) -> None:
    """Flags the parts of coalesced groups, and the entry that represents each group.

    NCCL writes the parts with the state "scheduled", which never changes, then one "coalesced" or "..._coalesced" entry with
    the real state and without sizes. Parts share the group and the p2p sequence (point-to-point) or the collective sequence.
    """
    ends_by_name = np.array([name == "coalesced" or name.endswith("_coalesced") for name in names])
    ends = ends_by_name[calls["op"]]
    p2p = (calls["flags"] & Flag.P2P) != 0
    flags = calls["flags"]
    batch = calls["group"].astype(np.int64) << 40 | (calls["p2p_seq"] & (1 << 40) - 1)
    collective = calls["group"].astype(np.int64) << 40 | (calls["seq"] & (1 << 40) - 1)
    if ends.any():
        p2p_ops = p2p & ~ends
        p2p_ends = ends & (calls["p2p_seq"] > 0) & (np.isin(batch, batch[p2p_ops]) | p2p)
        p2p_ends |= _orphans(calls, names)
        flags[p2p_ops & np.isin(batch, batch[p2p_ends])] |= np.uint16(Flag.COALESCED_PART)
        flags[p2p_ends] |= np.uint16(Flag.COALESCED_END | Flag.P2P)
        others = ends & ~p2p_ends
        parts = ~ends & ~p2p & np.isin(collective, collective[others])
        flags[parts] |= np.uint16(Flag.COALESCED_PART)
        empty = calls["in_numel"] <= 0
        flags[others & (empty | np.isin(collective, collective[parts]))] |= np.uint16(Flag.COALESCED_END)
        p2p = (flags & Flag.P2P) != 0
    # a batch without a recorded end: several p2p calls share a number
    alone = p2p & ((flags & (Flag.COALESCED_PART | Flag.COALESCED_END)) == 0) & (calls["p2p_seq"] > 0)
    if alone.any():
        _, inverse, counts = np.unique(batch[alone], return_inverse=True, return_counts=True)
        rows = np.flatnonzero(alone)[counts[inverse] > 1]
        flags[rows] |= np.uint16(Flag.COALESCED_PART)
    calls["p2p_seq"][~p2p] = 0


def _orphans(calls: np.ndarray, names: list[str]) -> np.ndarray:
    """Ends of point-to-point batches whose parts were overwritten in the ring. As collectives, they would have no match."""
    bare = np.array([name == "coalesced" for name in names])[calls["op"]] & (calls["p2p_seq"] > 0)
    oldest = np.arange(len(calls)) == 0
    orphans: np.ndarray = bare & ((calls["seq"] <= 0) | (oldest & (calls["begin"] > 1)))
    return orphans


def _counts_per_group(calls: np.ndarray, p2p: np.ndarray) -> bool:
    """Whether numbers ascend by one within every group, with calls of other groups in between: then they already count per
    communicator, as those of our own hook."""
    mixed = False
    for group in np.unique(calls["group"]).tolist():
        rows = np.flatnonzero((calls["group"] == group) & ~p2p)
        if (np.diff(calls["seq"][rows]) != 1).any():
            return False
        mixed |= bool((np.diff(rows) > 1).any())
    return mixed


def renumber(calls: np.ndarray, members: Sequence[tuple[int, ...]] = ()) -> list[str]:
    """Converts torchcomms' sequence numbers, which count over all communicators, into numbers per group.

    That is not possible if records were overwritten. With several groups the numbers then become unknown, unless all groups
    of the process have the same `members`, who count the same calls.
    """
    groups = np.unique(calls["group"])
    p2p = (calls["flags"] & Flag.P2P) != 0
    if not len(calls) or (len(groups) == 1 and not p2p.any()):
        return []
    if int(calls["begin"][0]) > 1:
        alike = len({tuple(sorted(ranks)) for ranks in members}) == 1 and bool(members[0]) and not p2p.any()
        if len(groups) > 1 and not alike and not _counts_per_group(calls, p2p):
            calls["seq"] = -1
            unknown = "sequence numbers are unknown"
            return [f"the ring has wrapped, and torchcomms counts over all communicators: {unknown}"]
        return []
    for group in groups.tolist():
        mine = calls["group"] == group
        for column, rows in (("seq", mine & ~p2p), ("p2p_seq", mine & p2p)):
            calls[column][rows] = np.arange(1, int(rows.sum()) + 1)
    return []


@dataclass
class DumpReader:
    """Reads the dumps of one load, which share tables, member lists and layouts."""

    tables: Tables
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: LayoutCache = field(default_factory=lambda: LayoutCache(list))

    def read_pickle(self, data: bytes) -> RankTrace:
        """Reads a pickle: by its repeated bytes if possible (`regular.py`), else entry by entry."""
        if len(data) >= MIN_BYTES:
            try:
                regular = shrink(data, self.layouts)
                small = read_pickle(regular.small)
                if small.whole:
                    return read_dump(small.value, self.tables, self.members, "pickle", regular.expand)
            except (Irregular, Unreadable):
                pass  # read entry by entry below
        unpickled = read_pickle(data)
        try:
            trace = read_dump(unpickled.value, self.tables, self.members, "pickle")
        except Unreadable as error:
            if unpickled.problem:
                foreign = unpickled.value is not None and b"pg_config" not in data[:65536]
                skip = foreign and not unpickled.problem.startswith("truncated")
                raise Unreadable(unpickled.problem, kind="pickle", skip=skip) from error
            raise
        if not unpickled.problem:
            return trace
        note = f"{unpickled.problem}; {len(trace.calls)} calls were read"
        return replace(trace, damaged=True, notes=(note, *trace.notes))

    def read_json(self, data: bytes) -> RankTrace:
        """Reads a JSON dump. Raises Unreadable also for stack captures."""
        if sum(map(data.count, (b"{", b"["))) > MAX_CONTAINERS:
            raise Unreadable(f"more than {MAX_CONTAINERS:,} lists and objects: refused", kind="json")
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise Unreadable(
                "JSON that cannot be read", kind="json", skip=b'"pg_config"' not in data
            ) from None
        facts = value if isinstance(value, dict) else {}
        bundle = "stacks" in str(facts.get("kind", "")) or "stacks" in facts or "hung" in facts
        if bundle and "ranks" in facts:  # a capture for `allranks stacks`
            raise Unreadable("stacks", kind="stacks", skip=True)
        return read_dump(value, self.tables, self.members, "json")
