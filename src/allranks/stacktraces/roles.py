"""The role of each process: trainer, rollout engine, reward, router. Rules are data (`roles.yaml`); a job file adds its own.

In: processes with their stacks, and what /proc says of them. Out: the same with role and number. Pure but for loading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from itertools import pairwise

from allranks.errors import ConfigurationError
from allranks.model.parsing import role_of_command
from allranks.model.stacks import Process, is_user_file
from allranks.model.yaml_tree import read_yaml
from allranks.stacktraces.find import coordinates
from allranks.stacktraces.procfs import ProcessEntry
from allranks.stacktraces.views import short_name

_RAY_TITLE = re.compile(r"^ray::(\w+)")
_PATTERNS = ("title", "ray", "function", "comm")


@dataclass(frozen=True)
class RoleRule:
    """One row of the table: expressions that must be found, and the role that follows."""

    role: str
    title: str = ""
    ray: str = ""
    function: str = ""
    comm: str = ""
    system: bool = False
    ours: bool = False

    def fits(self, seen: Mapping[str, str]) -> bool:
        """Whether all that the rule asks for is there."""
        asked = [(getattr(self, name), seen.get(name, "")) for name in _PATTERNS if getattr(self, name)]
        return bool(asked) and all(text and re.search(expression, text) for expression, text in asked)


@lru_cache(maxsize=1)
def load_roles() -> tuple[RoleRule, ...]:
    """The rules that ship with the package."""
    text = resources.files("allranks.stacktraces").joinpath("roles.yaml").read_text(encoding="utf-8")
    return parse_roles(read_yaml(text))


def with_roles(given: Sequence[str]) -> tuple[RoleRule, ...]:
    """Our rules behind those of a job file: ROLE=EXPRESSION."""
    pairs = [one.partition("=")[::2] for one in given]
    return (*(RoleRule(role.strip(), title=text) for role, text in pairs), *load_roles())


def parse_roles(rows: object) -> tuple[RoleRule, ...]:
    """Rules from YAML data; says which row is wrong."""
    if not isinstance(rows, list):
        raise ConfigurationError("roles are a list of rows with `role` and what to look for")
    found = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or "role" not in row or set(row) - set(RoleRule.__dataclass_fields__):
            raise ConfigurationError(f"roles: row {index + 1} is not understood: {row!r}")
        try:
            [re.compile(str(row[name])) for name in _PATTERNS if name in row]
        except re.error as error:
            raise ConfigurationError(f"roles: row {index + 1}: {error}") from error
        found.append(RoleRule(**row))
    return tuple(found)


def give_roles(
    processes: Sequence[Process], entries: Mapping[int, ProcessEntry], rules: Sequence[RoleRule]
) -> tuple[Process, ...]:
    """The processes with their roles, numbered where several have the same one."""
    root = next((p.pid for p in processes if p.ppid not in entries), 0)
    orphans = [p for p in processes if p.ppid not in entries and p.pid != root and p.alive]
    # A process that has ended has no title any more: a child that it left has the same one.
    left = {p.pid: [o.title for o in orphans if o.started_s >= p.started_s] for p in processes if not p.alive}
    processes = [
        replace(p, title=left[p.pid][0]) if left.get(p.pid) and "::" not in p.title else p for p in processes
    ]
    named = [
        _with_role(one, entries.get(one.pid), rules, one.pid == root and len(processes) > 1)
        for one in processes
    ]
    roles = {one.pid: one.role for one in named}
    named = [
        replace(one, role=f"subprocess of {roles[one.ppid]}")
        if _is_nobody(one) and one.ppid in roles
        else one
        for one in named
    ]
    ranks = [one.rank for one in named if one.role == "rank"]
    if len(set(ranks)) < len(ranks):  # several worlds: their programs tell them apart
        named = [
            replace(one, role=role_of_command(one.title) or "rank") if one.role == "rank" else one
            for one in named
        ]
    counts: dict[str, list[Process]] = {}
    for one in sorted(named, key=lambda p: (p.started_s, p.pid)):
        counts.setdefault(one.role, []).append(one)
    numbers = {
        one.pid: number
        for group in counts.values()
        if len(group) > 1
        for number, one in zip(_numbers(group), group, strict=False)
    }
    return tuple(replace(one, number=numbers.get(one.pid)) for one in named)


def _numbers(group: Sequence[Process]) -> list[int]:
    """By rank where each has one of its own, by the number in the title, else in the order of their starts."""
    ranks = [one.rank for one in group]
    if all(rank is not None for rank in ranks) and len(set(ranks)) == len(ranks):
        return [rank for rank in ranks if rank is not None]
    places = [dict(coordinates(one.title)).get("tp", dict(coordinates(one.title)).get("dp")) for one in group]
    if all(place is not None for place in places) and len(set(places)) == len(places):
        return [place for place in places if place is not None]
    return list(range(len(group))) if not any(one.title.startswith("ray::") for one in group) else []


def _with_role(
    process: Process, entry: ProcessEntry | None, rules: Sequence[RoleRule], root: bool
) -> Process:
    seen = {"title": process.title, "function": _target(process), "comm": entry.comm if entry else ""}
    ray = _RAY_TITLE.match(process.title)
    seen["ray"] = ray[1] if ray else ""
    for rule in rules:
        # a forked process has its parent's title, and a function of its own
        if rule.fits(seen) and not (rule.system and seen["function"]):
            return replace(process, role=rule.role, system=rule.system, ours=rule.ours)
    if ray:
        return replace(process, role=ray[1])
    if process.rank is not None:
        return replace(process, role="rank" if seen["function"] in ("", "_wrap") else seen["function"])
    said = role_of_command(process.title)
    plain = said if f".py {said}" in process.title else ""
    function = seen["function"] if seen["function"] != "_wrap" else ""  # torch.multiprocessing's own
    name = function or plain or _first_function(process) or ("driver" if root else said)
    return replace(process, role=name.replace("_", " ").strip() or "process")


def _is_nobody(process: Process) -> bool:
    """Whether nothing tells what a process does: `python -c`, or one that has ended."""
    return not process.system and bool(re.fullmatch(r"process|python[\d.]*", process.role))


def _target(process: Process) -> str:
    """The function that a process of multiprocessing was started with."""
    main = next((thread for thread in process.threads if thread.main), None)
    frames = main.frames if main is not None else ()
    for inner, outer in pairwise(frames):
        if outer.name.endswith("run") and outer.file.endswith("multiprocessing/process.py"):
            return short_name(inner.name)
    return ""


def _first_function(process: Process) -> str:
    """The function that the script's main thread is in, outermost first: what the program calls itself."""
    main = next((thread for thread in process.threads if thread.main), None)
    frames = [f for f in reversed(main.frames) if is_user_file(f.file)] if main is not None else []
    names = [short_name(f.name).rsplit(".", 1)[-1] for f in frames if not f.file.startswith("<")]
    return next(
        (n for n in names if not n.startswith("<") and n not in ("main", "run", "start", "launch")), ""
    )
