"""allranks' own ways to save for benchmarks/checkpoint.py: one per tier, and the disk with read-back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from _checkpoint_job import Job, Method, Started
from allranks.checkpoint import CheckpointConfig, CheckpointManager

_KEEPER = """
import sys
from allranks.checkpoint import SnapshotServer
server = SnapshotServer("secret", "127.0.0.1:0", int(sys.argv[1]))
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""


def to_disk(job: Job, folder: Path) -> tuple[Method, CheckpointManager]:
    """The disk tier."""
    config = CheckpointConfig(
        nvme_path=folder, checkpoint_interval=1, memory_snapshot_interval=0, keep_last_n=1
    )  # fmt: skip
    return _method("allranks", job, config)


def to_memory(job: Job) -> Method:
    """The memory tier: the newest snapshot."""
    config = CheckpointConfig(nvme_path=None, memory_snapshot_interval=1, max_snapshots=1)
    return _method("allranks_memory", job, config)[0]


def to_peer(job: Job) -> Method:
    """The peer tier: the snapshot goes to two keepers, each a process as an agent is."""
    keepers = [
        subprocess.Popen(
            [sys.executable, "-c", _KEEPER, str(4 * job.bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]  # fmt: skip
    addresses = tuple(keeper.stdout.readline().strip() for keeper in keepers if keeper.stdout)
    config = CheckpointConfig(
        nvme_path=None, memory_snapshot_interval=1, max_snapshots=1, peers=addresses, peer_token="secret"
    )

    def stop() -> None:
        for keeper in keepers:
            with suppress(ProcessLookupError):
                os.kill(keeper.pid, signal.SIGKILL)
            keeper.wait(20)

    return _method("allranks_peer", job, config, stop)[0]


def to_object_store(job: Job, options: dict[str, str]) -> Method:
    """The object store tier."""
    config = CheckpointConfig(
        nvme_path=None, s3_bucket="ours", s3_options={**options, "timeout_s": "600"}, checkpoint_interval=1,
        memory_snapshot_interval=0, keep_last_n=1,
    )  # fmt: skip
    return _method("allranks_s3", job, config)[0]


def _method(
    name: str, job: Job, config: CheckpointConfig, after: Callable[[], Any] = lambda: None
) -> tuple[Method, CheckpointManager]:
    manager = CheckpointManager(config)

    def start(_: Path, step: int) -> Started:
        if not manager.step(step, job.model, job.optimizer):
            raise RuntimeError(f"{name}: step {step} was not saved")
        return manager.wait_for_copy, lambda: _done(manager)

    def close() -> None:
        manager.close()
        after()

    return Method(name, start, close), manager


def _done(manager: CheckpointManager) -> None:
    if not manager.wait_for_pending_saves(300):
        raise RuntimeError(f"a save failed: {manager.saves.failures}")
