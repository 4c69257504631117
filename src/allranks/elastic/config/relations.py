"""What must hold between values of different fields. Pure: values in, problems out.

Values that are themselves wrong are None here (they have their own problem), and a relation with a None is
not judged: one mistake gives one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from allranks.checkpoint.config import folder_problem

Get = Callable[[str], Any]  # dotted path -> value, default included; None: absent or invalid


@dataclass(frozen=True)
class Breach:
    """A relation that does not hold; `path` is where to look."""

    path: str
    message: str
    warning: bool = False


#: (a value that must not exceed another, the other, what is said when it does)
_NOT_ABOVE = (
    ("elastic.min_nodes", "elastic.max_nodes", "min_nodes cannot exceed max_nodes ({a} > {b})"),
    ("scaling.min_lr", "scaling.max_lr", "min_lr ({a}) cannot exceed max_lr ({b})"),
    ("debug.hang_floor_s", "debug.hang_cap_s", "hang_floor_s ({a:g}) exceeds hang_cap_s ({b:g})"),
    ("recovery.back_off_s", "recovery.window_s", "back_off_s ({a:g}) exceeds window_s ({b:g})"),
)
_HEARTBEATS = (
    ("elastic.heartbeat_interval", "elastic.heartbeat_timeout"),
    ("lighthouse.heartbeat_interval_s", "lighthouse.heartbeat_timeout_s"),
)
_TARGET = "scaling.target_global_batch_size"


def find_breaches(get: Get) -> Iterator[Breach]:
    """Every relation that does not hold, errors and warnings."""
    for low, high, message in _NOT_ABOVE:
        a, b = get(low), get(high)
        if a is not None and b is not None and a > b:
            yield Breach(low, message.format(a=a, b=b))
    yield from _nodes(get)
    yield from _scaling(get)
    yield from _checkpoint(get)
    yield from _timeouts(get)
    if get("recovery.on_hang") == "command" and not get("recovery.command"):
        yield Breach("recovery.command", "command is required because on_hang is 'command'")
    if get("data.enabled") and get("data.files") and not get("data.index"):
        text = "no index: build it with `allranks index build FILES -o INDEX` and name it in data.index"
        yield Breach("data.index", text, warning=True)


def _nodes(get: Get) -> Iterator[Breach]:
    low, high = get("elastic.min_nodes"), get("elastic.max_nodes")
    if low is not None and low > 1 and get("elastic.rdzv_endpoint") == "":
        text = (
            f"no rdzv_endpoint: {low} nodes can only meet if it (host:port) is given when the job is started"
        )
        yield Breach("elastic.rdzv_endpoint", text, warning=True)
    base, procs = get("elastic.base_world_size"), get("elastic.nproc_per_node")
    if base is None or not isinstance(procs, int) or low is None or high is None:
        return
    if not low * procs <= base <= high * procs:
        text = f"base_world_size ({base}) is outside the {low * procs} to {high * procs} ranks that "
        text += f"{low} to {high} nodes of {procs} ranks can have"
        yield Breach("elastic.base_world_size", text, warning=True)


def _scaling(get: Get) -> Iterator[Breach]:
    lr, top = get("training.lr"), get("scaling.max_lr")
    if lr is not None and top is not None and lr > top:
        text = f"max_lr ({top}) is below training.lr ({lr}): the rate would be cut"
        yield Breach("scaling.max_lr", text, warning=True)
    if get("scaling.strategy") != "constant_batch":
        return
    target, local = get(_TARGET), get("training.batch_size")
    if target is None:
        if get(f"{_TARGET}?") is None:
            yield Breach(_TARGET, "target_global_batch_size is required for 'constant_batch' strategy")
        return
    procs, high = get("elastic.nproc_per_node"), get("elastic.max_nodes")
    small = f"target_global_batch_size ({target}) is smaller than"
    if isinstance(procs, int) and high is not None and target < procs * high:
        ranks = f"the {procs * high} ranks of {high} nodes"
        yield Breach(_TARGET, f"{small} {ranks}: some ranks would have no sample")
    if local is not None and target < local:
        yield Breach(_TARGET, f"{small} one rank's batch_size ({local})", warning=True)


def _checkpoint(get: Get) -> Iterator[Breach]:
    path = get("checkpoint.nvme_path")
    if path is not None and (problem := folder_problem(path)):
        yield Breach("checkpoint.nvme_path", f"nvme_path is {path!r}: {problem}")
    disk, memory = get("checkpoint.checkpoint_interval"), get("checkpoint.memory_snapshot_interval")
    if disk is None or not memory or disk % memory == 0:
        return
    if disk < memory:
        text = f"checkpoint_interval ({disk}) < memory_snapshot_interval ({memory}). "
        text += "Memory snapshots may be unnecessary."
    else:
        text = f"checkpoint_interval ({disk}) is not a multiple of memory_snapshot_interval ({memory}): "
        text += "some steps are saved twice at short distance"
    yield Breach("checkpoint.checkpoint_interval", text, warning=True)


def _timeouts(get: Get) -> Iterator[Breach]:
    for interval, timeout in _HEARTBEATS:
        a, b = get(interval), get(timeout)
        if a is not None and b is not None and b < 2 * a:
            names = interval.split(".")[1], timeout.split(".")[1]
            text = f"{names[1]} ({b:g} s) must be at least twice {names[0]} ({a:g} s): "
            yield Breach(timeout, text + "one late heartbeat would be a death")
    tick, join = get("lighthouse.quorum_tick_s"), get("lighthouse.join_timeout_s")
    if tick is not None and join is not None and tick >= join:
        text = f"quorum_tick_s ({tick:g}) must be below join_timeout_s ({join:g})"
        yield Breach("lighthouse.quorum_tick_s", text)
