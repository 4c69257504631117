"""Converts the entries of a torch dump into rows of CALL, and its process groups.

Entries are dictionaries as in torch (pickle or JSON, 2.3 to 2.10) and torchcomms. Values of a wrong type become "unknown";
entries that are not dictionaries, or have no operation, are skipped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from allranks.blackbox.tables import MAX_FRAMES, MAX_MEMBERS, MAX_TEXT, Tables
from allranks.model.trace import CALL, Flag, Group, Shapes, State

#: Limit per rank, because comparing ranks takes time per group. Large jobs have a few dozen.
MAX_GROUPS = 2_000
#: torch's name and description of the default group.
DEFAULT_NAME, DEFAULT_DESC = "0", "default_pg"


def read_members(text: object, cache: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The global ranks in a text such as "[0, 1, 2]"; () if unknown or invalid."""
    if isinstance(text, (list, tuple)):
        ranks = [rank for rank in text[:MAX_MEMBERS] if type(rank) is int]
        return tuple(ranks) if len(ranks) == len(text) else ()
    if not isinstance(text, str):
        return ()
    if text not in cache:
        body = text.strip().removeprefix("[").removesuffix("]").strip()
        try:
            found = tuple(map(int, body.split(","))) if body else ()
        except ValueError:
            found = ()
        whole = found and len(found) <= MAX_MEMBERS and min(found) >= 0 and max(found) < 1 << 31
        cache[text] = found if whole else ()
    return cache[text]


@dataclass
class GroupTable:
    """The configured and used groups of one file. Index 0 means none."""

    tables: Tables
    config: dict[str, object]
    member_cache: dict[str, tuple[int, ...]]
    groups: list[Group] = field(default_factory=lambda: [Group("")])
    _ids: dict[tuple[str, str, str], int] = field(default_factory=dict)
    left_out: bool = False  # more than MAX_GROUPS

    def index(self, name: str, desc: str, backend: str) -> int:
        """The index of the group of an entry."""
        key = (name, desc, backend)
        found = self._ids.get(key)
        if found is None and len(self.groups) > MAX_GROUPS:
            self.left_out = True
            return 0
        if found is None:
            group = Group(name[:MAX_TEXT], desc[:MAX_TEXT], self._members(name, desc), backend)
            found = self._ids[key] = len(self.groups)
            self.groups.append(self.tables.group(group))
        return found

    def add_configured(self, backend: str) -> None:
        """Adds groups without calls: a rank that never entered its group is a finding."""
        used = {name for name, _, _ in self._ids}
        used.add("")  # gloo's configuration has no name and is not reliable
        for name, entry in self.config.items():
            if not isinstance(entry, dict) or not isinstance(name, str) or name in used:
                continue
            desc = entry.get("desc")
            self.index(name, desc if isinstance(desc, str) else "", backend)

    def _members(self, name: str, desc: str) -> tuple[int, ...]:
        entry = self.config.get(name)
        if isinstance(entry, dict):
            return read_members(entry.get("ranks"), self.member_cache)
        # gloo in torch 2.13 writes the members of the default group under the key '', and '[]' once a subgroup exists
        nameless = self.config.get("")
        if isinstance(nameless, dict) and (name == DEFAULT_NAME or desc == DEFAULT_DESC):
            return read_members(nameless.get("ranks"), self.member_cache)
        return ()


def default_group(groups: list[Group]) -> Group | None:
    """The default group, if the file has it."""
    return next((g for g in groups if g.desc == DEFAULT_DESC or g.name == DEFAULT_NAME), None)


STATES = {"scheduled": State.SCHEDULED, "started": State.STARTED, "completed": State.COMPLETED}
P2P_OPS = frozenset({"send", "recv", "isend", "irecv", "recv_any_source", "recvAnySource"})
MAX_TENSORS = 4096
MAX_DIMENSIONS = 16
_BIG = 1 << 62

#: number columns of CALL and the entry keys behind them
NUMBERS = (
    ("begin", "record_id"),
    ("created_ns", "time_created_ns"),
    ("started_ns", "time_discovered_started_ns"),
    ("completed_ns", "time_discovered_completed_ns"),
    ("seq", "collective_seq_id"),
    ("p2p_seq", "p2p_seq_id"),
    ("op_id", "op_id"),
    ("timeout_ms", "timeout_ms"),
)
_KEYS = (
    *(key for _, key in NUMBERS),
    *("process_group", "profiling_name", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes"),
    *("state", "retired", "is_p2p"),
)
_pick = itemgetter(*_KEYS)


@dataclass
class Interner:
    """Converts the variable-length parts of entries into indices. One per file."""

    tables: Tables
    groups: GroupTable
    _kinds: dict[tuple[object, object], tuple[int, int, int, int]] = field(default_factory=dict)
    _stacks: dict[tuple[int, ...], int] = field(default_factory=dict)
    _frames: dict[int, int] = field(default_factory=dict)
    _threads: dict[str, int] = field(default_factory=dict)
    own_ranks: set[int] = field(
        default_factory=set
    )  # of the recording process, from names of sends and receives

    def kind(self, process_group: object, profiling_name: object) -> tuple[int, int, int, int]:
        """(group index, op index, peer, flags) of an entry's group and its name "<library>:<op>[ s->d| d<-s]"."""
        found = None
        names = tuple(process_group[:2]) if isinstance(process_group, (list, tuple)) else ("", "")
        key = (names, profiling_name)
        try:
            found = self._kinds.get(key)
        except TypeError:
            key = names, _ = (("", ""), "")
        if found is None:
            found = self._kinds[key] = self._read_kind(names, key[1])
        return found

    def _read_kind(
        self, process_group: tuple[object, ...], profiling_name: object
    ) -> tuple[int, int, int, int]:
        backend, op, own, local_peer = split_name(profiling_name if isinstance(profiling_name, str) else "")
        texts = [part if isinstance(part, str) else "" for part in (*process_group, "", "")[:2]]
        group = self.groups.index(texts[0], texts[1], backend)
        flags = int(Flag.P2P) if op in P2P_OPS else 0
        if flags and 0 <= own < len(self.groups.groups[group].ranks):
            self.own_ranks.add(self.groups.groups[group].ranks[own])
        return group, self.tables.name(op), self._global_rank(group, local_peer), flags

    def _global_rank(self, group: int, local: int) -> int:
        known = self.groups.groups[group]
        if 0 <= local < len(known.ranks):
            return known.ranks[local]
        is_world = known.desc == DEFAULT_DESC or known.name in (DEFAULT_NAME, "")
        return local if not known.ranks and is_world else -1

    def shape(self, sizes: tuple[object, object, object, object]) -> int:
        """The index of (input sizes, input dtypes, output sizes, output dtypes)."""
        inputs, input_dtypes, outputs, output_dtypes = sizes
        dtypes = (_words(input_dtypes), _words(output_dtypes))
        return self.tables.shape(Shapes(_sizes(inputs), _sizes(outputs), *dtypes))

    def thread(self, text: object) -> int:
        """The low 32 bits of a thread id, which is text."""
        if not isinstance(text, str):
            return 0
        found = self._threads.get(text)
        if found is None:
            number = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
            found = self._threads[text] = number & 0xFFFFFFFF
        return found

    def stack(self, frames: object) -> int:
        """The index of a list of frame dictionaries, cached by identity, because torch shares equal frames."""
        if not isinstance(frames, list) or not frames:
            return 0
        frames = frames[:MAX_FRAMES]
        key = tuple(map(id, frames))
        found = self._stacks.get(key)
        if found is None:
            for frame in frames:
                if id(frame) not in self._frames:
                    self._frames[id(frame)] = read_frame(self.tables, frame)
            numbers = (self._frames[id(frame)] for frame in frames)
            found = self._stacks[key] = self.tables.stack(tuple(n for n in numbers if n >= 0))
        return found


def read_frame(tables: Tables, frame: object) -> int:
    """The index of a frame from a {name, filename, line} dictionary; -1 if invalid."""
    if not isinstance(frame, dict):
        return -1
    name, file, line = frame.get("name"), frame.get("filename"), frame.get("line")
    if not isinstance(name, str) or not isinstance(file, str):
        return -1
    return tables.frame(name, file, line if type(line) is int and -_BIG < line < _BIG else 0)


def split_name(profiling_name: str) -> tuple[str, str, int, int]:
    """("nccl", "send", 0, 1) for "nccl:send 0->1": library, operation, and the group-local ranks of the recording process
    and its partner (-1 unknown)."""
    backend, colon, rest = profiling_name.partition(":")
    if not colon:
        backend, rest = "", profiling_name
    op, _, ends = rest.partition(" ")
    for arrow in ("->", "<-"):
        if arrow in ends:
            # "s->d" is the sender's name, "d<-s" the receiver's: the partner is always on the right
            own, _, peer = ends.partition(arrow)
            return backend, op, _local_rank(own.strip()), _local_rank(peer.strip())
    return backend, op, -1, -1


def _local_rank(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def read_calls(entries: list[Any], interner: Interner) -> tuple[np.ndarray, int]:
    """The rows of all valid entries, and the number of invalid ones. Coalescing is marked later."""
    try:
        rows = list(map(_pick, entries))
        bad = 0
    except (KeyError, TypeError, IndexError):
        whole = [entry for entry in entries if isinstance(entry, dict) and "profiling_name" in entry]
        written = [key for key in _KEYS if whole and key in whole[0]]
        if whole and whole[-1] is entries[-1] and any(key not in whole[-1] for key in written):
            whole.pop()  # the file is cut inside it
        rows = [tuple(map(entry.get, _KEYS)) for entry in whole]
        bad, entries = len(entries) - len(rows), whole
    calls = np.zeros(len(rows), CALL)
    if rows:
        _fill(calls, list(zip(*rows, strict=False)), interner)
        # only some versions and libraries write these
        calls["stack"] = [interner.stack(entry.get("frames")) for entry in entries]
        calls["thread"] = [interner.thread(entry.get("thread_id")) for entry in entries]
        _fill_started(calls, [entry.get("duration_ms") for entry in entries])
    return calls, bad


def _fill(calls: np.ndarray, columns: list[tuple[object, ...]], interner: Interner) -> None:
    """Fills the columns that every entry has."""
    for (name, _), column in zip(NUMBERS, columns, strict=False):
        calls[name] = numbers(column, missing=-1 if name == "seq" else 0)
    calls["begin"] = np.maximum(calls["begin"].astype(np.int64), 0)
    groups, names, *sizes, states, retired, p2p = columns[len(NUMBERS) :]
    kinds = np.array(list(map(interner.kind, groups, names)), np.int64)
    calls["group"], calls["op"], calls["peer"] = kinds[:, 0], kinds[:, 1], kinds[:, 2]
    calls["shapes"] = _intern_shapes(interner, list(zip(*sizes, strict=False)))
    calls["state"] = [STATES.get(state, 0) if isinstance(state, str) else 0 for state in states]
    flags = kinds[:, 3]
    flags |= np.fromiter((x is True for x in p2p), np.bool_, len(calls)) * int(Flag.P2P)
    flags |= np.fromiter((x is True for x in retired), np.bool_, len(calls)) * int(Flag.RETIRED)
    calls["flags"] = flags
    shapes, inverse = np.unique(calls["shapes"], return_inverse=True)
    numel = np.array([interner.tables.numel(index) for index in shapes.tolist()], np.int64)[inverse]
    calls["in_numel"], calls["out_numel"] = numel[:, 0], numel[:, 1]


def _fill_started(calls: np.ndarray, durations: list[object]) -> None:
    """Computes the start from the completion and the duration, if only those are known."""
    known = np.array([float(d) if isinstance(d, (int, float)) else np.nan for d in durations])
    known[~(np.abs(known) < 1e12)] = np.nan
    rows = (calls["started_ns"] == 0) & (calls["completed_ns"] != 0) & ~np.isnan(known)
    calls["started_ns"][rows] = calls["completed_ns"][rows] - (known[rows] * 1e6).astype(np.int64)


def numbers(column: Sequence[object], missing: int = 0) -> np.ndarray:
    """A column of integers; None, invalid text and numbers beyond 63 bits become `missing`."""
    kinds = set(map(type, column))
    try:
        if kinds <= {int}:
            return np.array(column, np.int64)
        if kinds <= {int, type(None)}:
            return np.array([missing if value is None else value for value in column], np.int64)
    except OverflowError:
        pass
    return np.array([_number(value, missing) for value in column], np.int64)


def _number(value: object, missing: int) -> int:
    if isinstance(value, str) and len(value) < 20:
        try:
            value = int(value)
        except ValueError:
            return missing
    if isinstance(value, int) and -_BIG < value < _BIG:
        return int(value)
    return missing


def _intern_shapes(interner: Interner, quads: list[tuple[Any, Any, Any, Any]]) -> list[int]:
    """Indices of sizes and dtypes; invalid ones count as unknown."""
    seen: dict[object, int] = {}
    found = []
    for quad in quads:
        try:
            inputs, input_dtypes, outputs, output_dtypes = quad
            dtypes = (*input_dtypes[:MAX_TENSORS], 0, *output_dtypes[:MAX_TENSORS])
            key = (_size_key(inputs), _size_key(outputs), *dtypes)
            index = seen.get(key)
            if index is None:
                index = seen[key] = interner.shape(quad)
        except (TypeError, KeyError):  # not lists, or items that are not hashable
            index = interner.shape(quad)
        found.append(index)
    return found


def _size_key(value: Any) -> tuple[object, ...]:
    """A hashable copy of a list of lists; TypeError if a hostile file would make it too large."""
    if len(value) == 1:
        only = value[0]
        if len(only) <= MAX_DIMENSIONS:
            return tuple(only)
    if len(value) > MAX_TENSORS or sum(map(len, value)) > MAX_TENSORS * 4:
        raise TypeError("too many sizes")
    return (None, *map(tuple, value))


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    """Sizes such as [[4, 4], [2]] as tuples; () if invalid or too large."""
    if not isinstance(value, (list, tuple)) or len(value) > MAX_TENSORS:
        return ()
    sizes = []
    for size in value:
        if not isinstance(size, (list, tuple)) or len(size) > MAX_DIMENSIONS:
            return ()
        if any(type(extent) is not int or not -_BIG < extent < _BIG for extent in size):
            return ()
        sizes.append(tuple(size))
    return tuple(sizes)


def _words(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_TENSORS:
        return ()
    return tuple(word[:64] if isinstance(word, str) else "" for word in value)
