"""Torch's and torchcomms' dumps, pickled or in JSON → Raw. Imported with the first such file: a job's black boxes
alone are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from allranks.blackbox.tables import Tables
from allranks.load.layout import Irregular
from allranks.load.regular import MIN_BYTES, LayoutCache, shrink
from allranks.load.result import Raw, Unreadable
from allranks.load.torch_dump import read_dump
from allranks.load.unpickle import read_pickle


@dataclass
class DumpReader:
    """What the dumps of one load share."""

    tables: Tables
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layouts: LayoutCache = field(default_factory=lambda: LayoutCache(list))

    def read_pickle(self, data: bytes) -> Raw:
        """A pickle: by its repeating bytes where it has them, else the plain way."""
        if len(data) >= MIN_BYTES:
            try:
                regular = shrink(data, self.layouts)
                small = read_pickle(regular.small)
                if small.whole:
                    return read_dump(small.value, self.tables, self.members, "pickle", regular.expand)
            except (Irregular, Unreadable):
                pass  # the plain way reads everything, and says what is wrong
        unpickled = read_pickle(data)
        try:
            raw = read_dump(unpickled.value, self.tables, self.members, "pickle")
        except Unreadable as error:
            if unpickled.problem:
                foreign = unpickled.value is not None and b"pg_config" not in data[:65536]
                skip = foreign and not unpickled.problem.startswith("cut short")
                raise Unreadable(unpickled.problem, kind="pickle", skip=skip) from error
            raise
        if unpickled.problem:
            raw.damaged = True
            raw.notes = (f"{unpickled.problem}; {len(raw.calls)} calls were read", *raw.notes)
        return raw

    def read_json(self, data: bytes) -> Raw:
        """A JSON dump, also one that is cut short. Raises Unreadable for captures of stacks too."""
        value: Any
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            value = None
        if value is None:
            return self._salvage_json(data)
        if isinstance(value, dict) and is_stacks(value):
            raise Unreadable("stacks", kind="stacks", skip=True)
        return read_dump(value, self.tables, self.members, "json")

    def _salvage_json(self, data: bytes) -> Raw:
        """A JSON file that is cut short: the whole entries before the cut."""
        value = read_cut_json(data)
        if value is None:
            raise Unreadable("JSON that cannot be read", kind="json", skip=b'"pg_config"' not in data)
        raw = read_dump(value, self.tables, self.members, "json")
        raw.damaged = True
        raw.notes = (f"cut short after {len(data)} bytes; {len(raw.calls)} calls were read", *raw.notes)
        return raw


def read_cut_json(data: bytes) -> dict[str, Any] | None:
    """What a truncated torch JSON dump still holds; None when it is no such thing."""
    import json  # only here: msgspec reads whole files

    text = data.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    found: dict[str, Any] = {}
    for key in ("version", "pg_config", "pg_status", "comm_lib_version"):
        at = text.find(f'"{key}":')
        if at >= 0:
            try:
                found[key] = decoder.raw_decode(text[at + len(key) + 3 :].lstrip())[0]
            except (ValueError, RecursionError):
                pass
    at = text.find('"entries":')
    if at < 0:
        return found if "version" in found and "pg_config" in found else None
    position = text.find("[", at) + 1
    entries: list[Any] = []
    while position > 0:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        try:
            entry, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    found["entries"] = entries
    return found


def is_stacks(value: dict[str, Any]) -> bool:
    """Whether a JSON object is one of our stack bundles or captures, which `stacks` reads."""
    return "ranks" in value and (
        "stacks" in str(value.get("kind", "")) or "stacks" in value or "hung" in value
    )
