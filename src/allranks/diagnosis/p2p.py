"""Sends and receives, paired by peer, tag and order within a group, on every library. Batches lend their parts a state.

While neither ring has wrapped, the k-th send from a to b belongs to the k-th receive at b from a. After a wrap the
counts mean nothing, and pairing starts behind the last pair that is known to be done on both sides. Messages with tags
are paired among those of their tag; NCCL knows no tags.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from allranks.diagnosis.job import Family, Job, Now, RankCalls
from allranks.model.trace import Flag, State

#: Clocks of two hosts may differ by so much.
CLOCKS_NS = 10_000_000
_SEND, _RECV = int(Family.SEND), int(Family.RECV)


@dataclass(frozen=True)
class Side:
    """One rank's sends to (or receives from) one peer in one group, in order."""

    rank: int
    peer: int
    group: int
    sends: bool
    rows: np.ndarray
    now: np.ndarray
    reliable: bool  # every call since the start is here
    doubtful: np.ndarray  # open, but the dump called it completed

    def pending_from(self) -> int:
        """Index behind the last finished call."""
        done = np.flatnonzero((self.now == Now.DONE) | (self.now == Now.LEFT))
        return int(done[-1]) + 1 if len(done) else 0


@dataclass(frozen=True)
class P2PWait:
    """An open send or receive. `partner` is the matching row at the peer, -1 when the peer never posted it."""

    rank: int
    row: int
    peer: int
    group: int
    sends: bool
    number: int  # how many-th between the two, from 1; 0 unknown
    partner: int
    peer_known: bool


@dataclass(frozen=True)
class P2PMismatch:
    """A matched pair whose two ends disagree on elements, dtype or tag."""

    group: int
    source: int
    target: int
    send_row: int
    recv_row: int
    number: int
    aspect: str  # "size" | "dtype" | "tag"


def match_p2p(job: Job) -> tuple[list[P2PWait], list[P2PMismatch]]:
    """All open calls with or without partner, and all pairs that do not fit."""
    sides: dict[tuple[int, int, int, bool], Side] = {}
    for view in job.ranks.values():
        for side in _sides(view) if view.has_p2p else ():
            sides[(side.group, side.rank, side.peer, side.sends)] = side
    waits: list[P2PWait] = []
    mismatches: list[P2PMismatch] = []
    open_to_all = {(key[0], key[1]) for key in sides if key[2] < 0}
    for key in sorted(sides):
        if key[2] < 0:
            waits += _waits(job, sides[key], None)
            continue
        other = sides.get((key[0], key[2], key[1], not key[3]))
        if key[3] and (key[0], key[2]) in open_to_all:
            # The receiver takes messages from anyone: which one it took is not known, only how many.
            waits += _waits(job, sides[key], None) if _outnumbered(sides, key[0], key[2]) else []
            continue
        side = _with_unseen_open(job, _without_false_end(job, sides[key], other), other)
        waits += _waits(job, side, other)
        if side.sends and other is not None:
            mismatches += _mismatches(job, side, other)
    return waits, mismatches


def _outnumbered(sides: dict[tuple[int, int, int, bool], Side], group: int, receiver: int) -> bool:
    """Whether more messages were sent to a rank than it has posted receives."""
    here = [side for side in sides.values() if side.group == group]
    sent = sum(len(side.rows) for side in here if side.sends and side.peer == receiver)
    mine = [side for side in here if not side.sends and side.rank == receiver]
    return sent > sum(len(side.rows) for side in mine) and all(side.reliable for side in mine)


def _partners(job: Job, side: Side, other: Side, first: int, other_first: int) -> np.ndarray:
    """Per call of `side` from `first` on: the index of its partner among those of `other`; -1 when there is none."""
    count, other_count = len(side.rows) - first, len(other.rows) - other_first
    found = np.arange(count, dtype=np.int64) + other_first
    found[found >= len(other.rows)] = -1
    tags, theirs = (
        job.ranks[one.rank].trace.calls["tag"][one.rows[start:]]
        for one, start in ((side, first), (other, other_first))
    )
    if not _tags_count(job, side, tags, theirs):
        return found
    waiting: dict[int, list[int]] = {}
    for index in range(other_count - 1, -1, -1):
        waiting.setdefault(int(theirs[index]), []).append(index + other_first)
    found = np.array([waiting[tag].pop() if waiting.get(tag) else -1 for tag in tags.tolist()], np.int64)
    left = sorted(index for indices in waiting.values() for index in indices)  # other tags: `_tags_apart`
    lonely = np.flatnonzero(found < 0)[: len(left)]
    found[lonely] = left[: len(lonely)]
    return found


def _tags_count(job: Job, side: Side, mine: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether messages are paired by their tags: these are known, and not the same in order. NCCL knows no tags."""
    common = min(len(mine), len(theirs))
    known = min(mine.min(initial=0), theirs.min(initial=0)) >= 0
    nccl = job.groups[side.group].backend.startswith("nccl")
    return known and not nccl and not (mine[:common] == theirs[:common]).all()


def p2p_states(view: RankCalls) -> np.ndarray:
    """Now per call, with every part of a batch given the state of the batch's end."""
    calls = view.trace.calls
    flags = calls["flags"]
    part = ((flags & Flag.COALESCED_PART) != 0) & ((flags & Flag.P2P) != 0)
    now = view.now.copy()
    if view.cut:  # the end of the newest batch may be lost, and its parts are never completed
        newest_p2p = calls["p2p_seq"] == calls["p2p_seq"][-1:]
        now[newest_p2p & (flags & Flag.P2P != 0) & (calls["state"] == State.SCHEDULED)] = Now.UNKNOWN
    if not part.any():
        return now
    key = calls["group"].astype(np.int64) << 40 | (calls["p2p_seq"] & (1 << 40) - 1)
    ends = np.flatnonzero(((flags & Flag.COALESCED_END) != 0) & ((flags & Flag.P2P) != 0))
    state_of = dict(zip(key[ends].tolist(), view.now[ends].tolist(), strict=True))
    parts = np.flatnonzero(part)
    # A batch without its end is still being issued if it is the newest, else nothing is known of it.
    newest = int(key[parts[-1]]) if not view.cut else None
    now[parts] = [state_of.get(k, Now.OPEN if k == newest else Now.UNKNOWN) for k in key[parts].tolist()]
    return now


def _doubtful(view: RankCalls) -> np.ndarray:
    """Per call: whether it is, or belongs to, a newest call whose completion the loader took back."""
    calls = view.trace.calls
    last = calls[-1]
    mine: np.ndarray = (calls["group"] == last["group"]) & (calls["p2p_seq"] == last["p2p_seq"])
    taken_back = int(last["state"]) == State.SCHEDULED and int(last["flags"]) & Flag.COMPLETION_UNRELIABLE
    return mine if taken_back else np.zeros(len(calls), bool)


def _sides(view: RankCalls) -> list[Side]:
    calls = view.trace.calls
    sends, receives = view.family == _SEND, view.family == _RECV
    mine = np.flatnonzero(sends | receives)
    known = (calls["peer"][mine] >= 0) | receives[mine]  # a receive without a peer takes from anyone
    mine = mine[known & (view.group[mine] >= 0)]
    if not len(mine):
        return []
    now, doubtful = p2p_states(view), _doubtful(view)
    group, peer = view.group[mine].astype(np.int64), calls["peer"][mine].astype(np.int64)
    key = (group << 33) | (peer << 1) | sends[mine]
    order = np.argsort(key, kind="stable")
    mine, key = mine[order], key[order]
    wrapped = view.trace.header.dropped > 0 or int(calls["begin"][0]) > 1
    found = []
    for rows in np.split(mine, np.flatnonzero(np.diff(key)) + 1):
        row = int(rows[0])
        key_of_side = (view.rank, int(calls["peer"][row]), int(view.group[row]), bool(sends[row]))
        found.append(Side(*key_of_side, rows, now[rows], not wrapped and not view.cut, doubtful[rows]))
    return found


def _waits(job: Job, side: Side, other: Side | None) -> list[P2PWait]:
    peer = job.ranks.get(side.peer)
    peer_known = peer is not None and not peer.cut
    exact = side.reliable and (other.reliable if other is not None else _complete(peer))
    partners = _indices_of_partners(job, side, other, exact)
    found = []
    for index in range(side.pending_from(), len(side.rows)):
        at, row = int(partners[index]), int(side.rows[index])
        if side.now[index] not in (Now.OPEN, Now.FAILED):
            continue
        arrived = other is not None and at >= 0 and other.now[at] == Now.DONE
        if arrived and (side.sends or side.doubtful[index]):  # gloo ends a send when somebody waits for it
            continue
        partner = int(other.rows[at]) if other is not None and at >= 0 else -1
        number = index + 1 if exact else 0
        found.append(P2PWait(side.rank, row, side.peer, side.group, side.sends, number, partner, peer_known))
    return found


def _indices_of_partners(job: Job, side: Side, other: Side | None, exact: bool) -> np.ndarray:
    """Per call of `side`: the index of its partner at the other end; -1 when there is none or it is not known."""
    partners = np.full(len(side.rows), -1, np.int64)
    if other is not None:
        first, behind = (0, 0) if exact else (side.pending_from(), other.pending_from())
        partners[first:] = _partners(job, side, other, first, behind)
    return partners


def _without_false_end(job: Job, side: Side, other: Side | None) -> Side:
    """The side with its last receive open again, if it is said to be over though nothing was ever sent for it.

    Only where the receive is the last thing that its rank did, and the peer's ring shows everything up to a moment
    behind that end: NCCL marks receives completed when it gives them up.
    """
    peer = job.ranks.get(side.peer)
    sent = len(other.rows) if other is not None else 0
    last = len(side.rows) - 1
    if side.sends or not side.reliable or last < sent or side.now[last] not in (Now.DONE, Now.LEFT):
        return side
    if peer is None or not (other.reliable if other is not None else _complete(peer)):
        return side
    calls = job.ranks[side.rank].trace.calls
    row = int(side.rows[last])
    batch = calls[row:]
    ended = int(batch["completed_ns"].max())
    alone = all((batch[name] == batch[name][0]).all() for name in ("p2p_seq", "group"))
    if not alone or not ended or newest_ns(peer) < ended + CLOCKS_NS:
        return side
    now = side.now.copy()
    now[last] = Now.OPEN
    return replace(side, now=now)


def _with_unseen_open(job: Job, side: Side, other: Side | None) -> Side:
    """The side with messages open for which the peer has posted nothing, and whose end nobody has seen."""
    peer = job.ranks.get(side.peer)
    calls = job.ranks[side.rank].trace.calls[side.rows]
    unseen = (calls["flags"] & Flag.ENDED_UNSEEN) != 0
    unseen[: len(other.rows) if other is not None else 0] = False
    if not unseen.any() or peer is None or not side.reliable or not _complete(peer):
        return side
    unseen &= calls["created_ns"] <= (peer.snapshot_ns or newest_ns(peer))
    return replace(side, now=np.where(unseen, Now.OPEN, side.now))


def newest_ns(view: RankCalls) -> int:
    """The latest moment of which the rank's calls tell."""
    calls = view.trace.calls
    return int(max(calls["created_ns"].max(), calls["completed_ns"].max())) if len(calls) else 0


def _complete(view: RankCalls | None) -> bool:
    return view is not None and not view.cut and view.trace.header.dropped == 0


def _mismatches(job: Job, send: Side, receive: Side) -> list[P2PMismatch]:
    """The first pair that does not fit. After a wrap only open pairs can be paired with certainty."""
    exact = send.reliable and receive.reliable
    first, behind = (0, 0) if exact else (send.pending_from(), receive.pending_from())
    if (apart := _tags_apart(job, send, receive, first, behind)) is not None:
        return [apart]
    partners = _partners(job, send, receive, first, behind)
    paired = np.flatnonzero(partners >= 0)
    tagless = int(job.ranks[send.rank].trace.calls["tag"][send.rows].min()) < 0
    if tagless and not job.groups[send.group].backend.startswith("nccl"):
        # Tags were not recorded: messages that have arrived may have been received in another order.
        paired = paired[(send.now[first:][paired] != Now.DONE) | (receive.now[partners[paired]] != Now.DONE)]
    send_rows, receive_rows = send.rows[first:][paired], receive.rows[partners[paired]]
    sent = job.ranks[send.rank].trace.calls["in_numel"][send_rows]
    taken = job.ranks[receive.rank].trace.calls["out_numel"][receive_rows]
    sizes = np.flatnonzero((sent != taken) & (sent > 0) & (taken > 0))
    dtypes = _dtype_differs(job, send.rank, send_rows, receive.rank, receive_rows)
    for bad, aspect in ((sizes, "size"), (dtypes, "dtype")):
        if len(bad):
            at = int(bad[0])
            rows = (int(send_rows[at]), int(receive_rows[at]))
            return [_misfit(send, receive, *rows, first + int(paired[at]) + 1, aspect)]
    return []


def _misfit(send: Side, receive: Side, row: int, other: int, number: int, aspect: str) -> P2PMismatch:
    return P2PMismatch(send.group, send.rank, receive.rank, row, other, number, aspect)


def _tags_apart(job: Job, send: Side, receive: Side, first: int, behind: int) -> P2PMismatch | None:
    """An open receive and a message sent, neither of which has a partner of its own tag. NCCL knows no tags."""
    sent = job.ranks[send.rank].trace.calls["tag"][send.rows[first:]]
    taken = job.ranks[receive.rank].trace.calls["tag"][receive.rows[behind:]]
    if not _tags_count(job, send, sent, taken):
        return None
    lone_send, lone_receive = _without_partner(sent, taken), _without_partner(taken, sent)
    lone_receive = [at for at in lone_receive if receive.now[behind + at] in (Now.OPEN, Now.FAILED)]
    if not lone_send or not lone_receive:
        return None
    row, other = int(send.rows[first + lone_send[0]]), int(receive.rows[behind + lone_receive[0]])
    return _misfit(send, receive, row, other, first + lone_send[0] + 1, "tag")


def _without_partner(mine: np.ndarray, theirs: np.ndarray) -> list[int]:
    """Indices of the messages whose tag occurs less often at the other end."""
    left = Counter(theirs.tolist())
    found = []
    for index, tag in enumerate(mine.tolist()):
        left[tag] -= 1
        if left[tag] < 0:
            found.append(index)
    return found


def _dtype_differs(
    job: Job, source: int, send_rows: np.ndarray, target: int, receive_rows: np.ndarray
) -> np.ndarray:
    """The index of the first pair whose dtypes differ, if there is one."""
    shapes_a = job.ranks[source].sig[send_rows] >> 24 & 0x7FFFFFF
    shapes_b = job.ranks[target].sig[receive_rows] >> 24 & 0x7FFFFFF
    for index in np.flatnonzero(shapes_a != shapes_b).tolist():
        a, b = job.tables.shapes[int(shapes_a[index])], job.tables.shapes[int(shapes_b[index])]
        one, two = a.input_dtypes or a.output_dtypes, b.output_dtypes or b.input_dtypes
        if one and two and set(one) != set(two):
            return np.array([index])
    return np.zeros(0, np.int64)
