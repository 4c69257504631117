"""Samples ranks by reading the headers of their black boxes, without their help. Runs in the agent."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from allranks.blackbox.header import (
    HEADER_BYTES,
    is_alive,
    parse_header,
    process_state,
    read_regular,
    seconds_since_start,
)
from allranks.blackbox.phases import PhaseMark, read_phases
from allranks.blackbox.reader import read_trace
from allranks.errors import InputError
from allranks.load import LoadOptions, load_paths
from allranks.model.trace import Flag, RankTrace, Rendezvous, State

SILENT_S = 3.0  # shorter waits are usual
RENUMBER_S = 10.0  # between two assignments of processes to worlds
PASSED = 2  # earlier passes of a place that make a rhythm
_UNCERTAIN = Flag.P2P | Flag.COALESCED_PART | Flag.COALESCED_END | Flag.CAPTURED | Flag.STATE_UNKNOWN
_PLACE = ("op", "group", "stack", "peer")  # sizes may differ from step to step


class ProcessId(NamedTuple):
    """Identifies a process, since pids are reused."""

    pid: int
    start_ns: int  # epoch, of its black box


@dataclass(frozen=True)
class RankSample:
    """One sample of one rank. Times in epoch nanoseconds; 0 = never."""

    rank: int
    pid: int
    path: str
    alive: bool
    step: int
    calls_started: int
    calls_completed: int
    last_ns: int  # last sign of progress in the box
    start_ns: int
    expect_until_ns: int = 0
    closed: str = ""  # how it shut down; "" while running or after a sudden death
    closed_ns: int = 0
    attempt: int = 0
    step_ns: int = 0  # of the last step mark
    joined: bool = False  # has begun to make a process group
    phases: tuple[PhaseMark, ...] = ()
    loss: float = 0.0  # at the last step mark; 0: not reported
    tokens: float = 0.0  # of the last complete step; 0: not reported
    flops: float = 0.0  # of the last complete step; 0: not reported
    name: str = ""  # "rollout 1" in a job of several worlds

    @property
    def takes_part(self) -> bool:
        """Whether the rank can stall: it has a group, a call or a step, unlike a driver that only starts other processes."""
        return self.joined or self.step >= 0 or self.calls_started > 0

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_ns)

    @property
    def mark(self) -> tuple[int, int, int]:
        """Progress of the rank: any change counts."""
        return (self.step, self.calls_started, self.calls_completed)


def read_samples(folder: Path) -> list[RankSample]:
    """Samples the newest box of every rank in a folder; other files are skipped.

    The box of a live process is newer than any box of a dead one, whatever their start times.
    """
    newest: dict[int, RankSample] = {}
    clash = False
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".box"))
    except OSError:
        names = []
    for name in names:
        sample = read_sample(f"{folder}/{name}")
        if sample is None:
            continue
        known = newest.get(sample.rank)
        clash = clash or (known is not None and known.alive and sample.alive)
        if known is None or (sample.alive, sample.start_ns) > (known.alive, known.start_ns):
            newest[sample.rank] = sample
    # two live processes with the same number: several worlds
    return _of_worlds(folder, tuple(names)) if clash else [newest[rank] for rank in sorted(newest)]


def _of_worlds(folder: Path, names: tuple[str, ...]) -> list[RankSample]:
    """Samples a job of several worlds; ranks get their numbers and names in the whole job."""
    found = []
    for path, (rank, name) in _numbers_in_job(folder, names, int(time.time() / RENUMBER_S)).items():
        sample = read_sample(folder / path)
        found += [replace(sample, rank=rank, name=name)] if sample is not None else []
    return sorted(found, key=lambda sample: sample.rank)


@lru_cache(maxsize=4)
def _numbers_in_job(folder: Path, names: tuple[str, ...], when: int) -> dict[str, tuple[int, str]]:
    """File -> number and name. The result may change over time, so `when` invalidates the cache."""
    traces = load_paths([str(folder)], LoadOptions(allow_nothing=True)).traces
    return {t.path: (t.header.rank, t.header.name) for t in traces if t.header.rank is not None}


def read_sample(path: str | Path) -> RankSample | None:
    """Samples one box from its header; None when the file is not a complete black box of a known version."""
    try:
        page = read_regular(path, HEADER_BYTES)
        head = parse_header(page)
    except (OSError, InputError):
        return None
    return RankSample(
        rank=head.rank,
        pid=head.pid,
        path=str(path),
        alive=is_alive(head.pid, head.start_ticks),
        step=head.step,
        calls_started=head.calls_started,
        calls_completed=head.calls_completed,
        last_ns=head.last_sign_ns,
        start_ns=head.start_ns,
        expect_until_ns=head.expect_until_ns,
        closed=head.closed,
        closed_ns=head.closed_ns,
        attempt=head.attempt,
        step_ns=head.step_ns,
        joined=head.inside > 0 or head.setups > 0,
        phases=read_phases(page),
        loss=head.loss,
        tokens=head.tokens,
        flops=head.flops,
    )


def last_good(step: int, samples: Sequence[RankSample]) -> str:
    """How far the ranks came: "step 7", or "call 14" without step marks."""
    return f"step {step}" if step >= 0 else f"call {max((s.calls_completed for s in samples), default=0)}"


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped by SIGSTOP. A debugger's stop does not count, since it ends by itself."""
    return process_state(pid) == "T"


def sleeps(pid: int) -> bool:
    """Whether the process is stopped, or none of its threads runs at this moment; False when that cannot be read."""
    try:
        states = [process_state(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return False
    return bool(states) and all(state in ("S", "D", "T", "t") for state in states)


def letter_of(sample: RankSample, now: float, asleep: Callable[[int], bool] = sleeps) -> str:
    """The state of a rank, as a letter of `DOING` in model/cluster.py."""
    if sample.closed:
        return "e"
    if not sample.alive:
        return "d"
    if sample.calls_started > sample.calls_completed:
        return "w"
    silent = sample.last_ns and now - sample.last_ns / 1e9 >= SILENT_S
    return "s" if silent and asleep(sample.pid) else "c"


class OpenCall(NamedTuple):
    """A collective, equal in all ranks of its group unless their programs diverged."""

    group: tuple[str, tuple[int, ...]]  # name and members
    number: int  # in the group
    op: str


@dataclass(frozen=True)
class Rhythm:
    """How long the rank paused after earlier calls at its present place in the program.

    A training loop passes the same places repeatedly, with or without step marks: a bucket of DDP, a layer of FSDP, a message
    of a pipeline stage. A new place (the first step, the first evaluation) has no rhythm.
    """

    pauses_s: tuple[float, ...] = ()
    waits: frozenset[OpenCall] = frozenset()  # unfinished collectives of the rank
    rank: int | None = None
    connects: bool = True  # the first call of its group makes connections; gloo has them by then
    meets: tuple[Rendezvous, Rendezvous] | None = None  # in init_process_group: as called, and as launched

    @property
    def known(self) -> bool:
        """Whether the rank has passed this place often enough."""
        return len(self.pauses_s) >= PASSED


def read_rhythm(path: str) -> Rhythm:
    """The rhythm of the rank that writes this black box; an empty one when the box is unreadable."""
    try:
        trace = read_trace(path)
    except InputError:
        return Rhythm()
    backends = [trace.groups[number].backend for number in trace.calls["group"][-1:]]
    age_s = seconds_since_start(trace.header.start_ticks)
    found = replace(measure_rhythm(trace.calls, age_s), waits=unfinished(trace), rank=trace.header.rank)
    inside = trace.progress.inside == "init_process_group"
    meets = (trace.header.rendezvous, trace.header.launched) if inside else None
    return replace(found, connects="gloo" not in backends, meets=meets)


def unfinished(trace: RankTrace) -> frozenset[OpenCall]:
    """The unfinished collectives, without calls whose end is not recorded, and without batches and messages."""
    calls = trace.calls
    waiting = calls[(calls["state"] <= State.STARTED) & (calls["flags"] & _UNCERTAIN == 0)]
    found = [(trace.groups[row["group"]], int(row["seq"]), trace.names[row["op"]]) for row in waiting]
    return frozenset(OpenCall((group.name, group.ranks), number, op) for group, number, op in found)


def contradict(rhythms: Sequence[Rhythm]) -> bool:
    """Whether the waits of the ranks can never end: different collectives with the same number in a group, or
    init_process_group with different ports or world sizes."""
    meets = [rhythm.meets for rhythm in rhythms if rhythm.meets is not None]
    ports = {met.address.rpartition(":")[2] for met, _ in meets if met.address}
    sizes = {one.world_size for pair in meets for one in pair if one.world_size}
    if len(ports) > 1 or len(sizes) > 1:
        return True
    ops: dict[tuple[object, int], str] = {}
    waits = (wait for rhythm in rhythms for wait in rhythm.waits)
    return any(ops.setdefault((wait.group, wait.number), wait.op) != wait.op for wait in waits)


def elsewhere(rhythms: Sequence[Rhythm]) -> bool:
    """Whether a rank is not in a collective in which other ranks of its group wait."""
    waits = {rhythm.rank: rhythm.waits for rhythm in rhythms}
    calls = frozenset().union(*waits.values())
    return any(rank in waits and call not in waits[rank] for call in calls for rank in call.group[1])


def measure_rhythm(rows: np.ndarray, age_s: float = math.inf) -> Rhythm:
    """The pauses after earlier calls at the place of the last one. A pause longer than the process has lived is a clock that
    was set."""
    if len(rows) <= PASSED:
        return Rhythm()
    same = np.ones(len(rows) - 1, bool)
    for column in _PLACE:
        same &= rows[column][:-1] == rows[column][-1]
    pauses = np.diff(rows["created_ns"])[same] / 1e9
    return Rhythm(tuple(float(pause) for pause in np.maximum(pauses, 0.0) if pause <= age_s))
