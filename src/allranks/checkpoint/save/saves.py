"""Saves under way in one rank: hands snapshots to the helper process, keeps count, says what failed."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from allranks.checkpoint.config import AsyncSavePolicy
from allranks.checkpoint.save.helper_client import HelperClient, SaveOrder
from allranks.checkpoint.save.snapshot import StateSnapshot
from allranks.checkpoint.save.writer import Saved, SaveJob
from allranks.errors import CheckpointSaveError

log = logging.getLogger("allranks.checkpoint")


@dataclass(frozen=True)
class Pending:
    """One save that has been started. `future` is done when it is durable, or has failed."""

    tier: str
    step: int
    path: str
    future: Future[Saved]


class Saves:
    """The saves of one manager. Thread-safe: copies finish in their own threads."""

    def __init__(self, policy: AsyncSavePolicy) -> None:
        self.policy = policy
        self.helper = HelperClient()
        self.failures: list[CheckpointSaveError] = []
        self.finished = 0
        self._pending: list[Pending] = []
        self._unraised: list[CheckpointSaveError] = []
        self._lock = threading.Lock()

    def announce(self, tier: str, step: int, path: str) -> Future[Saved]:
        """Counts a save whose copy is still under way; its future ends it."""
        future: Future[Saved] = Future()
        with self._lock:
            self._pending.append(Pending(tier, step, path, future))
        return future

    def submit(self, snapshot: StateSnapshot, tier: str, job: SaveJob, announced: Future[Saved]) -> None:
        """Hands a complete snapshot to the helper; it is held until the save has ended."""
        snapshot.hold()
        try:
            inner = self.helper.submit(
                SaveOrder(job, tier, snapshot.arena, snapshot.plan.id, snapshot.plan.shards)
            )
        except OSError as error:  # no process, or no memory, for a new helper
            snapshot.release()
            self.fail(tier, str(job.store.url), error, announced)
            return
        inner.add_done_callback(lambda done: self._ended(snapshot, announced, done))

    def fail(self, tier: str, path: str, error: BaseException, announced: Future[Saved]) -> None:
        """Ends an announced save that never reached the helper."""
        reason = (
            error.reason if isinstance(error, CheckpointSaveError) else f"{type(error).__name__}: {error}"
        )
        self._settle(announced, CheckpointSaveError(reason, tier=tier, path=path))

    def busy(self, tiers: set[str]) -> list[Pending]:
        """Saves to these tiers that have not ended."""
        with self._lock:
            return [p for p in self._pending if p.tier in tiers and not p.future.done()]

    def wait(self, timeout_s: float | None) -> bool:
        """Waits for every save; False when one failed since the last wait, or the time ran out."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ok = True
        for pending in self._taken():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                pending.future.result(left)
            except FutureTimeout:
                with self._lock:
                    self._pending.append(pending)
                ok = False
            except CheckpointSaveError:
                ok = False
        return ok

    def wait_for_room(self, tiers: set[str], most: int, timeout_s: float) -> None:
        """Waits until fewer than `most` steps are being saved to these tiers: each holds a buffer."""
        running = self.busy(tiers)
        steps = sorted({pending.step for pending in running})
        oldest = set(steps[: max(0, len(steps) - most + 1)])
        for pending in running:
            if pending.step in oldest:
                pending.future.exception(timeout_s)

    def wait_for(self, tier: str, path: str, timeout_s: float) -> None:
        """Waits for saves to one path ("": all of the tier); their failure is reported elsewhere."""
        with self._lock:
            mine = [p for p in self._pending if p.tier == tier and path in ("", p.path)]
        for pending in mine:
            pending.future.exception(timeout_s)

    def raise_failures(self) -> None:
        """Under the policy "fail": raises the first failure that was not raised yet."""
        with self._lock:
            unraised, self._unraised = self._unraised, []
        if unraised and self.policy is AsyncSavePolicy.FAIL:
            raise unraised[0]

    def _taken(self) -> list[Pending]:
        with self._lock:
            taken, self._pending = self._pending, []
        return taken

    def _ended(self, snapshot: StateSnapshot, announced: Future[Saved], done: Future[Saved]) -> None:
        snapshot.release()
        error = done.exception()
        if error is None:
            saved = done.result()
            with self._lock:
                self.finished += 1
                self._pending = [p for p in self._pending if p.future is not announced]
            log.info("saved %s: %d bytes in %.2f s", saved.path, saved.bytes, saved.total_s)
            for name in saved.left:
                log.info("kept %s beyond keep_last_n: it is being read", name)
            if saved.problem:
                log.warning("saved %s, but older ones could not be removed: %s", saved.path, saved.problem)
            announced.set_result(saved)
        else:
            assert isinstance(error, CheckpointSaveError)
            self._settle(announced, error)

    def _settle(self, announced: Future[Saved], error: CheckpointSaveError) -> None:
        with self._lock:
            self.failures = [*self.failures[-31:], error]
            self._unraised.append(error)
        log.warning("%s%s", error, f"\n{error.hint}" if error.hint else "")
        announced.set_exception(error)
