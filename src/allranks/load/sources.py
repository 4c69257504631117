"""Finds the files to load, in a fixed order: folders, archives, compressed files and object stores. Enforces size limits.

A tar or zip file counts as a folder; gzip and zstd are decompressed. Objects of an object store (`s3://`, `gs://`, `az://`
through obstore, extra `s3`) are listed, then fetched in parallel. Nothing here parses a dump.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import zlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar

from allranks.errors import InputError, require
from allranks.model.diagnosis import FileNote
from allranks.model.trace import RankTrace


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load. The limits protect against hostile files, not against large jobs."""

    attempt: int | None = None  # None: the newest
    prefix: str | None = None  # file name up to the rank's digits; None: detected
    ranks: frozenset[int] | None = None  # only these ranks; None: all
    max_file_bytes: int = 128 << 20  # of one dump, after decompression
    max_box_bytes: int = 1 << 30  # of one black box
    max_files: int = 1_000_000
    read_limit_s: float = 60.0  # for one file, or one step of the search for files
    allow_nothing: bool = False  # return only notes, instead of InputError, if no file is readable
    number_unknown: bool = False  # assign a free number to files without a rank, instead of skipping them
    newest_calls: int = 0  # limit for the calls of all black boxes together, shared equally; 0: all
    progress: Callable[[int, int], None] | None = None  # called with (files done, all files)


@dataclass(frozen=True)
class LoadResult:
    """At most one trace per rank, in rank order, and a note on every file."""

    traces: list[RankTrace] = field(default_factory=list)
    files: list[FileNote] = field(default_factory=list)


class Unreadable(Exception):
    """An unreadable file. The message becomes its note. `skip`: it is not a dump; `unopened`: its content is unknown."""

    def __init__(
        self, note: str, *, kind: str = "unknown", skip: bool = False, unopened: bool = False
    ) -> None:
        super().__init__(note)
        self.kind = kind
        self.status: Literal["skipped", "unreadable", "damaged"] = "skipped" if skip else "damaged"
        if unopened:
            self.status = "unreadable"


_ARCHIVE = re.compile(r"(.+?(?:\.tar[^/]*|\.tgz|\.tzst|\.zip))/", re.I)
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
#: Errors of reading a damaged archive, in addition to those of its library.
_DAMAGED = (OSError, ValueError, EOFError, OverflowError, RecursionError)
MAX_DEPTH = 32
MAX_MEMBERS = 100_000  # of an archive
#: Compressed data beyond BOMB_BYTES that grows by more than this factor is refused.
BOMB_FACTOR, BOMB_BYTES = 300, 64 << 20
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class DumpSource:
    """One file to read. `data` are the bytes of an archive member or a remote object; None: on disk."""

    path: str  # as shown to the user
    location: str  # to open
    mtime_ns: int = 0
    size: int = 0
    data: bytes | None = None
    problem: str = ""  # why it cannot be read, if already known
    unopened: bool = False  # it could not be opened, so its content is unknown


def _why_absent(path: str) -> str:
    """The reason why a path cannot be found: a parent folder may belong to another user."""
    try:
        os.lstat(path)
    except PermissionError:
        return "permission denied; try as the user who started the job, or as root"
    except OSError:
        pass
    return "no such file or folder"


def find_sources(paths: list[str], options: LoadOptions) -> Iterator[DumpSource]:
    """Every file below the paths, each once, in the order of the paths and names."""
    seen: set[tuple[int, int]] = set()
    folders = [path for path in paths if "://" not in path and os.path.isdir(path)]
    count = 0
    for path in paths:
        if "://" in path:
            found: Iterator[DumpSource] = fetch_sources(path, options)
        elif os.path.isdir(path):
            found = _walk(path, alone=len(folders) == 1 and len(paths) == 1, seen=seen)
        elif os.path.lexists(path):
            found = filter(None, [_on_disk(path, path, partial(os.stat, path), set())])
        else:
            raise InputError(f"{path}: {_why_absent(path)}")
        for source in found:
            count += 1
            if count > options.max_files:
                raise InputError(f"more than {options.max_files} files under {', '.join(paths)}")
            yield source


def _walk(root: str, alone: bool, seen: set[tuple[int, int]]) -> Iterator[DumpSource]:
    """Files of a folder and its subfolders; links to folders are not followed."""
    pending = [(root, 0)]
    while pending:
        folder, depth = pending.pop()
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            yield DumpSource(_shown(root, folder, alone), folder, problem=str(error.strerror), unopened=True)
            continue
        folders = []
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append((entry.path, depth + 1))
            elif source := _on_disk(entry.path, _shown(root, entry.path, alone), entry.stat, seen):
                yield source
        if depth < MAX_DEPTH:
            pending.extend(reversed(folders))


def _on_disk(
    path: str, shown: str, read_stat: Callable[[], os.stat_result], seen: set[tuple[int, int]]
) -> DumpSource | None:
    """The source for one file; None if it was already found under another name."""
    try:
        info = read_stat()
    except OSError as error:
        return DumpSource(shown, path, problem=str(error.strerror), unopened=True)
    if not stat.S_ISREG(info.st_mode):
        # reading a named pipe, such as torch's, would block
        return DumpSource(shown, path, problem="not a regular file")
    if (info.st_dev, info.st_ino) in seen:
        return None
    seen.add((info.st_dev, info.st_ino))
    return DumpSource(shown, path, info.st_mtime_ns, info.st_size)


def _shown(root: str, path: str, alone: bool) -> str:
    """The path as shown to the user: relative to the folder if only one was given."""
    return path[len(root) :].lstrip("/") or "." if alone else path


def read_all(source: DumpSource, limit: int) -> bytes:
    """All bytes of a source; Unreadable if it exceeds the limit."""
    if source.data is not None:
        data = source.data
    else:
        with open(source.location, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise Unreadable(f"{size} bytes exceed the limit of {limit}")
            data = file.read(size + 1)
    if len(data) > limit:
        raise Unreadable(f"more than the limit of {limit} bytes")
    return data


def unwrap(data: bytes, limit: int) -> tuple[bytes, str]:
    """(decompressed bytes, problem). A truncated stream returns the bytes before the end."""
    for _ in range(3):  # at most 3 levels, such as .tar.gz.zst
        if data.startswith(GZIP):
            data, problem = _drain(_gunzip(data), len(data), limit, zlib.error)
        elif data.startswith(ZSTD):
            zstandard = require("zstandard", feature="reading zstd files", extra="zstd")
            reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(io.BytesIO(data))
            data, problem = _drain(_pieces(reader), len(data), limit, zstandard.ZstdError)
        else:
            return data, ""
        if problem:
            return data, problem
    return data, ""


def _gunzip(data: bytes) -> Iterator[bytes]:
    """The pieces of one or several concatenated gzip streams; zlib.error or EOFError at a damaged byte.

    The gzip module does not return the bytes before the damage.
    """
    while data.startswith(GZIP):
        stream = zlib.decompressobj(wbits=31)
        while not stream.eof:
            piece = stream.decompress(data, PIECE_BYTES)
            data = stream.unconsumed_tail
            if not piece and not data and not stream.eof:
                raise EOFError
            yield piece
        data = stream.unused_data


def _pieces(file: Any) -> Iterator[bytes]:
    return iter(partial(file.read, PIECE_BYTES), b"")


def _drain(
    stream: Iterator[bytes], compressed: int, limit: int, broken: type[Exception]
) -> tuple[bytes, str]:
    """Joins the pieces of a decompressor, which raises `broken` for damage; refuses a decompression bomb."""
    allowed = min(limit, max(BOMB_BYTES, compressed * BOMB_FACTOR))
    pieces, total = [], 0
    try:
        for piece in stream:
            pieces.append(piece)
            total += len(piece)
            if total > allowed:
                raise Unreadable(f"{compressed} bytes expand to more than {allowed}: refused")
    except (OSError, EOFError, broken) as error:
        return b"".join(pieces), f"compressed stream truncated or damaged ({type(error).__name__})"
    return b"".join(pieces), ""


def has_archive_name(path: str) -> bool:
    """Whether a file name looks like a tar or zip file."""
    return bool(archive_of(f"{path}/"))


def archive_of(member: str) -> str:
    """The archive in the path of a member; "" if there is none."""
    found = _ARCHIVE.match(member)
    return found[1] if found else ""


def open_archive(source: DumpSource, options: LoadOptions) -> tuple[Iterator[DumpSource] | None, str]:
    """(members of a tar or zip file, or None if it is neither; problem)."""
    data, problem = unwrap(read_all(source, options.max_box_bytes), options.max_box_bytes)
    if data.startswith(b"PK\x03\x04"):
        return _bounded(source, zip_members(source, data, options.max_file_bytes)), ""
    if is_tar(data):
        return _bounded(source, tar_members(source, data, options.max_file_bytes)), problem
    return None, problem


def _bounded(source: DumpSource, members: Iterator[DumpSource]) -> Iterator[DumpSource]:
    """The first MAX_MEMBERS members: a small archive may hold millions."""
    yield from islice(members, MAX_MEMBERS)
    if next(members, None) is not None:
        problem = f"more than {MAX_MEMBERS:,} files: the others are skipped; unpack it, and give the folder with the dumps"
        yield DumpSource(source.path, source.location, problem=problem)


def is_tar(data: bytes) -> bool:
    """Whether the bytes begin a tar archive (POSIX or GNU)."""
    return data[257:262] == b"ustar"


def tar_members(source: DumpSource, data: bytes, limit: int) -> Iterator[DumpSource]:
    """The regular files of a tar archive, each at most `limit` bytes."""
    import tarfile  # slow to import, rarely needed

    holes = min(limit, max(BOMB_BYTES, len(data) * BOMB_FACTOR))  # limit for all sparse files together
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            end, following = -1, 0
            for member in archive:
                following = archive.offset
                shown = f"{source.path}/{member.name}"
                if member.size < 0 or member.offset <= end:
                    raise tarfile.ReadError("leads back")  # a negative size would cause an endless loop
                end = member.offset
                if not member.isreg():
                    continue
                allowed = holes if member.issparse() else limit
                if member.size > allowed:
                    problem = f"{member.size} bytes exceed the limit of {allowed}"
                    yield DumpSource(shown, source.location, problem=problem)
                    continue
                holes -= member.size if member.issparse() else 0
                file = archive.extractfile(member)
                content = file.read() if file else b""
                yield DumpSource(shown, source.location, int(member.mtime * 1e9), member.size, content)
            if data[following : following + 512].strip(b"\0"):
                raise tarfile.ReadError("does not end")  # some versions skip an invalid header
    except (tarfile.TarError, *_DAMAGED) as error:
        problem = f"archive truncated or damaged ({type(error).__name__})"
        yield DumpSource(source.path, source.location, problem=problem)


def unpack(path: str, place: str, wanted: Container[str], folder: str) -> dict[str, str]:
    """Writes members of the archive at `place` below a folder; returns {path of the member: its file}.

    Members of one folder stay together. Only the last part of a name is used.
    """
    import tempfile

    found: dict[str, str] = {}
    try:
        members, _ = open_archive(DumpSource(path, place), LoadOptions())
    except (OSError, Unreadable):
        return found
    folders: dict[str, str] = {}
    for member in members or ():
        parent, name = os.path.split(member.path)
        if member.path not in wanted or member.data is None or name in ("", ".", ".."):
            continue
        with contextlib.suppress(OSError, ValueError):  # no space, or an invalid name
            if parent not in folders:
                folders[parent] = tempfile.mkdtemp(dir=folder)
            place = os.path.join(folders[parent], name)
            with open(place, "wb") as file:
                file.write(member.data)
            found[member.path] = place
    return found


def zip_members(source: DumpSource, data: bytes, limit: int) -> Iterator[DumpSource]:
    """The files of a zip archive, each at most `limit` bytes, with a limit for all together."""
    import time
    import zipfile  # slow to import, rarely needed

    room = max(BOMB_BYTES, len(data) * BOMB_FACTOR)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.infolist():
                if member.filename.endswith("/"):
                    continue
                shown, content, allowed = f"{source.path}/{member.filename}", b"", min(limit, room)
                if member.flag_bits & 1:
                    problem = "encrypted: give the files without a password"
                elif member.file_size > allowed:
                    problem = f"{member.file_size} bytes exceed the limit of {allowed}"
                else:
                    with archive.open(member) as file:
                        content, problem = _drain(_pieces(file), allowed, allowed, zipfile.BadZipFile)
                    room -= len(content)
                mtime_ns = int(time.mktime((*member.date_time, 0, 0, -1)) * 1e9)
                yield DumpSource(shown, source.location, mtime_ns, len(content), content, problem)
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, *_DAMAGED) as error:
        problem = f"archive truncated or damaged ({type(error).__name__})"
        yield DumpSource(source.path, source.location, problem=problem)


OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure")
PARALLEL = 16
T = TypeVar("T")


STORE_HINT = "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, and AWS_ENDPOINT_URL for a store other than Amazon's."


def fetch_sources(url: str, options: LoadOptions) -> Iterator[DumpSource]:
    """Every object below the URL, with its bytes. MissingExtra without obstore, InputError if the store fails."""
    scheme = url.partition("://")[0].lower()
    if scheme in ("http", "https"):
        yield _download(url, options)
        return
    if scheme not in OBSTORE_SCHEMES:
        raise InputError(f"{url}: supported are URLs with {', '.join(OBSTORE_SCHEMES)}, http or https")
    opened, problem = _attempt(lambda: _open_obstore(url))
    if opened is None:
        if "169.254.169.254" in problem:  # the metadata server of clouds
            problem = "no credentials found"
        raise InputError(f"{url}: {problem}", hint=STORE_HINT)
    listed, get = opened
    if not listed:
        raise InputError(f"{url}: no objects found")
    from concurrent.futures import ThreadPoolExecutor  # not needed for local files

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="allranks-fetch") as pool:
        yield from pool.map(lambda item: _fetch(url, item, get, options), listed)


def _download(url: str, options: LoadOptions) -> DumpSource:
    """Downloads the file at an http(s) address."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=options.read_limit_s) as answer:
            data: bytes = answer.read(options.max_box_bytes + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        answered = isinstance(error, urllib.error.HTTPError)
        hint = (
            "Give the address of one dump or archive."
            if answered
            else "Check host and port, and that this machine can reach it."
        )
        raise InputError(f"{url}: {getattr(why, 'strerror', None) or why}", hint=hint) from error
    if len(data) > options.max_box_bytes:
        return DumpSource(url, url, problem=f"more than the limit of {options.max_box_bytes} bytes")
    return DumpSource(url.partition("?")[0], url, size=len(data), data=data)


Listed = tuple[str, int, int]  # key, size, modification time in ns


def _fetch(url: str, item: Listed, get: Callable[[str], bytes], options: LoadOptions) -> DumpSource:
    key, size, mtime_ns = item
    shown = f"{url.partition('://')[0]}://{key}" if "://" not in key else key
    if size > options.max_file_bytes:
        problem = f"{size} bytes exceed the limit of {options.max_file_bytes}"
        return DumpSource(shown, shown, problem=problem)
    data, problem = _attempt(lambda: get(key))
    if data is None:
        return DumpSource(shown, shown, problem=f"cannot be fetched: {problem}", unopened=True)
    return DumpSource(shown, shown, mtime_ns, size, data)


def _open_obstore(url: str) -> tuple[list[Listed], Callable[[str], bytes]]:
    store_module = require("obstore.store", feature=f"reading {url}", extra="s3")
    obstore = require("obstore", feature=f"reading {url}", extra="s3")
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    options: dict[str, Any] = {"client_options": {"timeout": "60s", "connect_timeout": "10s"}}
    if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
        options["client_options"]["allow_http"] = True
    store = store_module.from_url(f"{scheme}://{bucket}", **options)
    prefix = prefix.rstrip("/")
    objects = [meta for page in obstore.list(store, prefix or None) for meta in page]
    if prefix and not objects:
        objects = [obstore.head(store, prefix)]  # an object, not a folder
    listed = [
        (f"{bucket}/{meta['path']}", int(meta["size"]), int(meta["last_modified"].timestamp() * 1e9))
        for meta in objects
    ]
    return sorted(listed), lambda key: bytes(obstore.get(store, key.partition("/")[2]).bytes())


def _attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """(result, or None on failure; the first line of the error)."""
    try:
        return call(), ""
    except Exception as error:  # the errors of obstore have no common base
        if isinstance(error, ImportError) or type(error).__module__.startswith("allranks"):
            raise
        return None, str(error).strip().split("\n")[0][:300] or type(error).__name__
