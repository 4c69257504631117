"""The layout of a black box file, written by the rank and read by the agent and the commands.

    0      header   one HEADER row, 4096 bytes reserved
    4096   ring     `capacity` rows of trace.CALL; record i lives in slot i % capacity
    ...    heap     append-only table items, from `heap_offset`

Heap item: u4 payload length, u2 kind (Item), u2 reserved, u4 id, then the payload as UTF-8 JSON, padded to 8 bytes. An item
is published by raising `heap_used` after its bytes are written. Ids count from 1 per kind; id 0 means none. If the heap is
full, new items get id 0 and `heap_full` is set; the numbers in the rows (numel, seq, peer) are still recorded.

The header's `next_id` may lag behind the newest row by one per recording thread; `begin` in a row is authoritative.

A row is written in ascending order, `begin` first and `end` last. A reader of a live file therefore reads the `end` column,
then the rows, then the `begin` column. A row is whole if the earlier `end` and the later `begin` name the same record (see
`whole_rows`). `begin` and `end` of a single copy are not enough, because the writer may fill the fields in between while
they are copied. Later changes of a row (completed_ns, then state and flags) are single eight-byte stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from allranks.blackbox.header import CODES, HEADER_BYTES, STRUCT, Header
from allranks.model.trace import CALL

ITEM_HEADER_BYTES = 12
DEFAULT_CAPACITY = 2000
#: So many equidistant ranks are written as a range: 100,000 single ranks would fill the heap.
MIN_RANGE = 16
DEFAULT_HEAP_BYTES = 1 << 20


class Item(IntEnum):
    """Kinds of heap items and their JSON payloads."""

    # {"host", "job", "backend", "versions": {}, "argv": [], "role", "rendezvous": [address, world size, line, store],
    # "launched": as rendezvous, "first_error": [`begin` of a call, text]}; later items override earlier ones
    META = 1
    # [name, desc, [ranks], backend], plus [store, own number] if the group has another store than the world; in ranks,
    # [8, 800, 8] stands for range(8, 800, 8)
    GROUP = 2
    NAME = 3  # "all_reduce"
    SHAPES = 4  # [inputs, outputs, input_dtypes, output_dtypes, input_splits, output_splits]
    STACK = 5  # [[name, file, line], ...] innermost first
    THREAD = 6  # [native thread id, name]
    DESTROYED = 7  # [id of a GROUP, epoch nanoseconds]


_DTYPES = {"I": "<u4", "Q": "<u8", "q": "<i8", "8s": "S8", "64s": "S64", "512s": "S512", "d": "<f8"}
HEADER = np.dtype(
    [
        (name.replace("closed_bytes", "closed"), _DTYPES[code])
        for name, code in zip(Header._fields, CODES, strict=False)
    ]
)
assert HEADER.itemsize == STRUCT.size <= HEADER_BYTES


def packed_ranks(ranks: Sequence[int]) -> list[int | list[int]]:
    """The members of a group as listed in a GROUP item, in order."""
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
    """The socket address for a datagram that makes the agent read the boxes now."""
    return f"\0allranks-agent-{agent_pid}"


def file_name(job: str, attempt: int, rank: int, pid: int) -> str:
    """The file name of a rank's black box, unique per attempt and process."""
    return f"{job_prefix(job)}{attempt}.r{rank}.p{pid}.box"


def job_prefix(job: str) -> str:
    """The prefix of the names of a job's black boxes."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in job) or "job"
    return f"{safe}.a"


def whole_rows(
    rows: np.ndarray, begins_after: np.ndarray, ends_before: np.ndarray | None = None
) -> np.ndarray:
    """Which copied rows are whole. While the writer is alive, `ends_before` must be read before the rows and
    `begins_after` after them."""
    mask: np.ndarray = (rows["begin"] != 0) & (rows["begin"] == rows["end"]) & (rows["begin"] == begins_after)
    return mask if ends_before is None else mask & (rows["begin"] == ends_before)


def ring_bytes(capacity: int) -> int:
    return capacity * CALL.itemsize
