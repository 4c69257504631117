"""Stores that die, stall or lie in the middle of any request: a clear error or a whole checkpoint, nothing between."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, S3Backend, SnapshotServer
from allranks.checkpoint.restore.loader import kind_of_failure
from allranks.checkpoint.stores import Attempt, StoreSpec, open_store
from allranks.checkpoint.stores.file_store import FileStore
from allranks.checkpoint.stores.keyed_store import LEFT_BEHIND_S, READING_LIMIT_S, KeyedStore
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as mark
from allranks.errors import CheckpointSaveError, CheckpointUnreachable

from .jobs import make_job, make_state
from .s3server import Proxy, S3Server


class Judge:
    """Lets requests pass until number `at`, which gets the verdict."""

    def __init__(self, at: int, verdict: str) -> None:
        self.at, self.verdict, self.seen = at, verdict, 0

    def __call__(self, line: str) -> str | None:
        self.seen += 1
        return self.verdict if self.seen - 1 == self.at else None


def _backend(bucket: str, options: dict[str, str]) -> S3Backend:
    return S3Backend(bucket, "run", options={**options, "timeout_s": "2", "max_retries": "0"})


def _restored(bucket: str, options: dict[str, str]) -> int:
    model, optimizer = make_job()
    quick = {"timeout_s": "2", "max_retries": "0"}
    config = CheckpointConfig(
        s3_bucket=bucket, s3_prefix="run", s3_options={**options, **quick}, memory_snapshot_interval=0, wait_for_stores_s=0.0,
    )  # fmt: skip
    with CheckpointManager(config) as manager:
        state = manager.restore(model, optimizer)
    assert state is not None
    return state.step


@pytest.mark.parametrize("verdict", ["cut", "late", "500"])
def test_a_store_that_dies_in_any_request_of_a_save_leaves_old_or_new(
    s3: S3Server, bucket: str, verdict: str
) -> None:
    """Request by request; "late": the store did it, and the answer was lost."""
    clean = _backend(bucket, s3.options())
    clean.save(make_state(1), "checkpoint_step_00000001")
    requests, step = 1, 1
    at = 0
    while at < requests:
        judge = Judge(at, verdict)
        step += 1
        with Proxy(
            s3.ports["s3"], lambda line, j=judge: int(v) if (v := j(line)) and v.isdigit() else v
        ) as proxy:  # type: ignore[misc]
            try:
                _backend(bucket, s3.options(proxy.endpoint)).save(
                    make_state(step), f"checkpoint_step_{step:08d}"
                )
                saved = True
            except CheckpointSaveError as error:
                saved = False
                assert error.hint
        assert judge.seen > at, "the fault was never made"
        newest = _restored(bucket, s3.options())
        assert newest == step or (not saved and newest < step)
        requests, at = max(requests, judge.seen), at + 1
    assert requests >= 3


@pytest.mark.parametrize("verdict", ["cut", "late", "stall"])
def test_a_store_that_dies_in_any_request_of_a_restore_is_unreachable_or_whole(
    s3: S3Server, bucket: str, verdict: str
) -> None:
    """Never an older step, and never a first one."""
    for step in (1, 2):
        _backend(bucket, s3.options()).save(make_state(step), f"checkpoint_step_{step:08d}")
    counting = Judge(-1, "")
    with Proxy(s3.ports["s3"], counting) as proxy:
        assert _restored(bucket, s3.options(proxy.endpoint)) == 2
    chosen = range(counting.seen) if verdict != "stall" else (0, counting.seen - 1)
    for at in chosen:
        with Proxy(s3.ports["s3"], Judge(at, verdict)) as proxy:
            try:
                assert _restored(bucket, s3.options(proxy.endpoint)) == 2
            except CheckpointUnreachable as error:
                assert "allranks checkpoint ls" in error.hint
            assert proxy.judged


class SkewedBlobs:
    """Objects whose store has another time than this machine."""

    def __init__(self, blobs: object, skew_s: float) -> None:
        self._blobs, self._skew_s = blobs, skew_s

    def __getattr__(self, name: str) -> object:
        return getattr(self._blobs, name)

    def keys(self, prefix: str) -> list[tuple[str, float]]:
        return [(key, changed - self._skew_s) for key, changed in self._blobs.keys(prefix)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("skew_s", [3 * LEFT_BEHIND_S, -3 * LEFT_BEHIND_S])
def test_a_wrong_clock_deletes_neither_what_is_being_saved_nor_what_is_being_read(
    s3: S3Server, bucket: str, skew_s: float
) -> None:
    """Age is counted by the store's clock, whatever this machine thinks of the day."""
    backend = _backend(bucket, s3.options())
    backend.save(make_state(1), "checkpoint_step_00000001")
    real = backend.store
    assert isinstance(real, KeyedStore)
    store = KeyedStore(SkewedBlobs(real.blobs, skew_s), real.spec)  # type: ignore[arg-type]
    half = "checkpoint_step_00000002/rank-00000-0123456789ab.safetensors"
    real.blobs.put(half, [memoryview(b"x")], 1)
    assert store.tidy() == []
    with store.reading("checkpoint_step_00000001"):
        assert store.remove("checkpoint_step_00000001") is False
    assert READING_LIMIT_S < LEFT_BEHIND_S


@pytest.mark.parametrize("skew_s", [3 * LEFT_BEHIND_S, -3 * LEFT_BEHIND_S])
def test_keepers_with_different_clocks_delete_neither_what_is_being_saved_nor_what_is_being_read(
    skew_s: float,
) -> None:
    """Every node has a clock of its own: each keeper's ages are counted by its own."""
    with contextlib.ExitStack() as stack:
        keepers = [
            SnapshotServer(
                "a secret", "127.0.0.1:0", 1 << 20, clock=lambda late=late: time.monotonic() + late
            )
            for late in (0.0, skew_s, 0.0)
        ]
        for keeper in keepers:
            keeper.start()
            stack.callback(keeper.close)
        addresses = ",".join(keeper.address for keeper in keepers)
        # each rank writes to its own node's keeper and the next, and asks its own first
        for node in range(3):
            half = f"checkpoint_step_00000002/rank-{node:05d}-0123456789ab.safetensors"
            store = open_store(StoreSpec(f"peer://{addresses}/job", {"token": "a secret", "node": str(node)}))
            stack.callback(store.close)
            assert isinstance(store, KeyedStore)
            store.blobs.put(half, [memoryview(b"x")], 1)
            assert store.tidy() == []
            with store.reading("checkpoint_step_00000001"):
                assert store.remove("checkpoint_step_00000001") is False


def test_a_file_servers_clock_counts_for_what_lies_on_it(tmp_path: Path) -> None:
    """A shared filesystem without locks whose clock is ten minutes behind: what is young there is left alone."""
    store, attempt = FileStore(tmp_path), Attempt("live", "t1")
    store.write(attempt, "file", [memoryview(b"x")], 1)
    store.leave(attempt)  # as where locks do not work
    folder = tmp_path / ".saving-live-t1"
    there = time.time() - 600
    for path in (folder / "file", folder, tmp_path):
        os.utime(path, (there, there))
    assert store.tidy() == []
    for path in (folder / "file", folder):
        os.utime(path, (there - 600, there - 600))
    os.utime(tmp_path, (there, there))
    assert store.tidy() == [folder.name]


@pytest.mark.parametrize(
    ("error", "tier", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), "NVME", "gone"),  # a bad sector: this checkpoint is lost
        (OSError(errno.EIO, "error sending request"), "S3", "unreadable"),
        (OSError(errno.ESTALE, "Stale file handle"), "NVME", "unreadable"),
        (ConnectionRefusedError(), "PEER", "unreadable"),
        (PermissionError(errno.EACCES, "403"), "S3", "refused"),
        (FileNotFoundError(), "NVME", "gone"),
        (KeyError("x"), "NVME", "mismatch"),
    ],
)
def test_only_what_is_lost_for_good_leads_to_an_older_checkpoint(
    error: Exception, tier: str, kind: str
) -> None:
    """A disk's bad sector is; a store that does not answer is not."""
    assert kind_of_failure(error, tier) == kind


def _close_after_a_death(rank: int, world_size: int, folder: str) -> str:
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=folder, checkpoint_interval=10, memory_snapshot_interval=0)
    manager = CheckpointManager(config)
    manager.step(1, model, optimizer)
    manager.group.gather("all are here")
    mark("trained")
    if rank == 1:
        signal.pause()
    while os.path.exists(f"{folder}/wait"):
        time.sleep(0.01)
    manager.close()
    return "closed"


def test_the_end_of_a_training_does_not_wait_for_a_rank_that_died(tmp_path: Path) -> None:
    """`close()` says that the last step is not saved; it does not wait for commit_timeout_s (600)."""
    (tmp_path / "wait").touch()
    with Ranks(_close_after_a_death, 2, (str(tmp_path),)) as ranks:
        ranks.wait_for("trained")
        ranks.kill(1)
        (tmp_path / "wait").unlink()
        outcome = ranks.join(timeout_s=120)[0]
    assert outcome.value == "closed", outcome.error
