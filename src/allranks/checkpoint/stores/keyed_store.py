"""Checkpoints in anything that keeps bytes by key: object stores (tier S3) and peers' memory (tier PEER).

Torch-free. There is no rename, so file names carry the attempt, and the conditional put of the manifest is the
commit. A checkpoint may point into the data files of older ones: removing an old one keeps those files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from allranks.checkpoint.manifest import MANIFEST, Manifest, decode_manifest
from allranks.checkpoint.stores import Attempt, Pieces, StoreSpec
from allranks.errors import CheckpointValidationError

#: What a saver writes before the manifest. Nothing else under the prefix is ever tidied away.
_OURS = re.compile(r"[^/]+/rank-\d{5}-[0-9a-f]{12}\.(safetensors|json|failed)")
QUARANTINED, REASON = "manifest.quarantined.json", "quarantine_reason.json"
SET_ASIDE = "manifest.set-aside-"
READING = ".reading"
#: A reader that died without saying so protects its checkpoint no longer than this.
READING_LIMIT_S = 3600.0
#: Files of an attempt that never got a manifest are removed when older than this.
LEFT_BEHIND_S = 24 * 3600.0


class BlobStore(Protocol):
    """Bytes by key, as object stores have them. Keys are relative to the store's address."""

    def put(self, key: str, pieces: Pieces, length: int) -> None: ...
    def put_if(self, key: str, data: bytes, expected: str | None) -> None:
        """Puts if the key's version is still `expected` (None: if there is none); FileExistsError otherwise."""

    def get(self, key: str) -> tuple[bytes, str]:
        """(bytes, version); FileNotFoundError."""

    def get_range(self, key: str, start: int, view: memoryview) -> None: ...
    def size(self, key: str) -> int: ...
    def keys(self, prefix: str) -> list[tuple[str, float]]:
        """(key, time of last change) of every key that starts with `prefix`."""

    def delete(self, keys: list[str]) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False, repr=False)
class KeyedStore:
    """See `stores.Store` for the methods."""

    blobs: BlobStore
    spec: StoreSpec
    tier: str
    references: bool
    attempt_in_names: bool = True

    def path_of(self, name: str) -> str:
        return f"{self.spec.url.rstrip('/')}/{name}"

    def write(self, attempt: Attempt, file: str, pieces: Pieces, length: int) -> None:
        self.blobs.put(f"{attempt.name}/{file}", pieces, length)

    def staged(self, attempt: Attempt, file: str) -> bytes | None:
        try:
            return self.blobs.get(f"{attempt.name}/{file}")[0]
        except FileNotFoundError:
            return None

    def open_staged(self, attempt: Attempt, file: str) -> BlobSource:
        return BlobSource(self.blobs, f"{attempt.name}/{file}")

    def commit(self, attempt: Attempt, manifest: bytes) -> None:
        key = f"{attempt.name}/{MANIFEST}"
        try:
            older, version = self.blobs.get(key)
        except FileNotFoundError:
            self.blobs.put_if(key, manifest, None)
            return
        self.blobs.put_if(key, manifest, version)
        with contextlib.suppress(CheckpointValidationError):
            replaced = decode_manifest(older, key)
            if replaced.attempt != attempt.token:
                self._delete_unreferenced(attempt.name, keep=attempt.token)

    def abandon(self, attempt: Attempt) -> None:
        written = [key for key, _ in self.blobs.keys(f"{attempt.name}/")]
        self.blobs.delete([key for key in written if attempt.token in key.rsplit("/", 1)[-1]])

    def leave(self, attempt: Attempt) -> None:
        """Nothing is held."""

    def tidy(self) -> list[str]:
        """Files whose checkpoint has no manifest, old enough that no saver can still be at work on them."""
        listed = self.blobs.keys("")
        complete = {
            key.split("/")[0]
            for key, _ in listed
            if key.endswith((f"/{MANIFEST}", f"/{QUARANTINED}")) or f"/{SET_ASIDE}" in key
        }
        limit = _newest(listed) - LEFT_BEHIND_S
        referenced = self._referenced(complete)
        stale = [
            key
            for key, changed in listed
            if _OURS.fullmatch(key)
            and key.split("/")[0] not in complete
            and changed < limit
            and key not in referenced
        ]
        self.blobs.delete(stale)
        return stale

    def names(self) -> list[str]:
        suffix = f"/{MANIFEST}"
        return sorted(key.removesuffix(suffix) for key, _ in self.blobs.keys("") if key.endswith(suffix))

    def read(self, name: str, file: str) -> bytes:
        return self.blobs.get(_join(name, file))[0]

    def open(self, name: str, file: str) -> BlobSource:
        return BlobSource(self.blobs, _join(name, file))

    def remove(self, name: str) -> bool:
        marks = self.blobs.keys(f"{READING}/{name}/")
        limit = _newest(self.blobs.keys("")) - READING_LIMIT_S if marks else 0.0
        if any(changed > limit for _, changed in marks):  # readers that have not run out
            return False
        self.blobs.delete([f"{name}/{MANIFEST}"])
        self._delete_unreferenced(name, keep="")
        return True

    def quarantine(self, name: str, reason: str) -> str:
        try:
            manifest, _ = self.blobs.get(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            return self.path_of(name)  # another rank was first
        note = json.dumps({"reason": reason}).encode()
        self.blobs.put(f"{name}/{QUARANTINED}", [memoryview(manifest)], len(manifest))
        self.blobs.put(f"{name}/{REASON}", [memoryview(note)], len(note))
        self.blobs.delete([f"{name}/{MANIFEST}"])
        return f"{self.path_of(name)}/{QUARANTINED}"

    def quarantined(self) -> list[tuple[str, str]]:
        names = [key.split("/")[0] for key, _ in self.blobs.keys("") if key.endswith(f"/{QUARANTINED}")]
        return [(f"{self.path_of(name)}/{QUARANTINED}", self._reason(name)) for name in sorted(names)]

    def set_aside(self) -> list[str]:
        suffixes = (f"/{MANIFEST}", f"/{QUARANTINED}")
        moved = []
        for key in [key for key, _ in self.blobs.keys("") if key.endswith(suffixes)]:
            data, _ = self.blobs.get(key)
            target = f"{key.rsplit('/', 1)[0]}/{SET_ASIDE}{uuid.uuid4().hex[:12]}.json"
            self.blobs.put(target, [memoryview(data)], len(data))
            self.blobs.delete([key])
            moved.append(self.path_of(target))
        return moved

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        key = f"{READING}/{name}/{uuid.uuid4().hex}.json"
        note = json.dumps({"pid": os.getpid()}).encode()
        marked = False
        with contextlib.suppress(OSError):  # a reader without write permission still reads
            self.blobs.put(key, [memoryview(note)], len(note))
            marked = True
        try:
            yield
        finally:
            if marked:
                with contextlib.suppress(OSError):
                    self.blobs.delete([key])

    def close(self) -> None:
        self.blobs.close()

    def _reason(self, name: str) -> str:
        try:
            return str(json.loads(self.blobs.get(f"{name}/{REASON}")[0])["reason"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return "damaged"

    def _out_of_sight(self, keys: list[str]) -> set[str]:
        """Files of checkpoints in quarantine or set aside: they are kept whatever happens to their names."""
        manifests = [key for key in keys if key.endswith(f"/{QUARANTINED}") or f"/{SET_ASIDE}" in key]
        kept = {key for key in keys if key in manifests or key.endswith(f"/{REASON}")}
        for key in manifests:
            try:
                token = decode_manifest(self.blobs.get(key)[0], key).attempt
            except CheckpointValidationError:
                return set(keys)  # which of the files are its own is unknown
            kept |= {other for other in keys if token in other}
        return kept

    def _delete_unreferenced(self, name: str, keep: str) -> None:
        """Deletes the files of a checkpoint that no manifest points at, but those of the attempt `keep`."""
        others = {other for other in self.names() if other != name or keep}
        mine = [key for key, _ in self.blobs.keys(f"{name}/")]
        needed = self._referenced(others) | self._out_of_sight(mine)
        needed |= {key for key in mine if key.endswith(f"/{MANIFEST}") or (keep and keep in key)}
        self.blobs.delete([key for key in mine if key not in needed])

    def _referenced(self, names: set[str]) -> set[str]:
        """Data files that checkpoints of these names point at, in their own or in other folders."""
        found = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError, CheckpointValidationError):
                manifest: Manifest = decode_manifest(self.read(name, MANIFEST), name)
                found |= {_join(name, file) for part in manifest.parts for file in part.references}
        return found


class BlobSource:
    """One data object, read by ranges."""

    wide_reads = True

    def __init__(self, blobs: BlobStore, key: str) -> None:
        self.blobs = blobs
        self.key = key
        self.bytes = blobs.size(key)

    def read_into(self, start: int, view: memoryview) -> None:
        if start + len(view) > self.bytes:
            raise EOFError(f"{self.key} ends at byte {self.bytes}, {start + len(view)} wanted")
        self.blobs.get_range(self.key, start, view)

    def read_views(self, start: int, views: Sequence[memoryview]) -> None:
        for view in views:
            self.read_into(start, view)
            start += len(view)

    def read_cached(self, start: int, views: Sequence[memoryview]) -> bool:
        return False

    def close(self) -> None:
        """Nothing is held open."""


def _newest(listed: list[tuple[str, float]]) -> float:
    """The store's own time, or a little less: this machine's clock may be wrong by days."""
    return max((changed for _, changed in listed), default=0.0)


def _join(name: str, file: str) -> str:
    """A file's key; `../OTHER/FILE` leads into another checkpoint of the same store, and no further."""
    if not file.startswith("../"):
        return f"{name}/{file}"
    other = file.removeprefix("../")
    if ".." in other.split("/") or other.count("/") != 1:
        raise CheckpointValidationError(f"reference '{file}' leads out of the store", path=name)
    return other
