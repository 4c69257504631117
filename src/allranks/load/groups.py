"""Process groups as torch dumps describe them, with the quirks of each library set right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from allranks.blackbox.tables import MAX_MEMBERS, MAX_TEXT, Tables
from allranks.model.trace import Group

#: The name and description that torch gives the group of all ranks.
DEFAULT_NAME, DEFAULT_DESC = "0", "default_pg"


def read_members(text: object, cache: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The global ranks in a "[0, 1, 2]" string (torchcomms writes no blanks); () when unknown or not such."""
    if isinstance(text, (list, tuple)):
        ranks = [rank for rank in text[:MAX_MEMBERS] if type(rank) is int]
        return tuple(ranks) if len(ranks) == len(text) else ()
    if not isinstance(text, str):
        return ()
    found = cache.get(text)
    if found is None:
        found = cache[text] = _parse_members(text)
    return found


def _parse_members(text: str) -> tuple[int, ...]:
    body = text.strip().removeprefix("[").removesuffix("]").strip()
    if not body:
        return ()
    try:
        ranks = tuple(map(int, body.split(",")))
    except ValueError:
        return ()
    return ranks if len(ranks) <= MAX_MEMBERS and min(ranks) >= 0 and max(ranks) < 1 << 31 else ()


@dataclass
class GroupTable:
    """The groups of one file: those configured and those used. Index 0 means none."""

    tables: Tables
    config: dict[str, Any]
    member_cache: dict[str, tuple[int, ...]]
    groups: list[Group] = field(default_factory=lambda: [Group("")])
    _ids: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def index(self, name: str, desc: str, backend: str) -> int:
        """The index of the group that an entry names."""
        key = (name, desc, backend)
        found = self._ids.get(key)
        if found is None:
            group = Group(name[:MAX_TEXT], desc[:MAX_TEXT], self._members(name, desc), backend)
            found = self._ids[key] = len(self.groups)
            self.groups.append(self.tables.group(group))
        return found

    def add_configured(self, backend: str) -> None:
        """Adds the groups that were made but not used: a rank that never entered its group is a finding."""
        used = {name for name, _, _ in self._ids}
        for name, entry in self.config.items():
            if not isinstance(entry, dict) or not isinstance(name, str) or name in used:
                continue
            if name == "":  # gloo writes its configuration under no name; the entries hold the truth
                continue
            desc = entry.get("desc")
            self.index(name, desc if isinstance(desc, str) else "", backend)

    def _members(self, name: str, desc: str) -> tuple[int, ...]:
        entry = self.config.get(name)
        if isinstance(entry, dict):
            return read_members(entry.get("ranks"), self.member_cache)
        # gloo of 2.13 writes the default group's members under the key '', and '[]' once a subgroup exists.
        nameless = self.config.get("")
        if isinstance(nameless, dict) and (name == DEFAULT_NAME or desc == DEFAULT_DESC):
            return read_members(nameless.get("ranks"), self.member_cache)
        return ()


def default_group(groups: list[Group]) -> Group | None:
    """The group of all ranks, when the file has it."""
    for group in groups:
        if group.desc == DEFAULT_DESC or group.name == DEFAULT_NAME:
            return group
    return None
