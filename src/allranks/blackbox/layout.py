"""The layout of a black box file. `record` writes it in the rank; `load` and `agent` read it from outside.

    0      header   one HEADER row, 4096 bytes reserved
    4096   ring     `capacity` rows of trace.CALL; record i lives in slot i % capacity
    ...    heap     append-only table items, from `heap_offset`

Heap item: u4 payload length, u2 kind (Item), u2 reserved, u4 id, then the payload as UTF-8 JSON, padded to
8 bytes. Items are published by raising `heap_used` after the bytes are in place. Ids count from 1 per kind;
id 0 means none. When the heap is full new items get id 0 and `heap_full` is set: numbers in the record
(numel, seq, peer) still tell most of the story.

The header's `next_id` may lag behind the newest row by one per recording thread; a row's `begin` is the truth.

A row is written in ascending order: `begin` first, `end` last. A reader of a living file therefore reads the `end`
column first, then the rows, then the `begin` column: a row is whole when `end` before and `begin` after name the
same record (see `whole_rows`). Comparing begin and end of one copy alone is not enough: the copy may have passed
`begin` before and `end` after the writer filled what lies between. Later changes of a row (completed_ns, then
state and flags) are single eight-byte stores and need no protection.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from allranks.blackbox.header import CODES, HEADER_BYTES, STRUCT, Header
from allranks.model.trace import CALL

ITEM_HEADER_BYTES = 12
DEFAULT_CAPACITY = 2000
#: Ranks in a row, equally far apart, that are written as a range: a world of 100,000 ranks would fill the heap.
MIN_RANGE = 16
DEFAULT_HEAP_BYTES = 1 << 20  # reserved up front: touching a page of a full tmpfs would kill the rank


class Item(IntEnum):
    """Kinds of heap items and their JSON payloads."""

    # {"host", "job", "backend", "versions": {}, "argv": [], "role", "rendezvous": [address, world size, line, store], "launched": the same,
    # "first_error": [`begin` of a call, text]}; later ones override earlier ones
    META = 1
    # [name, desc, [ranks], backend], of a group that does not meet where the world does also [store, own number]; in ranks,
    # [8, 800, 8] stands for range(8, 800, 8)
    GROUP = 2
    NAME = 3  # "all_reduce"
    SHAPES = 4  # [inputs, outputs, input_dtypes, output_dtypes, input_splits, output_splits]
    STACK = 5  # [[name, file, line], ...] innermost first
    THREAD = 6  # [native thread id, name]
    DESTROYED = 7  # [id of a GROUP, epoch nanoseconds]


_DTYPES = {"I": "<u4", "Q": "<u8", "q": "<i8", "8s": "S8", "64s": "S64", "512s": "S512", "d": "<f8"}
#: The header as a row.
HEADER = np.dtype(
    [
        (name.replace("closed_bytes", "closed"), _DTYPES[code])
        for name, code in zip(Header._fields, CODES, strict=False)
    ]
)
assert HEADER.itemsize == STRUCT.size <= HEADER_BYTES


def packed_ranks(ranks: Sequence[int]) -> list[int | list[int]]:
    """The members of a group as a GROUP item lists them, in their order."""
    packed: list[int | list[int]] = []
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        end = start + 1
        while step and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - start >= MIN_RANGE:
            packed.append([ranks[start], ranks[end - 1] + (1 if step > 0 else -1), step])
        else:
            end = start + 1
            packed.append(ranks[start])
        start = end
    return packed


def wakeup_address(agent_pid: int) -> str:
    """Where a rank sends a wake-up (one datagram, without content) when its agent should look at the boxes now."""
    return f"\0allranks-agent-{agent_pid}"


def file_name(job: str, attempt: int, rank: int, pid: int) -> str:
    """The name of a rank's black box; never reused by a later attempt or process."""
    return f"{job_prefix(job)}{attempt}.r{rank}.p{pid}.box"


def job_prefix(job: str) -> str:
    """How the names of a job's black boxes begin."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in job) or "job"
    return f"{safe}.a"


def whole_rows(
    rows: np.ndarray, begins_after: np.ndarray, ends_before: np.ndarray | None = None
) -> np.ndarray:
    """Which copied rows are whole. For a living writer both columns must come from reads of their own:
    `ends_before` from one made before the rows were copied, `begins_after` from one made after it.
    """
    mask: np.ndarray = (rows["begin"] != 0) & (rows["begin"] == rows["end"]) & (rows["begin"] == begins_after)
    return mask if ends_before is None else mask & (rows["begin"] == ends_before)


def ring_bytes(capacity: int) -> int:
    return capacity * CALL.itemsize
