"""The messages between a rank and its helper process: JSON frames over a socket pair. Torch-free.

rank → helper: `arena` (with the memory's descriptor), `drop`, `layout`, `save`. helper → rank: `saved`, `failed`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from allranks.checkpoint.layout import Shard
from allranks.checkpoint.save.writer import Saved, SaveJob
from allranks.checkpoint.stores.store import Attempt, StoreSpec


def job_to_json(job: SaveJob) -> dict[str, Any]:
    """A job as JSON; the skeletons in it are not copied."""
    return {**vars(job), "store": asdict(job.store), "attempt": asdict(job.attempt)}


def job_from_json(raw: dict[str, Any]) -> SaveJob:
    """The job again."""
    return SaveJob(
        **{**raw, "store": StoreSpec(**raw["store"]), "attempt": Attempt(**raw["attempt"]), "ranks": tuple(raw["ranks"])}
    )  # fmt: skip


def shards_from_json(raw: list[list[Any]]) -> list[Shard]:
    """The shards again; as JSON a shard is a list."""
    return [
        Shard(name, dtype, tuple(shape), tuple(offsets), tuple(sizes), length, view)
        for name, dtype, shape, offsets, sizes, length, view in raw
    ]


def saved_from_json(raw: dict[str, Any]) -> Saved:
    """A result again."""
    return Saved(**{**raw, "removed": tuple(raw["removed"]), "left": tuple(raw["left"])})
