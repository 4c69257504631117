"""The disk and object-store tiers on their own: save, load, list and clean up states by name, in this process.

The manager uses their places, but saves through its helper process. One process saves here: for sharded states
of several ranks use the manager.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from allranks.checkpoint.checksum import best_algorithm
from allranks.checkpoint.config import CheckpointLoadConfig
from allranks.checkpoint.inspect import verify_checkpoint
from allranks.checkpoint.restore.into_state import load_state
from allranks.checkpoint.restore.torch_files import is_legacy, load_legacy
from allranks.checkpoint.save.plan import find_pieces, make_plan
from allranks.checkpoint.save.snapshot import ArenaPool, StateSnapshot, flatten_state
from allranks.checkpoint.save.writer import SaveJob, write_checkpoint
from allranks.checkpoint.state import CheckpointState
from allranks.checkpoint.stores import Attempt, Store, StoreSpec, hint_for, open_store, reason_of
from allranks.checkpoint.stores.file_store import FileStore
from allranks.checkpoint.stores.listing import decide, has_manifest, list_checkpoints, list_verified, remove
from allranks.errors import CheckpointSaveError


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
        store, name = self.store, self._name(path)
        try:
            flat = flatten_state(state, 0)
            plan = make_plan("", find_pieces(flat.tensors), None, True)
            snapshot = StateSnapshot.copied(state, flat, plan, ArenaPool())
            job = SaveJob(
                self.spec,
                Attempt(name, secrets.token_hex(6)),
                rank=0,
                ranks=(0,),
                world_size=state.world_size,
                step=state.step,
                epoch=state.epoch,
                timestamp=state.timestamp,
                algorithm=best_algorithm(),
                common=flat.common,
                own=flat.own,
            )
            write_checkpoint(job, plan.layout, snapshot.arena.view, store)
        except (OSError, TypeError) as error:
            reason = str(error) if isinstance(error, TypeError) else reason_of(error)
            hint = hint_for(error, store.tier, self.spec.url, self.spec.options)
            raise CheckpointSaveError(reason, tier=store.tier, path=store.path_of(name), hint=hint) from error
        return store.path_of(name)

    def save_async(self, state: CheckpointState, path: str) -> Future[str]:
        """Copies now, writes in a thread; the Future raises CheckpointSaveError when it fails."""
        saver = ThreadPoolExecutor(1, "allranks-checkpoint-save")
        future = saver.submit(self.save, state.cpu_copy(), path)
        saver.shutdown(wait=False)
        return future

    def load(self, path: str, config: CheckpointLoadConfig | None = None) -> CheckpointState:
        """Loads and verifies one checkpoint; whole CPU tensors."""
        name = self._name(path)
        self.settle(self.store.path_of(name))
        return load_state(self.store, name, 0)

    def exists(self, path: str) -> bool:
        """Whether a complete checkpoint of that name is there."""
        name = self._name(path)
        self.settle(self.store.path_of(name))
        return has_manifest(self.store, name)

    def list_checkpoints(self, prefix: str = "") -> list[str]:
        """The names of all complete checkpoints, oldest step first."""
        found = list_checkpoints(self.store)
        return [one.name for one in found if not one.problem and one.name.startswith(prefix)]

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
        found = list_verified(store, lambda name: not verify_checkpoint(store, name).problems)
        return remove(store, decide(found, max(1, keep_last)))[0]

    def _name(self, path: str) -> str:
        base = self.store.path_of("").rstrip("/")
        return str(path).removeprefix(base).strip("/")


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
        self,
        bucket: str,
        prefix: str = "",
        region: str | None = None,
        connect_timeout: float = 10,
        read_timeout: float = 60,
        max_retries: int = 3,
        retry_mode: str = "adaptive",
        endpoint_url: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        base = bucket if "://" in bucket else f"s3://{bucket}"
        url = "/".join(part for part in (base.rstrip("/"), prefix.strip("/")) if part)
        given = {"endpoint": endpoint_url or "", "region": region or ""}
        limits = {"timeout_s": str(read_timeout), "max_retries": str(max_retries)}
        super().__init__(
            StoreSpec(url, {**{k: v for k, v in given.items() if v}, **limits, **dict(options or {})})
        )
        self.bucket = bucket
        self.prefix = prefix
