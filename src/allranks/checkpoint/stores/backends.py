"""The disk and object-store tiers on their own: save, load, list and clean up states by name, in this process.

The manager uses their places, but saves through its helper process. One process saves here: for sharded states
of several ranks use the manager.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from allranks.checkpoint.checksum import best_algorithm
from allranks.checkpoint.config import CheckpointLoadConfig
from allranks.checkpoint.failure import hint_for, reason_of
from allranks.checkpoint.inspect import verify_checkpoint
from allranks.checkpoint.restore.into_state import read_state
from allranks.checkpoint.restore.opened_checkpoint import opened
from allranks.checkpoint.restore.pt_file import is_legacy, load_legacy
from allranks.checkpoint.save.arena import Arena
from allranks.checkpoint.save.plan import find_pieces, local_tensors, make_plan
from allranks.checkpoint.save.retention import decide, look, look_closely, remove
from allranks.checkpoint.save.snapshot import flatten_state
from allranks.checkpoint.save.staging import Stager
from allranks.checkpoint.save.writer import SaveJob, write_checkpoint
from allranks.checkpoint.state import CheckpointState
from allranks.checkpoint.stores.file_store import FileStore
from allranks.checkpoint.stores.store import Attempt, Store, StoreSpec, open_store
from allranks.errors import AllranksError, CheckpointLoadError, CheckpointSaveError, CheckpointValidationError


class Backend:
    """What both tiers have in common. `path` arguments are names within the tier's place, or absolute."""

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        #: Waits for saves under way to a path ("": to any). The manager puts its own in.
        self.settle: Callable[[str], None] = lambda path: None
        self._opened: Store | None = None

    @property
    def store(self) -> Store:
        """The place itself; opened at the first use."""
        if self._opened is None:
            self._opened = open_store(self.spec)
        return self._opened

    def save(self, state: CheckpointState, path: str) -> str:
        """Saves now; durable when it returns. Raises CheckpointSaveError, and leaves no half checkpoint."""
        return self._write(state.to_dict(), state, path)

    def save_async(self, state: CheckpointState, path: str) -> Future[str]:
        """Copies now, writes in a thread; the Future raises CheckpointSaveError when it fails."""
        copied = state.cpu_copy()
        future: Future[str] = Future()

        def work() -> None:
            try:
                future.set_result(self.save(copied, path))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="allranks-checkpoint-save", daemon=True).start()
        return future

    def load(self, path: str, config: CheckpointLoadConfig | None = None) -> CheckpointState:
        """Loads and verifies one checkpoint; whole CPU tensors."""
        name = self._name(path)
        self.settle(self.store.path_of(name))
        try:
            with opened(self.store, name) as checkpoint:
                return read_state(checkpoint, 0)
        except CheckpointValidationError as error:
            raise CheckpointLoadError(
                error.reason, tier=self.store.tier, path=self.store.path_of(name), hint=error.hint
            ) from error
        except OSError as error:
            raise CheckpointLoadError(
                reason_of(error), tier=self.store.tier, path=self.store.path_of(name),
                hint=hint_for(error, self.store.tier, self.spec.url, self.spec.options),
            ) from error  # fmt: skip

    def exists(self, path: str) -> bool:
        """Whether a complete checkpoint of that name is there."""
        name = self._name(path)
        self.settle(self.store.path_of(name))
        return name in self.store.names()

    def list_checkpoints(self, prefix: str = "") -> list[str]:
        """The names of all complete checkpoints, oldest step first."""
        found = sorted(
            (kept for kept in look(self.store) if kept.valid), key=lambda kept: (kept.step, kept.name)
        )
        return [kept.name for kept in found if kept.name.startswith(prefix)]

    def delete(self, path: str) -> None:
        """Deletes one; FileNotFoundError when it is not there, BlockingIOError while somebody reads it."""
        self.settle(self.store.path_of(self._name(path)))
        if not self.store.remove(self._name(path)):
            raise BlockingIOError(f"{self.store.path_of(self._name(path))} is being read")

    def get_latest_checkpoint(self) -> str | None:
        """The name of the newest step's checkpoint, or None."""
        found = self.list_checkpoints()
        return found[-1] if found else None

    def cleanup_old_checkpoints(self, keep_last: int = 3) -> list[str]:
        """Removes all but the newest; never the last good one, nor one being read. Returns what it removed.

        The newest is read and checked first: one that turns out damaged does not count as kept.
        """
        self.settle("")
        store = self.store
        found = look_closely(store, lambda name: not verify_checkpoint(store, name).problems)
        return remove(store, decide(found, max(1, keep_last)))[0]

    def _name(self, path: str) -> str:
        base = self.store.path_of("").rstrip("/")
        return str(path).removeprefix(base).strip("/")

    def _write(self, _: dict[str, Any], state: CheckpointState, path: str) -> str:
        name = self._name(path)
        try:
            flat = flatten_state(state, 0)
            plan = make_plan("", find_pieces(flat.tensors), None, True)
            arena = Arena(plan.arena_bytes)
            sources = [source for source, _ in local_tensors(flat.tensors, plan)]
            Stager(arena, plan).start(sources, lambda _: False, lambda _: None, background=False)
            job = SaveJob(
                self.spec, Attempt(name, secrets.token_hex(6)), 0, (0,), state.world_size, state.step, state.epoch,
                state.timestamp, best_algorithm(), flat.common, flat.own,
            )  # fmt: skip
            write_checkpoint(job, plan.layout, arena.view, self.store)
        except AllranksError:
            raise
        except (OSError, TypeError) as error:
            raise CheckpointSaveError(
                str(error) if isinstance(error, TypeError) else reason_of(error), tier=self.store.tier,
                path=self.store.path_of(name), hint=hint_for(error, self.store.tier, self.spec.url, self.spec.options),
            ) from error  # fmt: skip
        return self.store.path_of(name)


class NVMeBackend(Backend):
    """A folder. Saves are always atomic; `use_atomic_save` is accepted for those who used to choose."""

    def __init__(self, base_path: str | Path, use_atomic_save: bool = True) -> None:
        super().__init__(StoreSpec(str(base_path)))
        self.base_path = Path(base_path)
        self.use_atomic_save = use_atomic_save

    @property
    def store(self) -> FileStore:
        """The folder as a store."""
        store = super().store
        assert isinstance(store, FileStore)
        return store

    def load(self, path: str, config: CheckpointLoadConfig | None = None) -> CheckpointState:
        """Loads a checkpoint, or a legacy `.pt` file by the rules of `config`."""
        whole = self.base_path / path
        if is_legacy(whole):
            return load_legacy(whole, config or CheckpointLoadConfig())
        return super().load(path, config)

    def exists(self, path: str) -> bool:
        """Whether a complete checkpoint, or a legacy file, of that name is there."""
        return super().exists(path) or is_legacy(self.base_path / path)

    def delete(self, path: str) -> None:
        """Deletes a checkpoint or a legacy file."""
        whole = self.base_path / path
        if is_legacy(whole):
            whole.unlink()
        else:
            super().delete(path)


class S3Backend(Backend):
    """A bucket of any object store (`bucket` may be a URL such as gs://name). Options go to obstore."""

    def __init__(
        self, bucket: str, prefix: str = "", region: str | None = None, connect_timeout: float = 10,
        read_timeout: float = 60, max_retries: int = 3, retry_mode: str = "adaptive",
        endpoint_url: str | None = None, options: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        base = bucket if "://" in bucket else f"s3://{bucket}"
        url = "/".join(part for part in (base.rstrip("/"), prefix.strip("/")) if part)
        given = {"endpoint": endpoint_url or "", "region": region or ""}
        limits = {"timeout_s": str(read_timeout), "max_retries": str(max_retries)}
        super().__init__(
            StoreSpec(url, {**{k: v for k, v in given.items() if v}, **limits, **dict(options or {})})
        )
        self.bucket = bucket
        self.prefix = prefix
