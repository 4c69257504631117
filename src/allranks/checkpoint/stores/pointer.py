"""The names of a store's newest checkpoints, in one small file that is written after every commit. Pure, torch-free.

A list may be out of date or cut short; what is asked for by its name is as it is. So every list is compared with these names.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable

from allranks.model.parsing import printable

POINTER = ".allranks.json"
#: Names that are kept in it, newest last.
MOST = 256
INCOMPLETE = "is not complete"


def decode(data: bytes) -> list[str]:
    """The names in the file; none if it is damaged, which the next commit repairs."""
    try:
        found = json.loads(data)["checkpoints"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    names = found if isinstance(found, list) else []
    return [name for name in names if isinstance(name, str) and "/" not in name and name[:1] not in ("", ".")]


def encode(names: Iterable[str], add: str = "", drop: Iterable[str] = ()) -> bytes:
    """The file with one name more, or some less."""
    gone = {add, *drop}
    kept = [name for name in names if name not in gone] + ([add] if add else [])
    return json.dumps({"checkpoints": kept[-MOST:]}).encode() + b"\n"


def check_list(what: str, suspects: Iterable[str], there: Callable[[str], bool]) -> None:
    """Raises OSError if one of the files that a list lacks is there; a file is asked for by its name."""
    for path in sorted(suspects):
        if there(path):
            raise OSError(errno.EIO, printable(f"{what} {INCOMPLETE}: {path} is there, and not in it", 240))
