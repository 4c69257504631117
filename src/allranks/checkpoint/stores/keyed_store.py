"""Checkpoints in key-value storage: object stores (tier S3) and the memory of peers (tier PEER). No torch.

There is no rename, so file names contain the attempt, and a conditional put of the manifest is the commit.

Lists of objects may be stale. They are checked against the pointer file (`listing.py`), and before a file is deleted,
every manifest that could name it is requested by its key.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from allranks.checkpoint.manifest import MANIFEST, decode_manifest
from allranks.checkpoint.stores import Attempt, Pieces, StoreSpec
from allranks.checkpoint.stores.listing import POINTER, check_list, decode, encode
from allranks.errors import CheckpointValidationError

if TYPE_CHECKING:
    from allranks.checkpoint.stores.object_store import ObjectBlobs
    from allranks.checkpoint.stores.peer_store import PeerBlobs

#: Files that a save writes before the manifest. `tidy` removes no others.
_OURS = re.compile(r"([^/]+)/rank-\d{5}-([0-9a-f]{12})\.(?:safetensors|json|failed)")
QUARANTINED, REASON = "manifest.quarantined.json", "quarantine_reason.json"
SET_ASIDE = "manifest.set-aside-"
READING = ".reading"
READING_LIMIT_S = 3600.0  # how long a reader that died protects its checkpoint
LEFT_BEHIND_S = 24 * 3600.0  # age at which files without a manifest are removed


#: Bytes by key; keys are relative to the store's address.
BlobStore: TypeAlias = "ObjectBlobs | PeerBlobs"


@dataclass(eq=False, repr=False)
class KeyedStore:
    """FileStore documents the methods."""

    blobs: BlobStore
    spec: StoreSpec
    pointer: bool = False  # keep a pointer file, because lists may be stale
    attempt_in_names: bool = True

    @property
    def tier(self) -> str:
        return self.spec.tier

    def path_of(self, name: str) -> str:
        return f"{self.spec.url.rstrip('/')}/{name}"

    def write(self, attempt: Attempt, file: str, pieces: Pieces, length: int) -> None:
        self.blobs.put(f"{attempt.name}/{file}", pieces, length)

    def staged(self, attempt: Attempt, file: str) -> bytes | None:
        try:
            return self.blobs.get(f"{attempt.name}/{file}")[0]
        except FileNotFoundError:
            return None

    def commit(self, attempt: Attempt, manifest: bytes) -> None:
        key, replaced, version = f"{attempt.name}/{MANIFEST}", "", None
        with contextlib.suppress(FileNotFoundError):
            older, version = self.blobs.get(key)
            replaced = _attempt_of(older, key)
        try:
            self.blobs.put_if(key, manifest, version)
        except FileExistsError:
            if not self._committed(attempt):  # else an earlier put succeeded and only its response was lost
                raise
        with contextlib.suppress(OSError):  # the checkpoint is committed; a later `tidy` removes older files
            self._point(add=attempt.name)
            if replaced not in ("", attempt.token):
                self.blobs.delete(_files_of(attempt.name, replaced, self._listed()))

    def abandon(self, attempt: Attempt, files: Sequence[str] = ()) -> None:
        """Removes the files of the attempt, or only `files`."""
        if self._committed(attempt):  # only the response was lost
            return
        if files:
            self.blobs.delete([f"{attempt.name}/{file}" for file in files])
        else:
            written = [key for key, _ in self.blobs.keys(f"{attempt.name}/")]
            self.blobs.delete([key for key in written if attempt.token in key.rsplit("/", 1)[-1]])

    def leave(self, attempt: Attempt) -> None:
        """Nothing to release."""

    def tidy(self) -> list[str]:
        """Removes files without a manifest that are too old to belong to a running save."""
        listed = self._listed()
        complete = {key.split("/")[0] for key in listed if _is_manifest(key)}
        limit = max(listed.values(), default=0.0) - LEFT_BEHIND_S
        stale = {
            key: found
            for key, changed in listed.items()
            if changed < limit and (found := _OURS.fullmatch(key)) and found[1] not in complete
        }
        self._check_list(
            f"{name}/{file}"
            for name, token in {(found[1], found[2]) for found in stale.values()}
            for file in (MANIFEST, QUARANTINED, _aside(token))
        )
        self.blobs.delete(list(stale))
        self._point(drop={name for name in self._known() if f"{name}/{MANIFEST}" not in listed})
        return list(stale)

    def names(self) -> list[str]:
        listed = [key.removesuffix(f"/{MANIFEST}") for key in self._listed() if key.endswith(f"/{MANIFEST}")]
        return sorted({*listed, *self._known()})

    def read(self, name: str, file: str) -> bytes:
        return self.blobs.get(f"{name}/{file}")[0]

    def open(self, name: str, file: str) -> BlobSource:
        return BlobSource(self.blobs, f"{name}/{file}")

    def remove(self, name: str) -> bool:
        listed = self._listed()
        limit = max(listed.values(), default=0.0) - READING_LIMIT_S
        if any(changed > limit for key, changed in listed.items() if key.startswith(f"{READING}/{name}/")):
            return False
        token = _attempt_of(self.read(name, MANIFEST), name)
        self._point(drop={name})
        self.blobs.delete([f"{name}/{MANIFEST}"])
        self.blobs.delete(_files_of(name, token, listed))
        return True

    def quarantine(self, name: str, reason: str) -> str:
        try:
            manifest, _ = self.blobs.get(f"{name}/{MANIFEST}")
        except FileNotFoundError:
            return self.path_of(name)  # another rank was faster
        note = json.dumps({"reason": reason}).encode()
        self._point(drop={name})
        self.blobs.put(f"{name}/{QUARANTINED}", [memoryview(manifest)], len(manifest))
        self.blobs.put(f"{name}/{REASON}", [memoryview(note)], len(note))
        self.blobs.delete([f"{name}/{MANIFEST}"])
        return f"{self.path_of(name)}/{QUARANTINED}"

    def quarantined(self) -> list[tuple[str, str]]:
        names = [key.split("/")[0] for key, _ in self.blobs.keys("") if key.endswith(f"/{QUARANTINED}")]
        return [(f"{self.path_of(name)}/{QUARANTINED}", self._reason(name)) for name in sorted(names)]

    def set_aside(self) -> list[str]:
        suffixes = (f"/{MANIFEST}", f"/{QUARANTINED}")
        moved, listed = [], self._listed()
        self._point(drop=set(self._known()))
        for key in [key for key in listed if key.endswith(suffixes)]:
            data, _ = self.blobs.get(key)
            target = f"{key.rsplit('/', 1)[0]}/{_aside(_attempt_of(data, key) or uuid.uuid4().hex[:12])}"
            self.blobs.put(target, [memoryview(data)], len(data))
            self.blobs.delete([key])
            moved.append(self.path_of(target))
        return moved

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[None]:
        key = f"{READING}/{name}/{uuid.uuid4().hex}.json"
        note = json.dumps({"pid": os.getpid()}).encode()
        marked = False
        with contextlib.suppress(OSError):  # a reader may lack write permission
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

    def _committed(self, attempt: Attempt) -> bool:
        try:
            return _attempt_of(self.read(attempt.name, MANIFEST), attempt.name) == attempt.token
        except FileNotFoundError:
            return False

    def _listed(self) -> dict[str, float]:
        """Key → modification time of all objects; OSError if the list misses an existing manifest."""
        listed = dict(self.blobs.keys(""))
        if not self.pointer:
            return listed
        for last in (False, True):
            suspects = {f"{found[1]}/{MANIFEST}" for found in map(_OURS.fullmatch, listed) if found}
            suspects |= {f"{name}/{MANIFEST}" for name in self._known()}
            try:
                self._check_list(suspects - listed.keys())
                break
            except OSError:
                if last:
                    raise
                listed = dict(self.blobs.keys(""))  # a saver may have committed since
        return listed

    def _check_list(self, suspects: Iterable[str]) -> None:
        check_list("the store's list of objects", suspects, self._is_there)

    def _is_there(self, key: str) -> bool:
        try:
            self.blobs.size(key)
        except FileNotFoundError:
            return False
        return True

    def _known(self) -> list[str]:
        """The names in the pointer file; `tidy` drops names without a manifest."""
        try:
            return decode(self.blobs.get(POINTER)[0]) if self.pointer else []
        except FileNotFoundError:
            return []

    def _point(self, add: str = "", drop: Set[str] = frozenset()) -> None:
        """Updates the pointer file: after a name is added, and before it is removed."""
        if self.pointer and (add or drop):
            data = encode(self._known(), add, drop)
            self.blobs.put(POINTER, [memoryview(data)], len(data))


class BlobSource:
    """One data object, read in ranges."""

    wide_reads = True

    def __init__(self, blobs: BlobStore, key: str) -> None:
        self.blobs = blobs
        self.key = key
        self.bytes = blobs.size(key)

    def read_views(self, start: int, views: Sequence[memoryview]) -> None:
        end = start + sum(map(len, views))
        if end > self.bytes:
            raise EOFError(f"{self.key} ends at byte {self.bytes}, expected {end}")
        self.blobs.get_range(self.key, start, views)

    def close(self) -> None:
        """Nothing to close."""


def _aside(token: str) -> str:
    """The manifest's file name after an attempt was set aside."""
    return f"{SET_ASIDE}{token}.json"


def _is_manifest(key: str) -> bool:
    """Whether a key is a manifest, also a quarantined one or one that was set aside."""
    return key.endswith((f"/{MANIFEST}", f"/{QUARANTINED}")) or f"/{SET_ASIDE}" in key


def _attempt_of(manifest: bytes, path: str) -> str:
    """The attempt in a manifest; "" if it cannot be read."""
    try:
        return decode_manifest(manifest, path).attempt
    except CheckpointValidationError:
        return ""


def _files_of(name: str, token: str, listed: Iterable[str]) -> list[str]:
    """The files of one attempt."""
    return [key for key in listed if (found := _OURS.fullmatch(key)) and found.groups() == (name, token)]
