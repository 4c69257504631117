"""Dumps in an object store or behind any fsspec URL: listed, then fetched in parallel, within the size limits.

`s3://`, `gs://`, `az://` go through obstore (extra `s3`); anything else through fsspec when that is installed.
Only this file talks to a network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from allranks.errors import InputError, require
from allranks.load.result import LoadOptions
from allranks.load.sources import DumpSource

OBSTORE_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "azure", "http", "https")
PARALLEL = 16
T = TypeVar("T")


def fetch_sources(url: str, options: LoadOptions) -> Iterator[DumpSource]:
    """Every object under the URL, with its bytes. Raises MissingExtra without a library, InputError on no answer."""
    scheme = url.partition("://")[0].lower()
    fetch = _open_obstore if scheme in OBSTORE_SCHEMES else _open_fsspec
    opened, problem = _attempt(lambda: fetch(url))
    if opened is None:
        raise InputError(f"{url}: {problem}")
    listed, get = opened
    if not listed:
        raise InputError(f"{url}: nothing is stored there")
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="allranks-fetch") as pool:
        yield from pool.map(lambda item: _fetch(url, item, get, options), listed)


Listed = tuple[str, int, int]  # key, size, modification time in ns


def _fetch(url: str, item: Listed, get: Callable[[str], bytes], options: LoadOptions) -> DumpSource:
    key, size, mtime_ns = item
    shown = f"{url.partition('://')[0]}://{key}" if "://" not in key else key
    if size > options.max_file_bytes:
        problem = f"{size} bytes are beyond the limit of {options.max_file_bytes}"
        return DumpSource(shown, shown, problem=problem)
    data, problem = _attempt(lambda: get(key))
    if data is None:
        return DumpSource(shown, shown, problem=f"cannot be fetched: {problem}")
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


def _open_fsspec(url: str) -> tuple[list[Listed], Callable[[str], bytes]]:
    fsspec = require("fsspec", feature=f"reading {url}", extra="fsspec")
    system, root = fsspec.core.url_to_fs(url)
    found = system.find(root, detail=True)
    listed = [(str(path), int(info.get("size") or 0), 0) for path, info in found.items()]
    return sorted(listed), lambda key: bytes(system.cat_file(key))


def _attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """(what the call gave, None when it failed; the first line of the error, which may print whole responses)."""
    try:
        return call(), ""
    except Exception as error:  # each store library has its own tree of errors, without a common base
        if isinstance(error, ImportError) or type(error).__module__.startswith("allranks"):
            raise
        return None, str(error).strip().split("\n")[0][:300] or type(error).__name__
