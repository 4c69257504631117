"""Object stores through `obstore`: S3, GCS, Azure and compatible servers. No torch."""

from __future__ import annotations

import configparser
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from allranks.checkpoint.stores import MAX_JSON_BYTES, Pieces, StoreSpec
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.checkpoint.stores.listing import INCOMPLETE, POINTER
from allranks.errors import ConfigurationError, require
from allranks.model.parsing import printable

P = ParamSpec("P")
T = TypeVar("T")
PART_BYTES = 16 << 20  # of a multipart upload
MAX_PARTS = 9_000  # S3 allows 10,000
CONCURRENCY = 6
MAX_KEYS = 2_000_000  # limit for a list, which obstore reads into memory
_CHUNK_BYTES = 4 << 20
#: Metadata servers of clouds: an error from one of these means that there are no credentials.
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "/latest/api/token", "/latest/meta-data/iam")
#: Options of obstore's HTTP client. Passed as options of the store, they make obstore panic.
_CLIENT_OPTIONS = (
    "allow_http allow_invalid_certificates connect_timeout default_content_type http1_only http2_keep_alive_interval "
    "http2_keep_alive_timeout http2_keep_alive_while_idle http2_max_frame_size http2_only pool_idle_timeout "
    "pool_max_idle_per_host proxy_ca_certificate proxy_excludes proxy_url randomize_addresses timeout user_agent"
)
_INNER = re.compile(r'\b(?:message|error): "([^"\\]+)"')
_STATUS = re.compile(r"status code: (\d{3})")
#: Refusals with a status other than 401 and 403: expired keys, another region.
_REFUSALS = ("ExpiredToken", "InvalidToken", "AuthorizationHeaderMalformed", "incorrectly configured region")
#: A proxy or a login page responds to every request with a page, which obstore parses as an empty list.
_PAGE = "received a web page instead of a response of the store: is there a proxy or a login page?"
_TIMEOUT_S, _RETRIES = "60", 3.0  # limit of one request; factor for the limit with all retries
_KEY_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)


def open_object_store(spec: StoreSpec) -> KeyedStore:
    """Opens the bucket of a URL. Options: endpoint, region, access_key_id, secret_access_key, timeouts."""
    return KeyedStore(ObjectBlobs(spec), spec, pointer=True)


def try_access(spec: StoreSpec) -> Iterator[tuple[str, OSError]]:
    """Lists, writes, reads and deletes one small object; yields (IAM action, error) for each that fails."""
    blobs, name, data = ObjectBlobs(spec), f"allranks-access-{os.urandom(6).hex()}", b"{}"
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("s3:ListBucket", lambda: blobs.keys(name)),
        ("s3:PutObject", lambda: blobs.put(name, [memoryview(data)], len(data))),
        ("s3:GetObject", lambda: blobs.get(name)),
        ("s3:DeleteObject", lambda: blobs.delete([name])),
    )
    for action, call in steps:
        try:
            call()
        except OSError as error:
            yield action, error
            if action == "s3:PutObject" or isinstance(error, FileNotFoundError):
                return  # nothing to read or delete


def _interruptible(method: Callable[P, T]) -> Callable[P, T]:
    """Lets Ctrl-C interrupt a request: the main thread runs it in another thread, which it can abandon."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if threading.current_thread() is not threading.main_thread():
            return method(*args, **kwargs)
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(method(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name="allranks-request", daemon=True).start()
        return done.result()

    return call


_used_by: set[int] = set()  # process ids


class ObjectBlobs:
    """The `keyed_store.BlobStore` of an object store. obstore retries within the limits of the options."""

    def __init__(self, spec: StoreSpec) -> None:
        # obstore's threads do not survive a fork: its first call in the child would block forever
        if _used_by and os.getpid() not in _used_by:
            text = "obstore was used before this process was forked: use the start method spawn instead"
            raise OSError(errno.EIO, text)
        _used_by.add(os.getpid())
        self._obstore = require("obstore", feature="an object store", extra="s3")
        self._store = _connect(spec)

    @_interruptible
    def put(self, key: str, pieces: Pieces, length: int) -> None:
        listed = pieces if isinstance(pieces, (list, tuple)) else None
        part_bytes = max(PART_BYTES, -(-length // MAX_PARTS))
        with _as_os_errors():
            if length <= part_bytes and listed is not None:
                self._obstore.put(self._store, key, b"".join(listed), use_multipart=False)
                return
            body: object = listed[0] if listed is not None and len(listed) == 1 else iter(pieces)
            limits = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": CONCURRENCY}
            self._obstore.put(self._store, key, body, **limits)

    @_interruptible
    def put_if(self, key: str, data: bytes, expected: str | None) -> None:
        mode: object = "create" if expected is None else {"e_tag": expected}
        with _as_os_errors():
            self._obstore.put(self._store, key, data, mode=mode)

    @_interruptible
    def get(self, key: str) -> tuple[bytes, str]:
        with _as_os_errors():
            found = self._obstore.get(self._store, key)
            if found.meta["size"] > MAX_JSON_BYTES:
                raise ValueError(
                    f"{key} has {found.meta['size']} bytes, but at most {MAX_JSON_BYTES} are allowed"
                )
            data = b"".join(found.stream(_CHUNK_BYTES))  # allocates as data arrives, not by the claimed size
        if data.lstrip()[:1] == b"<":  # files read at once are JSON
            raise OSError(errno.EIO, _PAGE)
        return data, str(found.meta["e_tag"])

    @_interruptible
    def get_range(self, key: str, start: int, views: Sequence[memoryview]) -> None:
        length, got = sum(map(len, views)), 0
        left = [view for view in views if len(view)]
        wanted = {"range": (start, start + length)}
        with _as_os_errors():
            for piece in self._obstore.get(self._store, key, options=wanted).stream(_CHUNK_BYTES):
                came, got = memoryview(piece), got + len(piece)
                if got > length:
                    raise ValueError(f"{key}: received more than the {length} bytes requested at {start}")
                while came:
                    count = min(len(came), len(left[0]))
                    left[0][:count], came, left[0] = came[:count], came[count:], left[0][count:]
                    left = left if left[0] else left[1:]
        if got != length:
            raise EOFError(f"{key}: received {got} of {length} bytes requested at {start}")

    @_interruptible
    def size(self, key: str) -> int:
        with _as_os_errors():
            return int(self._obstore.head(self._store, key)["size"])

    @_interruptible
    def keys(self, prefix: str) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        with _as_os_errors():
            for page in self._obstore.list(self._store, prefix=prefix.rstrip("/") or None):
                found += [(meta["path"], meta["last_modified"].timestamp()) for meta in page]
                if len(found) > MAX_KEYS:
                    raise ValueError(f"the store's list of objects has more than {MAX_KEYS:,} entries")
        if not found and not prefix:
            if self._has("allranks-never-writes-this"):
                raise OSError(errno.EIO, _PAGE)
            if self._has(POINTER):
                text = f"the store's list of objects {INCOMPLETE}: it is empty, but {POINTER} exists"
                raise OSError(errno.EIO, text)
        return [entry for entry in found if entry[0].startswith(prefix)]

    def _has(self, key: str) -> bool:
        try:
            self.size(key)
        except (FileNotFoundError, PermissionError):
            return False
        return True

    @_interruptible
    def delete(self, keys: list[str]) -> None:
        with _as_os_errors():
            for at in range(0, len(keys), 1000):
                self._obstore.delete(self._store, keys[at : at + 1000])

    def close(self) -> None:
        """Nothing to close: connections end with this object."""


def _connect(spec: StoreSpec) -> Any:
    """The obstore object of a URL. Options override AWS_* variables, which override ~/.aws/credentials."""
    try:
        with _as_os_errors():
            return _from_url(spec, dict(spec.options))
    except OSError as error:
        given = ", ".join(spec.options)  # values may be secrets
        raise ConfigurationError(
            f"the object store {spec.url} cannot be opened with s3_options ({given}): {error.strerror}",
            hint="valid are timeout_s, max_retries and the options of obstore: endpoint, region, access_key_id, "
            "secret_access_key …",
        ) from error


def _from_url(spec: StoreSpec, options: dict[str, str]) -> Any:
    from obstore.store import from_url

    seconds, retries = float(options.pop("timeout_s", _TIMEOUT_S)), int(options.pop("max_retries", "5"))
    if not 0 < seconds < 1e6 or not 0 <= retries < 1e6:
        raise ValueError("timeout_s must be above 0, and max_retries at least 0")
    client = {key: options.pop(key) for key in _CLIENT_OPTIONS.split() if key in options}
    config = _aws_config(options) if spec.url.startswith(("s3://", "s3a://")) else options
    endpoint = config.get("endpoint", "http://")
    if not str(endpoint).startswith(("http://", "https://")):
        raise ValueError(f"endpoint {endpoint!r} must begin with http:// or https://")
    backoff = {"base": 2, "init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5)}
    return from_url(
        spec.url,
        config=config or None,
        client_options={
            "timeout": timedelta(seconds=seconds),
            "connect_timeout": timedelta(seconds=min(10.0, seconds)),
            "allow_http": str(config.get("endpoint", spec.url)).startswith("http://"),
            **client,
        },
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=_RETRIES * seconds),
            "backoff": backoff,
        },
    )


def _aws_config(options: dict[str, str]) -> dict[str, str]:
    """Endpoint, region and keys for S3 and compatible servers."""
    env = os.environ
    config = {"region": env.get("AWS_REGION", env.get("AWS_DEFAULT_REGION", "us-east-1"))}
    endpoint = env.get("AWS_ENDPOINT_URL_S3", env.get("AWS_ENDPOINT_URL", ""))
    if endpoint:
        config["endpoint"] = endpoint
    if not any(name in env for name in _KEY_VARIABLES) and "access_key_id" not in options:
        config.update(_shared_credentials())
    return {**config, **options}


def _shared_credentials() -> dict[str, str]:
    """The keys written by `aws configure`; {} without them. obstore does not read that file."""
    path = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", Path.home() / ".aws" / "credentials"))
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path)
        profile = parser[os.environ.get("AWS_PROFILE", "default")]
    except (configparser.Error, KeyError, OSError):
        return {}
    wanted = {f"aws_{name}": name for name in ("access_key_id", "secret_access_key", "session_token")}
    return {name: profile[key] for key, name in wanted.items() if key in profile}


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Converts obstore's errors into OSErrors with a short reason; the original error is the cause."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # such as Ctrl-C; a panic in obstore is not an Exception
        raise _os_error(error) from error


def _os_error(error: BaseException) -> OSError:
    kind, text = type(error).__name__, str(error)
    found = _STATUS.search(text)  # other digits may be a port, a name or a time
    status = int(found[1]) if found else 0
    if any(refusal in text for refusal in _REFUSALS):
        return PermissionError(errno.EACCES, _short(text))
    if any(host in text for host in _METADATA_HOSTS) or "credential" in text.lower():
        return PermissionError(errno.EACCES, f"NoCredentialsError: no credentials found ({_short(text)})")
    if isinstance(error, FileNotFoundError) or kind == "NotFoundError" or status == 404:
        return FileNotFoundError(errno.ENOENT, _short(text))
    if kind in {"AlreadyExistsError", "PreconditionError"}:
        return FileExistsError(errno.EEXIST, "another saver has written this checkpoint's manifest")
    if kind in {"PermissionDeniedError", "UnauthenticatedError"} or status in (401, 403):
        return PermissionError(errno.EACCES, f"403 Forbidden: {_short(text)}")
    return OSError(errno.EIO, _short(text))


def _short(text: str) -> str:
    """The relevant part of obstore's nested debug text."""
    code, message = (re.search(rf"<{tag}>([^<]*)</{tag}>", text) for tag in ("Code", "Message"))
    if code:
        found = f"{code.group(1)}: {message.group(1)}" if message else code.group(1)
    elif status := re.search(r"status code: (\d{3}[^:\n]*)", text):
        found = status.group(1).strip()
    else:
        # the request stands before the dash
        found = (text.splitlines()[0] if text else "unknown error").rpartition(" - ")[2]
        inner = _INNER.findall(text)  # the reason for "error sending request"
        reason = inner[-1] if inner else "timed out" if "TimedOut" in text else ""
        found += f": {reason}" if reason else ""
    return printable(found, 240)
