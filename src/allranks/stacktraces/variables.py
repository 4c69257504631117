"""What the local variables that py-spy prints tell: which object a frame belongs to, and whether a loop counts. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from allranks.model.stacks import ThreadStack
from allranks.stacktraces.views import LOOP


@dataclass(frozen=True)
class Variables:
    """What the local variables of one thread tell."""

    selves: tuple[str, ...] = ()  # the address of `self` in each frame, "" where there is none
    members: int = 0  # of the process group that torch forms; 0 unknown
    plain: tuple[tuple[tuple[str, str], ...], ...] = ()  # names and values of the numbers in each frame


#: The size of the group, in functions of torch.distributed.
_SIZES = ("group_size", "world_size", "rendezvous_count")


_NUMBER = re.compile(r"(-?[\d.]+(e[-+]?\d+)?|True|False)$")


def read_variables(text: str) -> dict[int, Variables]:
    """What `py-spy dump --json --locals` tells, by thread id."""
    found: dict[int, Variables] = {}
    for row in json.loads(text):
        frames = row.get("frames") or ()
        known = [one.get("locals") or () for one in frames]
        first = [next((f"{v['addr']:x}" for v in one if v.get("name") == "self"), "") for one in known]
        sizes = [
            int(v["repr"])
            for frame, values in zip(frames, known, strict=True)
            if "torch/distributed/" in (frame.get("filename") or "")
            for v in values
            if v.get("name") in _SIZES and (v.get("repr") or "").isdigit()
        ]
        plain = tuple(
            tuple((v["name"], v["repr"]) for v in one if _NUMBER.match(v.get("repr") or "")) for one in known
        )
        found[row.get("os_thread_id") or 0] = Variables(tuple(first), sizes[0] if sizes else 0, plain)
    return found


def counted(
    stacks: Iterable[ThreadStack], before: Mapping[int, Variables], now: Mapping[int, Variables]
) -> set[int]:
    """The threads that are in a loop that changes nothing, while a number in its function or below has changed."""
    found = set()
    for one in stacks:
        at = next((n for n, frame in enumerate(one.frames) if LOOP in frame.source), None)
        tid = one.tid or 0
        if at is None or tid not in before or tid not in now:
            continue
        last = at - len(one.frames)  # counted from the outermost frame: it may have called something
        if before[tid].plain[last:] != now[tid].plain[last:]:
            found.add(tid)
    return found
