"""Text, YAML and JSON from outside, before they are printed, logged or taken for data.

JSON becomes values of a given type by msgspec. What msgspec learns about a class is kept in that class, and kept before it
is complete: two threads that use a class for the first time at once crash the process (msgspec 0.22). Here one thread at a
time does it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import msgspec  # imported where it is used: commands that only print start faster

T = TypeVar("T")
_first_use = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
MAX_YAML_DEPTH, MAX_YAML_VALUES = 100, 100_000

_SECRET_NAME = r"(?:token|secret|passw(?:or)?d|key|credentials?)"
_SECRET_SET = re.compile(rf"(?i)({_SECRET_NAME}=)[^\s\0]+")  # --api-key=VALUE, wandb.api_key=VALUE
_SECRET_WORD = re.compile(rf"(?i)({_SECRET_NAME}[\s\0]+)(?!-)[^\s\0]+")  # --api-key VALUE
_SECRET_URL = re.compile(r"(://[^\s\0/@:]{0,200}:)[^\s\0/@]{1,200}@")  # scheme://user:VALUE@host


def without_secrets(command_line: str) -> str:
    """A command line, its words separated by blanks or zeros, without what looks like passwords and keys: for evidence."""

    def hide_value(found: re.Match[str]) -> str:
        name = re.split(
            r"[\s\0]", command_line[max(0, found.start() - 100) : found.end(1)].rstrip("\0 \t\n")
        )[-1]
        return f"{found[1]}***" if name.startswith("-") else found[0]

    command_line = _SECRET_WORD.sub(hide_value, command_line)
    return _SECRET_URL.sub(r"\1***@", _SECRET_SET.sub(r"\1***", command_line))


def printable(text: str, limit: int = 2000) -> str:
    """Without control characters, which would steer a terminal, and not longer than `limit`."""
    text = text if len(text) <= limit else f"{text[:limit]} …"
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def rank_runs(ranks: Iterable[int]) -> list[str]:
    """["0-7", "9"]: runs of three and more ranks are drawn together."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    each = ([f"{low}-{high}"] if high - low > 1 else map(str, range(low, high + 1)) for low, high in runs)
    return list(chain.from_iterable(each))


def read_yaml(text: str) -> object:
    """Plain data; ValueError for what is no YAML, is nested too deep, or unfolds without end (aliases of aliases)."""
    import yaml

    brackets = (1 if mark in "[{" else -1 for mark in re.findall(r"[][{}]", text))
    if max(accumulate(brackets), default=0) > MAX_YAML_DEPTH:
        # Each level costs the reader time for every word.
        raise ValueError(f"more than {MAX_YAML_DEPTH} brackets inside one another")
    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if _unfolded(value, {}) > MAX_YAML_VALUES:
        raise ValueError(f"its aliases unfold to more than {MAX_YAML_VALUES:,} values")
    return value


def _unfolded(value: object, known: dict[int, int]) -> int:
    """How many values it is when every alias is written out."""
    if not isinstance(value, (dict, list, tuple)):
        return 1
    if id(value) not in known:
        known[id(value)] = MAX_YAML_VALUES + 1  # for one that holds itself
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_unfolded(each, known) for each in inside)
    return known[id(value)]


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type; what it raises is a ValueError."""
    found = _decoders.get(kind)
    if found is None:
        import msgspec

        with _first_use:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def from_json(data: bytes | str, kind: type[T]) -> T:
    """`msgspec.json.decode(data, type=kind)`, from any thread."""
    return json_decoder(kind).decode(data)


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    """`msgspec.convert(value, kind)`, from any thread."""
    import msgspec

    json_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)
