"""The rank of a file, from its name. Pure.

torch writes the rank into the file name and nowhere else, behind whatever prefix the user chose; people add hosts,
suffixes, dates and attempts. A number that is a process id, a date or a host's is not a rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

_EXTENSIONS = re.compile(
    r"(\.(pickle|pkl|pk|json|txt|bin|dat|dump|log|bak|old|orig|tmp|copy|gz|zst|zstd|tgz|tar|box|trace))+$",
    re.I,
)
_BOX = re.compile(r"\.a(\d+)\.r(\d+)\.p(\d+)\.box")
_EXPLICIT = re.compile(r"(?<![A-Za-z])(local[_\-. ]?)?rank[_\-. =]*(\d+)", re.I)
_TRACE = re.compile(r"(?:trace|dump|fr|box)[_\-. ]?(\d+)(?!\d)", re.I)
_SHORT = re.compile(r"(?<![A-Za-z0-9])r[_\-]?(\d+)(?![A-Za-z0-9])", re.I)
_NUMBER = re.compile(r"\d+")
_ATTEMPT = re.compile(
    r"(?:attempt|restart|retry|try|gen|generation)[_\-. =]*(\d+)|(?<![A-Za-z0-9])a(\d+)(?=[._\-/]|$)", re.I
)
#: No job has so many ranks; larger numbers are process ids, dates or times.
MAX_RANK = 999_999


def rank_by_prefix(name: str, prefix: str) -> int | None:
    """The digits right after the prefix, which may have a host or anything else before it."""
    match = re.search(re.escape(prefix) + r"(\d+)", name)
    return _plausible(match.group(1)) if match else None


def rank_of_name(path: str) -> int | None:
    """The rank that one path tells by itself, without looking at its neighbours; None when it does not."""
    parts = path.replace("\\", "/").split("/")
    name = parts[-1]
    box = _BOX.search(name)
    if box:
        return int(box.group(2))
    for part in (name, *reversed(parts[:-1][-3:])):
        found = _explicit(part)
        if found is not None:
            return found
    return _of_stem(name)


def _of_stem(name: str) -> int | None:
    """The rank in "trace_3" or "dump.r3"."""
    stem = _EXTENSIONS.sub("", name)
    for pattern in (_TRACE, _SHORT):
        matches = [_plausible(match.group(1)) for match in pattern.finditer(stem)]
        matches = [rank for rank in matches if rank is not None]
        if matches:
            return matches[-1]
    return None


def ranks_of_names(paths: Iterable[str]) -> dict[str, int]:
    """Ranks for a whole set of files: those that tell by themselves, then the rest by what tells them apart.

    Names that differ only in numbers form a family; the column of numbers that is different for every member is
    the rank (the last one, if there are several). A file alone gives its last plausible number.
    """
    found: dict[str, int] = {}
    families: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        rank = rank_of_name(path)
        if rank is not None:
            found[path] = rank
        else:
            name = path.rpartition("/")[2]
            stem = _EXTENSIONS.sub("", name)
            families[_NUMBER.sub("#", stem)].append(path)
    for skeleton, members in families.items():
        if "#" in skeleton:
            found.update(_family_ranks(members))
    return found | _not_of_folder(found)


def _not_of_folder(found: dict[str, int]) -> dict[str, int]:
    """The files of one folder that got one rank from its name ("debug_rank_0/trace_1"), by their own names where these differ."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in found:
        folders[path.rpartition("/")[0]].append(path)
    better: dict[str, int] = {}
    for folder, paths in folders.items():
        if len(paths) > 1 and _explicit(folder) is not None:
            names = {path: path.rpartition("/")[2] for path in paths}
            own = {path: rank for path, name in names.items() if (rank := _of_stem(name)) is not None}
            if not any(map(_explicit, names.values())) and len(set(own.values())) == len(paths):
                better |= own
    return better


def _family_ranks(members: list[str]) -> dict[str, int]:
    rows = [
        [_plausible(n) for n in _NUMBER.findall(_EXTENSIONS.sub("", p.rpartition("/")[2]))] for p in members
    ]
    columns = list(zip(*rows, strict=False))
    usable = [column for column in columns if None not in column]
    distinct = [column for column in usable if len(set(column)) == len(members)]
    best = distinct or usable
    if not best:
        return {}
    return {path: rank for path, rank in zip(members, best[-1], strict=False) if rank is not None}


def _explicit(part: str) -> int | None:
    """ "rank_3", but not "local_rank_3" when the global one stands there too."""
    matches = [(bool(m.group(1)), _plausible(m.group(2))) for m in _EXPLICIT.finditer(part)]
    ranks = [rank for local, rank in matches if not local and rank is not None]
    return ranks[-1] if ranks else None


def attempt_of_name(path: str) -> int | None:
    """The attempt that a path names (attempt_2/, restart1, job.a2.r0...), innermost first; None when it names none."""
    for part in reversed(path.replace("\\", "/").split("/")):
        matches = list(_ATTEMPT.finditer(part))
        if matches:
            number = matches[-1].group(1) or matches[-1].group(2)
            return int(number) if len(number) < 7 else None
    return None


def _plausible(digits: str) -> int | None:
    """A number that can be a rank: not a date, a time or a process id with leading zeros."""
    if len(digits) > 6 or int(digits) > MAX_RANK:
        return None
    return int(digits)
