"""What must hold between values of different fields. Pure: values in, problems out.

Values that are themselves wrong are None here (they have their own problem), and a relation with a None is
not judged: one mistake gives one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Get = Callable[[str], Any]  # dotted path -> value, default included; None: absent or invalid


@dataclass(frozen=True)
class Breach:
    """A relation that does not hold; `path` is where to look."""

    path: str
    message: str
    warning: bool = False


def find_breaches(get: Get) -> Iterator[Breach]:
    """Every relation that does not hold, errors and warnings."""
    yield from _nodes(get)
    yield from _scaling(get)
    yield from _checkpoint(get)
    yield from _timeouts(get)
    yield from _recovery(get)
    yield from _data(get)


def _below(get: Get, low: str, high: str, message: str) -> Iterator[Breach]:
    a, b = get(low), get(high)
    if a is not None and b is not None and a > b:
        yield Breach(low, message.format(a=a, b=b))


def _nodes(get: Get) -> Iterator[Breach]:
    low, high = get("elastic.min_nodes"), get("elastic.max_nodes")
    yield from _below(
        get, "elastic.min_nodes", "elastic.max_nodes", "min_nodes cannot exceed max_nodes ({a} > {b})"
    )
    if low is not None and low > 1 and get("elastic.rdzv_endpoint") == "":
        yield Breach(
            "elastic.rdzv_endpoint",
            f"no rdzv_endpoint: {low} nodes can only meet if it (host:port) is given when the job is started",
            warning=True,
        )
    base, procs = get("elastic.base_world_size"), get("elastic.nproc_per_node")
    if base is None or not isinstance(procs, int) or low is None or high is None:
        return
    if not low * procs <= base <= high * procs:
        yield Breach(
            "elastic.base_world_size",
            f"base_world_size ({base}) is outside the {low * procs} to {high * procs} ranks that "
            f"{low} to {high} nodes of {procs} ranks can have",
            warning=True,
        )


def _scaling(get: Get) -> Iterator[Breach]:
    yield from _below(get, "scaling.min_lr", "scaling.max_lr", "min_lr ({a}) cannot exceed max_lr ({b})")
    lr, top = get("training.lr"), get("scaling.max_lr")
    if lr is not None and top is not None and lr > top:
        yield Breach(
            "scaling.max_lr", f"max_lr ({top}) is below training.lr ({lr}): the rate would be cut", True
        )
    if get("scaling.strategy") != "constant_batch":
        return
    target, local = get("scaling.target_global_batch_size"), get("training.batch_size")
    if target is None and get("scaling.target_global_batch_size?") is None:
        yield Breach(
            "scaling.target_global_batch_size",
            "target_global_batch_size is required for 'constant_batch' strategy",
        )
    procs, high = get("elastic.nproc_per_node"), get("elastic.max_nodes")
    if target is not None and isinstance(procs, int) and high is not None and target < procs * high:
        yield Breach(
            "scaling.target_global_batch_size",
            f"target_global_batch_size ({target}) is smaller than the {procs * high} ranks of {high} nodes: "
            "some ranks would have no sample",
        )
    if target is not None and local is not None and target < local:
        yield Breach(
            "scaling.target_global_batch_size",
            f"target_global_batch_size ({target}) is smaller than one rank's batch_size ({local})",
            warning=True,
        )


def _checkpoint(get: Get) -> Iterator[Breach]:
    disk, memory = get("checkpoint.checkpoint_interval"), get("checkpoint.memory_snapshot_interval")
    if disk is None or not memory:
        return
    where = "checkpoint.checkpoint_interval"
    if disk < memory:
        yield Breach(
            where,
            f"checkpoint_interval ({disk}) < memory_snapshot_interval ({memory}). "
            "Memory snapshots may be unnecessary.",
            warning=True,
        )
    elif disk % memory:
        yield Breach(
            where,
            f"checkpoint_interval ({disk}) is not a multiple of memory_snapshot_interval ({memory}): "
            "some steps are saved twice at short distance",
            warning=True,
        )


def _timeouts(get: Get) -> Iterator[Breach]:
    for interval, timeout in (
        ("elastic.heartbeat_interval", "elastic.heartbeat_timeout"),
        ("lighthouse.heartbeat_interval_s", "lighthouse.heartbeat_timeout_s"),
    ):
        a, b = get(interval), get(timeout)
        if a is not None and b is not None and b < 2 * a:
            names = interval.split(".")[1], timeout.split(".")[1]
            yield Breach(
                timeout,
                f"{names[1]} ({b:g} s) must be at least twice {names[0]} ({a:g} s): "
                "one late heartbeat would be a death",
            )
    tick, join = get("lighthouse.quorum_tick_s"), get("lighthouse.join_timeout_s")
    if tick is not None and join is not None and tick >= join:
        yield Breach(
            "lighthouse.quorum_tick_s", f"quorum_tick_s ({tick:g}) must be below join_timeout_s ({join:g})"
        )
    yield from _below(
        get, "debug.hang_floor_s", "debug.hang_cap_s", "hang_floor_s ({a:g}) exceeds hang_cap_s ({b:g})"
    )
    back_off, window = get("recovery.back_off_s"), get("recovery.window_s")
    if back_off is not None and window is not None and back_off > window:
        yield Breach("recovery.back_off_s", f"back_off_s ({back_off:g}) exceeds window_s ({window:g})")


def _recovery(get: Get) -> Iterator[Breach]:
    if get("recovery.on_hang") == "command" and not get("recovery.command"):
        yield Breach("recovery.command", "command is required because on_hang is 'command'")


def _data(get: Get) -> Iterator[Breach]:
    if get("data.enabled") and get("data.files") and not get("data.index"):
        yield Breach(
            "data.index",
            "no index: build it with `allranks index build FILES -o INDEX` and name it in data.index",
            warning=True,
        )
