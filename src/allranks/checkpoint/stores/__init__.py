"""Where checkpoints lie: what every kind of storage offers, and how to open one by its address.

Torch-free. A store keeps checkpoints by name. A save writes files under an `Attempt`, which nobody sees, and
`commit`s them with the manifest: from that moment, and at once for everybody, the checkpoint exists.

A share that is not mounted is an empty folder: a restore would begin at step 1, and a save would fill the disk below, out
of sight once the share is back. Where a store lies is known from /etc/fstab, and from a note that the first save to it
leaves in the home folder of its user (`KnownMount`), for this machine alone: on others the same path may be a folder of the
root disk.
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
#: Of what is read at once (manifests and indexes), whatever the store claims.
MAX_JSON_BYTES = 256 << 20


@dataclass(frozen=True)
class Attempt:
    """One try to save a checkpoint. `token` is random and the same on every rank that takes part."""

    name: str
    token: str


@dataclass(frozen=True)
class StoreSpec:
    """An address that can be sent to another process. `options` are the store's own (endpoint, token …)."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict)


#: One place for checkpoints; what its methods do is written in FileStore.
Store: TypeAlias = "FileStore | KeyedStore"
DataReader: TypeAlias = "FileSource | BlobSource"  # one open data file


_SCHEMES = ("file", "peer", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "https", "http")
_STORES = "give a folder, file://, peer://HOST:PORT, s3://, gs:// or az://"


def open_store(spec: StoreSpec) -> Store:
    """Opens the store of an address: a path, file://, peer://HOST:PORT, or any object store URL."""
    scheme, colon, rest = spec.url.partition(":")
    if not spec.url or (colon and scheme in _SCHEMES and not rest.strip("/")):
        raise InputError(f"'{spec.url}' names no store", hint="is a variable empty? " + _STORES)
    if colon and scheme in _SCHEMES and not rest.startswith("//"):
        raise InputError(f"no store for '{spec.url}'", hint=f"two slashes: {scheme}://{rest.strip('/')}")
    if "://" not in spec.url or scheme == "file":
        from allranks.checkpoint.stores.file_store import FileStore

        return FileStore(Path(spec.url.removeprefix("file://")), spec)
    if scheme == "peer":
        from allranks.checkpoint.stores.peer_store import open_peers

        return open_peers(spec)
    if scheme in _SCHEMES:
        from allranks.checkpoint.stores.object_store import open_object_store

        return open_object_store(spec)
    raise InputError(f"no store for '{spec.url}'", hint=_STORES)


def checkpoint_name(step: int) -> str:
    return f"checkpoint_step_{step:08d}"


def split_address(address: str) -> tuple[str, str]:
    """(store, checkpoint name) of `STORE/NAME`; the name is empty when the address has no parent."""
    head, _, tail = address.rstrip("/").rpartition("/")
    if not head or head.endswith((":/", ":")):
        return address, ""
    return head, tail


def step_in_name(name: str) -> int | None:
    """The step in a checkpoint's name, or None: good for sorting before any manifest is read."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else None


#: Options of a store that may be shown. Keys and tokens may not.
_SHOWN = ("endpoint", "region")
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def reason_of(error: BaseException) -> str:
    """The short reason: an OSError's own words without number and path."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or os.strerror(error.errno)
    if isinstance(error, AllranksError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def was_answered(error: BaseException) -> bool:
    """Whether a store's server said no itself; a server that hands out credentials is none."""
    said = str(error.__cause__ or "")
    return "NoCredentials" not in str(error) and bool(re.search(r"status code: \d{3}|<Code>", said))


def store_arguments(url: str, options: Mapping[str, str] | None = None) -> str:
    """A store as an argument of `allranks checkpoint`, with the options that it needs and that are no secrets."""
    given = options or {}
    shown = [f"--option {shlex.quote(f'{key}={given[key]}')}" for key in _SHOWN if given.get(key)]
    return without_secrets(" ".join([quoted(url), *shown]))


def quoted(text: object) -> str:
    """For a shell, always in quotes."""
    return "'" + str(text).replace("'", "'\"'\"'") + "'"


def hint_for(error: BaseException, tier: str, url: str, options: Mapping[str, str] | None = None) -> str:
    """The command or setting that helps when the store at `url` failed."""
    if isinstance(error, AllranksError) and error.hint:
        return error.hint
    number = error.errno if isinstance(error, OSError) else None
    store = store_arguments(url, options)
    if tier == "S3":
        return _object_store_hint(str(error), number, store, options or {})
    if tier == "PEER":
        return "is `allranks run` alive on the other nodes, and ALLRANKS_TOKEN the same on all of them?"
    there = quoted(_existing(url))
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return f"how full it is: df -h {there}\nremove older ones: allranks checkpoint prune {store} --keep 1"
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return (
            f"it must be readable and writable for user {os.geteuid()}: ls -ld {there}\n"
            f'is it mounted read-only? look for ro: grep " $(df --output=target {there} | tail -1) " /proc/mounts'
        )
    if number == errno.ENOENT:
        return (
            f"is a disk not mounted? What is there: ls -ld {there}\ncreate the folder: mkdir -p {quoted(url)}"
        )
    if number == errno.ENODEV and isinstance(error, OSError):
        return (
            f"mount it: mount {quoted(str(error.strerror).removesuffix(' is not mounted'))}\n"
            f"if checkpoints are to lie on the disk below: another path, or allranks checkpoint set-aside {store}"
        )
    if number in {errno.ENOTDIR, errno.ELOOP, errno.EEXIST}:
        return f"it must be a folder, or a link to one: ls -ld {there}"
    return f"is the disk in order? Space: df -h {there}\nerrors of the kernel: dmesg | tail"


def _object_store_hint(text: str, number: int | None, store: str, options: Mapping[str, str]) -> str:
    keys = f"\n(with the job's keys in {_KEYS})" if "access_key_id" in options else ""
    if "NoCredentials" in text:
        return f"set {_KEYS}, or give the machine a role; then try: allranks checkpoint ls {store}"
    if "TimeTooSkewed" in text or "request time" in text.lower():
        return f"the clock of this machine is wrong: date -u; set it (chronyd, ntpd), then try: allranks checkpoint ls {store}{keys}"
    if "InvalidAccessKeyId" in text:
        return f"the access key is not known there: check AWS_ACCESS_KEY_ID and the endpoint; try it: allranks checkpoint ls {store}{keys}"
    if "SignatureDoesNotMatch" in text:
        return f"the secret key does not belong to the access key: check AWS_SECRET_ACCESS_KEY; try it: allranks checkpoint ls {store}{keys}"
    if "NotImplemented" in text:
        return (
            "this store cannot put an object on condition (If-None-Match), which keeps two savers of one checkpoint apart: "
            "use a newer version of it, or a store that can"
        )
    if "ExpiredToken" in text or "InvalidToken" in text:
        return (
            "new keys are needed: renew them in ~/.aws/credentials (the next save reads it again) or start the job with "
            f"new ones; try them: allranks checkpoint ls {store}"
        )
    if "region" in text or "AuthorizationHeaderMalformed" in text:
        return (
            "the bucket is in another region: set s3_region (or AWS_REGION) to the bucket's own: "
            "aws s3api get-bucket-location --bucket NAME"
        )
    if number == errno.EACCES:
        return (
            "the key must be right, and may s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket "
            f"(the IAM policy is in docs/tasks/checkpoints.md); try it: allranks checkpoint ls {store}{keys}"
        )
    if number == errno.ENOENT:
        return f"does the bucket exist? Try it: allranks checkpoint ls {store}{keys}"
    return f"is the store reachable? Try it: allranks checkpoint ls {store}{keys}"


def _existing(path: str) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    here = Path(path.removeprefix("file://")).absolute()
    while not os.path.lexists(here) and here != here.parent:
        here = here.parent
    return here


FSTAB, MOUNTS = Path("/etc/fstab"), Path("/proc/self/mounts")


class KnownMount:
    """The mount point of one folder of checkpoints, as it is expected to be."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        place = f"{os.uname().nodename}:{self.folder}"
        name = hashlib.sha256(os.fsencode(place)).hexdigest()[:16]
        self.note = Path(state) / "allranks" / "mounts" / f"{name}.json"

    def check(self) -> None:
        """Raises OSError (ENODEV) if what should be mounted is not: it may be a moment later."""
        noted = self._from_note()
        point = _nearest(self.folder, _points(FSTAB)) if noted is None else noted
        if point:
            with contextlib.suppress(OSError):  # an automounter mounts what is opened
                os.close(os.open(os.path.join(point, "."), os.O_RDONLY | os.O_DIRECTORY))
            mounted = _points(MOUNTS)
            if mounted and not mounted & {point, os.path.realpath(point)}:
                raise OSError(errno.ENODEV, f"{point} is not mounted", str(self.folder))

    def remember(self) -> None:
        """Notes where the folder lies now, once; nothing where that is the root of all, or no note can be written."""
        point = _nearest(Path(os.path.realpath(self.folder)), _points(MOUNTS))
        if point != (self._from_note() or ""):
            self._write(point)

    def forget(self) -> None:
        """The user wants to start from scratch, wherever the folder lies, also below a mount point of /etc/fstab."""
        if _nearest(self.folder, _points(FSTAB)):
            self._write("")
        else:
            with contextlib.suppress(OSError):
                self.note.unlink()

    def _write(self, point: str) -> None:
        with contextlib.suppress(OSError):
            write_atomically(self.note, json.dumps({"folder": str(self.folder), "mounted_at": point}))

    def _from_note(self) -> str | None:
        """The mount point of the last save, "" for none; None without a note."""
        try:
            return str(json.loads(self.note.read_text())["mounted_at"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _nearest(folder: Path, points: set[str]) -> str:
    """The mount point that a folder lies below; "" for the root of all."""
    above = (str(path) for path in (folder, *folder.parents))
    return next((path for path in above if path in points and path != "/"), "")


def _points(table: Path) -> set[str]:
    """The second field of each line, in which blanks are written as \\040."""
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    fields = [line.split() for line in lines if not line.lstrip().startswith("#")]
    written = {entry[1] for entry in fields if len(entry) > 1 and entry[1].startswith("/")}
    return {re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path) for path in written}
