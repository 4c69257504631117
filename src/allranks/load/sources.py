"""Paths and URLs → the files to read, in a fixed order, with archives opened and limits kept; the options and the result of a
load.

Folders are walked; a tar or zip file counts as a folder; gzip and zstd are unwrapped. Objects of an object store (`s3://`, `gs://`,
`az://` through obstore, extra `s3`) are listed, then fetched in parallel.
Nothing here looks into a dump, and only this file talks to a network.
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
from allranks.model.trace import Raw as Raw


@dataclass(frozen=True)
class LoadOptions:
    """How to load. Limits protect against hostile or runaway files, not against large jobs."""

    attempt: int | None = None  # None: the newest
    prefix: str | None = None  # file name up to the rank's digits; None: found out
    ranks: frozenset[int] | None = None  # only these ranks; None: all
    max_file_bytes: int = 128 << 20  # of one dump, after decompression
    max_box_bytes: int = 1 << 30  # of one black box
    max_files: int = 1_000_000
    read_limit_s: float = 60.0  # one file, or one step of looking for files, may take so long
    allow_nothing: bool = False  # return notes alone instead of raising InputError when nothing was readable
    number_unknown: bool = False  # give files whose rank is not known a free number instead of skipping them
    newest_calls: int = 0  # of black boxes with more calls in all read only so many, as many of each; 0: all
    progress: Callable[[int, int], None] | None = None  # called with (files done, files in all)


@dataclass(frozen=True)
class LoadResult:
    """Everything that was readable, and a note on every file, readable or not.

    At most one trace per rank, in rank order.
    """

    traces: list[RankTrace] = field(default_factory=list)
    files: list[FileNote] = field(default_factory=list)


class Unreadable(Exception):
    """A file that gives nothing. The message becomes its note; `skip`: it is not a dump; `unopened`: its content is unknown."""

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
#: What reading a damaged archive may raise besides its library's own errors.
_DAMAGED = (OSError, ValueError, EOFError, OverflowError, RecursionError)
MAX_DEPTH = 32
MAX_MEMBERS = 100_000  # of an archive
#: Compressed data may grow by this factor before we call it a bomb, once it is beyond BOMB_BYTES.
BOMB_FACTOR, BOMB_BYTES = 300, 64 << 20
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class DumpSource:
    """One file to read. `data` holds the bytes of an archive's member or of a remote object; None: on disk."""

    path: str  # what the user is shown
    location: str  # where to open it
    mtime_ns: int = 0
    size: int = 0
    data: bytes | None = None
    problem: str = ""  # why it cannot be read, when that is known already
    unopened: bool = False  # that problem says nothing of what it holds


def _why_absent(path: str) -> str:
    """A folder above it may be another user's, as that of a job's black boxes is."""
    try:
        os.lstat(path)
    except PermissionError:
        return "permission denied; try as the user whose job it is, or as root"
    except OSError:
        pass
    return "no such file or folder"


def find_sources(paths: list[str], options: LoadOptions) -> Iterator[DumpSource]:
    """Every file behind the paths, each once, in the order of the paths and then of the names."""
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
    """Files of a folder, deepest names last; links to folders are not followed, so that no walk is endless."""
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
    path: str, shown: str, look: Callable[[], os.stat_result], seen: set[tuple[int, int]]
) -> DumpSource | None:
    """The source of one file; None when it was seen by another name."""
    try:
        info = look()
    except OSError as error:
        return DumpSource(shown, path, problem=str(error.strerror), unopened=True)
    if not stat.S_ISREG(info.st_mode):
        # Reading a named pipe (torch makes one per rank) would wait for a writer.
        return DumpSource(shown, path, problem="not a regular file")
    if (info.st_dev, info.st_ino) in seen:
        return None
    seen.add((info.st_dev, info.st_ino))
    return DumpSource(shown, path, info.st_mtime_ns, info.st_size)


def _shown(root: str, path: str, alone: bool) -> str:
    """The path as the user is shown it: as seen from the only folder that was given. A path begins with its root."""
    return path[len(root) :].lstrip("/") or "." if alone else path


def read_all(source: DumpSource, limit: int) -> bytes:
    """All bytes of a source; refuses what is beyond the limit before reading it."""
    if source.data is not None:
        data = source.data
    else:
        with open(source.location, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise Unreadable(f"{size} bytes are beyond the limit of {limit}")
            data = file.read(size + 1)
    if len(data) > limit:
        raise Unreadable(f"more than the limit of {limit} bytes")
    return data


def unwrap(data: bytes, limit: int) -> tuple[bytes, str]:
    """(decompressed bytes, problem). A stream that is cut short gives what it has."""
    for _ in range(3):  # .tar.gz.zst has been seen: at most 3 levels
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
    """The pieces of a gzip stream, or of several behind one another, up to where it breaks, which the standard reader does not give.
    Raises zlib.error or EOFError there."""
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
    """Takes the pieces of a decompressor, which raises `broken`, and stops at a bomb."""
    allowed = min(limit, max(BOMB_BYTES, compressed * BOMB_FACTOR))
    pieces, total = [], 0
    try:
        for piece in stream:
            pieces.append(piece)
            total += len(piece)
            if total > allowed:
                raise Unreadable(f"{compressed} bytes expand beyond {allowed}: refused")
    except (OSError, EOFError, broken) as error:
        return b"".join(pieces), f"compressed stream cut short or damaged ({type(error).__name__})"
    return b"".join(pieces), ""


def has_archive_name(path: str) -> bool:
    """Whether a file is called as tar and zip files are."""
    return bool(archive_of(f"{path}/"))


def archive_of(member: str) -> str:
    """The archive that a file is in, by the path that its member is shown with; "" when it is in none."""
    found = _ARCHIVE.match(member)
    return found[1] if found else ""


def open_archive(source: DumpSource, options: LoadOptions) -> tuple[Iterator[DumpSource] | None, str]:
    """(the members of a tar file, compressed or not, or of a zip file; None when it is none, what is wrong with it)."""
    data, problem = unwrap(read_all(source, options.max_box_bytes), options.max_box_bytes)
    if data.startswith(b"PK\x03\x04"):
        return _bounded(source, zip_members(source, data, options.max_file_bytes)), ""
    if is_tar(data):
        return _bounded(source, tar_members(source, data, options.max_file_bytes)), problem
    return None, problem


def _bounded(source: DumpSource, members: Iterator[DumpSource]) -> Iterator[DumpSource]:
    """At most MAX_MEMBERS of them: an archive that is small on disk may hold millions."""
    yield from islice(members, MAX_MEMBERS)
    if next(members, None) is not None:
        problem = f"more than {MAX_MEMBERS:,} files: the others are left out; unpack it, and give the folder with the dumps"
        yield DumpSource(source.path, source.location, problem=problem)


def is_tar(data: bytes) -> bool:
    """Whether the bytes begin a tar archive (POSIX or GNU)."""
    return data[257:262] == b"ustar"


def tar_members(source: DumpSource, data: bytes, limit: int) -> Iterator[DumpSource]:
    """The regular files of an archive, each at most `limit` bytes; names are only shown, never written to."""
    import tarfile  # slow to import, rarely needed

    # what sparse files may come to, all together
    holes = min(limit, max(BOMB_BYTES, len(data) * BOMB_FACTOR))
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            end, following = -1, 0
            for member in archive:
                following = archive.offset
                shown = f"{source.path}/{member.name}"
                if member.size < 0 or member.offset <= end:
                    raise tarfile.ReadError("leads back")  # a negative size: it would be read without end
                end = member.offset
                if not member.isreg():
                    continue
                allowed = holes if member.issparse() else limit
                if member.size > allowed:
                    problem = f"{member.size} bytes are beyond the limit of {allowed}"
                    yield DumpSource(shown, source.location, problem=problem)
                    continue
                holes -= member.size if member.issparse() else 0
                file = archive.extractfile(member)
                content = file.read() if file else b""
                yield DumpSource(shown, source.location, int(member.mtime * 1e9), member.size, content)
            if data[following : following + 512].strip(b"\0"):
                raise tarfile.ReadError("does not end")  # some versions pass over a header that cannot be
    except (tarfile.TarError, *_DAMAGED) as error:
        problem = f"archive cut short or damaged ({type(error).__name__})"
        yield DumpSource(source.path, source.location, problem=problem)


def unpack(path: str, place: str, wanted: Container[str], folder: str) -> dict[str, str]:
    """Writes members of the archive at `place` below a folder: {how it is shown: its file}. Members of one folder stay in one;
    of their names only the last part is used."""
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
        with contextlib.suppress(OSError, ValueError):  # no room, a name that cannot be
            if parent not in folders:
                folders[parent] = tempfile.mkdtemp(dir=folder)
            place = os.path.join(folders[parent], name)
            with open(place, "wb") as file:
                file.write(member.data)
            found[member.path] = place
    return found


def zip_members(source: DumpSource, data: bytes, limit: int) -> Iterator[DumpSource]:
    """The files of a zip archive, each at most `limit` bytes, and bounded all together; names are only shown."""
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
                    problem = "is encrypted: give its files without a password"
                elif member.file_size > allowed:
                    problem = f"{member.file_size} bytes are beyond the limit of {allowed}"
                else:
                    with archive.open(member) as file:
                        content, problem = _drain(_pieces(file), allowed, allowed, zipfile.BadZipFile)
                    room -= len(content)
                mtime_ns = int(time.mktime((*member.date_time, 0, 0, -1)) * 1e9)
                yield DumpSource(shown, source.location, mtime_ns, len(content), content, problem)
    except (zipfile.BadZipFile, NotImplementedError, zlib.error, *_DAMAGED) as error:
        problem = f"archive cut short or damaged ({type(error).__name__})"
        yield DumpSource(source.path, source.location, problem=problem)


OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure")
PARALLEL = 16
T = TypeVar("T")


STORE_HINT = (
    "Keys and region are read from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, the address of another store than Amazon's "
    "from AWS_ENDPOINT_URL."
)


def fetch_sources(url: str, options: LoadOptions) -> Iterator[DumpSource]:
    """Every object under the URL, with its bytes. Raises MissingExtra without a library, InputError on no answer."""
    scheme = url.partition("://")[0].lower()
    if scheme in ("http", "https"):
        yield _download(url, options)
        return
    if scheme not in OBSTORE_SCHEMES:
        raise InputError(f"{url}: URLs are read that begin with {', '.join(OBSTORE_SCHEMES)}, http or https")
    opened, problem = _attempt(lambda: _open_obstore(url))
    if opened is None:
        if "169.254.169.254" in problem:  # where machines of a cloud get theirs
            problem = "no credentials were found"
        raise InputError(f"{url}: {problem}", hint=STORE_HINT)
    listed, get = opened
    if not listed:
        raise InputError(f"{url}: nothing is stored there")
    from concurrent.futures import ThreadPoolExecutor  # files of this machine start without it

    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="allranks-fetch") as pool:
        yield from pool.map(lambda item: _fetch(url, item, get, options), listed)


def _download(url: str, options: LoadOptions) -> DumpSource:
    """The one file behind an http(s) address; a web server has no list of files."""
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
            else "Is host and port right, and can this machine reach it?"
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
        problem = f"{size} bytes are beyond the limit of {options.max_file_bytes}"
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
    """(what the call gave, None when it failed; the first line of the error, which may print whole responses)."""
    try:
        return call(), ""
    except Exception as error:  # each store library has its own tree of errors, without a common base
        if isinstance(error, ImportError) or type(error).__module__.startswith("allranks"):
            raise
        return None, str(error).strip().split("\n")[0][:300] or type(error).__name__
