"""Checkpoint stores: how to open one by its address, hints for their errors, and the check for a missing mount. No torch.

A store keeps checkpoints by name. A save writes files under an `Attempt`, which readers do not see, and commits them with
the manifest: from then on the checkpoint exists for all readers.

An unmounted share looks like an empty folder: a restore would start from scratch, and a save would fill the disk below.
`KnownMount` therefore knows the expected mount point, from /etc/fstab or from a note that the first save writes to the
user's home folder. The note holds for this machine only: elsewhere the path may be on the root disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from allranks.errors import AllranksError, InputError
from allranks.model.files import write_atomically
from allranks.model.parsing import without_secrets

if TYPE_CHECKING:
    from allranks.checkpoint.stores.file_store import FileSource, FileStore
    from allranks.checkpoint.stores.keyed_store import BlobSource, KeyedStore

Pieces = Iterable[memoryview]
MAX_JSON_BYTES = 256 << 20  # limit for manifests and indexes, which are read at once


@dataclass(frozen=True)
class Attempt:
    """One attempt to save a checkpoint. `token` is random and the same on all ranks that take part."""

    name: str
    token: str


@dataclass(frozen=True)
class StoreSpec:
    """The address of a store, which can be sent to another process. `options` belong to the store (endpoint, token …)."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def tier(self) -> str:
        """The tier that the address belongs to."""
        scheme, separator, _ = self.url.partition("://")
        if not separator or scheme == "file":
            return "NVME"
        return "PEER" if scheme == "peer" else "S3"


#: FileStore documents the methods.
Store: TypeAlias = "FileStore | KeyedStore"
DataReader: TypeAlias = "FileSource | BlobSource"  # one open data file


_SCHEMES = ("file", "peer", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "https", "http")
_STORES = "use a folder, file://, peer://HOST:PORT, s3://, gs:// or az://"


def open_store(spec: StoreSpec) -> Store:
    """Opens a store: a path, file://, peer://HOST:PORT, or the URL of an object store."""
    scheme, colon, rest = spec.url.partition(":")
    if not spec.url or (colon and scheme in _SCHEMES and not rest.strip("/")):
        raise InputError(f"'{spec.url}' names no store", hint="is a variable empty? " + _STORES)
    if colon and scheme in _SCHEMES and not rest.startswith("//"):
        raise InputError(f"'{spec.url}' is not a store", hint=f"two slashes: {scheme}://{rest.strip('/')}")
    if "://" not in spec.url or scheme == "file":
        from allranks.checkpoint.stores.file_store import FileStore

        return FileStore(Path(spec.url.removeprefix("file://")), spec)
    if scheme == "peer":
        from allranks.checkpoint.stores.peer_store import open_peers

        return open_peers(spec)
    if scheme in _SCHEMES:
        from allranks.checkpoint.stores.object_store import open_object_store

        return open_object_store(spec)
    raise InputError(f"'{spec.url}' is not a store", hint=_STORES)


def checkpoint_name(step: int) -> str:
    return f"checkpoint_step_{step:08d}"


def split_address(address: str) -> tuple[str, str]:
    """Splits `STORE/NAME` into (store, checkpoint name); the name is "" if the address has no parent."""
    head, _, tail = address.rstrip("/").rpartition("/")
    if not head or head.endswith((":/", ":")):
        return address, ""
    return head, tail


def step_in_name(name: str) -> int | None:
    """The step in a checkpoint's name, or None."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else None


_SHOWN = ("endpoint", "region")  # options that are not secret
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def reason_of(error: BaseException) -> str:
    """The short reason of an error: for an OSError, its text without number and path."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or os.strerror(error.errno)
    if isinstance(error, AllranksError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def was_answered(error: BaseException) -> bool:
    """Whether the store's server itself refused the request, and not a server of cloud credentials."""
    answer = str(error.__cause__ or "")
    return "NoCredentials" not in str(error) and bool(re.search(r"status code: \d{3}|<Code>", answer))


def store_arguments(url: str, options: Mapping[str, str] | None = None) -> str:
    """A store as an argument of `allranks checkpoint`, with its options that are not secret."""
    given = options or {}
    shown = [f"--option {shlex.quote(f'{key}={given[key]}')}" for key in _SHOWN if given.get(key)]
    return without_secrets(" ".join([quoted(url), *shown]))


def quoted(text: object) -> str:
    """Shell quoting, always with quotes."""
    return "'" + str(text).replace("'", "'\"'\"'") + "'"


def hint_for(error: BaseException, spec: StoreSpec) -> str:
    """The command or setting that helps after an error of a store."""
    if isinstance(error, AllranksError) and error.hint:
        return error.hint
    number = error.errno if isinstance(error, OSError) else None
    store = store_arguments(spec.url, spec.options)
    if spec.tier == "S3":
        return _object_store_hint(str(error), number, store, spec.options)
    if spec.tier == "PEER":
        return "check that `allranks run` is running on the other nodes, with the same ALLRANKS_TOKEN on all of them"
    there = quoted(_existing(spec.url))
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return (
            f"free space: df -h {there}\nremove older checkpoints: allranks checkpoint prune {store} --keep 1"
        )
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return (
            f"it must be readable and writable for user {os.geteuid()}: ls -ld {there}\n"
            f'show how it is mounted (ro: read-only): grep " $(df --output=target {there} | tail -1) " /proc/mounts'
        )
    if number == errno.ENOENT:
        return f"is a disk missing? check: ls -ld {there}\ncreate the folder: mkdir -p {quoted(spec.url)}"
    if number == errno.ENODEV and isinstance(error, OSError):
        return (
            f"mount it: mount {quoted(str(error.strerror).removesuffix(' is not mounted'))}\n"
            f"to save on the disk below instead: use another path, or allranks checkpoint set-aside {store}"
        )
    if number in {errno.ENOTDIR, errno.ELOOP, errno.EEXIST}:
        return f"it must be a folder, or a link to one: ls -ld {there}"
    return f"check the disk: df -h {there}\nkernel errors: dmesg | tail"


def _object_store_hint(text: str, number: int | None, store: str, options: Mapping[str, str]) -> str:
    keys = f"\n(with the job's keys in {_KEYS})" if "access_key_id" in options else ""
    if "NoCredentials" in text:
        return f"set {_KEYS}, or give the machine a role; then test: allranks checkpoint ls {store}"
    if "TimeTooSkewed" in text or "request time" in text.lower():
        return f"the clock of this machine is wrong: date -u; set it (chronyd, ntpd), then test: allranks checkpoint ls {store}{keys}"
    if "InvalidAccessKeyId" in text:
        return f"the store does not know the access key: check AWS_ACCESS_KEY_ID and the endpoint; test: allranks checkpoint ls {store}{keys}"
    if "SignatureDoesNotMatch" in text:
        return f"the secret key does not match the access key: check AWS_SECRET_ACCESS_KEY; test: allranks checkpoint ls {store}{keys}"
    if "NotImplemented" in text:
        return (
            "this store does not support conditional writes (If-None-Match), which prevent two savers from overwriting each "
            "other: use a newer version of it, or another store"
        )
    if "ExpiredToken" in text or "InvalidToken" in text:
        return (
            "the keys have expired: renew them in ~/.aws/credentials (the next save reads it again) or start the job with "
            f"new ones; test: allranks checkpoint ls {store}"
        )
    if "region" in text or "AuthorizationHeaderMalformed" in text:
        return (
            "the bucket is in another region: set s3_region (or AWS_REGION) to the region of the bucket: "
            "aws s3api get-bucket-location --bucket NAME"
        )
    if number == errno.EACCES:
        return (
            "check the keys, and that they allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket "
            f"(IAM policy: docs/tasks/checkpoints.md); test: allranks checkpoint ls {store}{keys}"
        )
    if number == errno.ENOENT:
        return f"does the bucket exist? Test: allranks checkpoint ls {store}{keys}"
    return f"is the store reachable? Test: allranks checkpoint ls {store}{keys}"


def _existing(path: str) -> Path:
    """The path itself, or its nearest existing parent."""
    here = Path(path.removeprefix("file://")).absolute()
    while not os.path.lexists(here) and here != here.parent:
        here = here.parent
    return here


FSTAB, MOUNTS = Path("/etc/fstab"), Path("/proc/self/mounts")


class KnownMount:
    """The expected mount point of one folder of checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        place = f"{os.uname().nodename}:{self.folder}"
        name = hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
        self.note = Path(state) / "allranks" / "mounts" / f"{name}.json"

    def check(self) -> None:
        """Raises OSError (ENODEV) if the expected mount is missing; it may appear later."""
        noted = self._from_note()
        point = _nearest(self.folder, _points(FSTAB)) if noted is None else noted
        if point:
            with contextlib.suppress(OSError):  # opening it triggers an automounter
                os.close(os.open(os.path.join(point, "."), os.O_RDONLY | os.O_DIRECTORY))
            mounted = _points(MOUNTS)
            if mounted and not mounted & {point, os.path.realpath(point)}:
                raise OSError(errno.ENODEV, f"{point} is not mounted", str(self.folder))

    def remember(self) -> None:
        """Writes the current mount point to the note if it has changed; does nothing if that fails."""
        point = _nearest(Path(os.path.realpath(self.folder)), _points(MOUNTS))
        if point != (self._from_note() or ""):
            self._write(point)

    def forget(self) -> None:
        """Accepts the folder wherever it is: the user starts from scratch. Overrides /etc/fstab."""
        if _nearest(self.folder, _points(FSTAB)):
            self._write("")
        else:
            with contextlib.suppress(OSError):
                self.note.unlink()

    def _write(self, point: str) -> None:
        with contextlib.suppress(OSError):
            write_atomically(self.note, json.dumps({"folder": str(self.folder), "mounted_at": point}))

    def _from_note(self) -> str | None:
        """The noted mount point, "" for the root filesystem; None without a note."""
        try:
            return str(json.loads(self.note.read_text())["mounted_at"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _nearest(folder: Path, points: set[str]) -> str:
    """The mount point above a folder; "" for the root filesystem."""
    above = (str(path) for path in (folder, *folder.parents))
    return next((path for path in above if path in points and path != "/"), "")


def _points(table: Path) -> set[str]:
    """The mount points in a table: the second field of each line, with blanks escaped as \\040."""
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    fields = [line.split() for line in lines if not line.lstrip().startswith("#")]
    written = {entry[1] for entry in fields if len(entry) > 1 and entry[1].startswith("/")}
    return {re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path) for path in written}
