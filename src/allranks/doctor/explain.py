"""Finds the first cause in the logs of all ranks and explains it. Pure, except for `read_lines`.

A line that explains a failure by itself ("root") counts before lines that follow from another failure ("symptom"). Then the
earliest time counts, then the rank that the launcher saw fail first, then the order of lines. A line without a time has that of
the previous line of its log.
"""

from __future__ import annotations

import gzip
import importlib
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, Literal, NamedTuple, cast

import yaml

from allranks.model.formatting import ranks_text
from allranks.model.parsing import without_secrets

Level = Literal["root", "symptom", "warning"]
MAX_LINE = 4000
BLOCK = 256  # lines that are searched together
MAX_UNPACKED = 512 << 20  # bytes read of a compressed log, which may unpack to any size


@dataclass(frozen=True)
class Pattern:
    """One known failure; the fields are described at the top of patterns.yaml."""

    id: str
    level: Level
    pattern: str
    cause: str
    hint: str
    sample: str


@dataclass(frozen=True)
class LogLine:
    """A line of a log, with its rank and time."""

    path: str
    number: int
    text: str
    rank: int | None = None
    at: float | None = None  # seconds; comparable inside one job only


@dataclass(frozen=True)
class Match:
    """A line that matches a pattern."""

    pattern: Pattern
    line: LogLine
    cause: str
    hint: str


@dataclass(frozen=True)
class Explanation:
    """The first cause, and the other matches."""

    first: Match | None
    others: tuple[tuple[Match, int], ...] = ()  # first match of each other pattern, with its count
    lines: int = 0
    files: tuple[str, ...] = field(default=())
    unreadable: tuple[tuple[str, str], ...] = ()


@cache
def patterns() -> tuple[Pattern, ...]:
    """The known failures, in the order of the file: special ones before generic ones."""
    text = resources.files("allranks.doctor").joinpath("patterns.yaml").read_text()
    return tuple(Pattern(**entry) for entry in yaml.safe_load(text))


class _Known(NamedTuple):
    pattern: Pattern
    regex: re.Pattern[str]
    words: tuple[str, ...]  # every matching line contains one of these, in lower case

    def may_know(self, lower: str) -> bool:
        return not self.words or any(word in lower for word in self.words)


@cache
def _known() -> tuple[_Known, ...]:
    return tuple(_Known(one, re.compile(one.pattern), needed_words(one.pattern)) for one in patterns())


def match_line(line: LogLine) -> Match | None:
    """The match of the first pattern for this line."""
    known = _find_known(line, _known())
    return _match(line, known) if known is not None else None


def _find_known(line: LogLine, among: Iterable[_Known]) -> _Known | None:
    text = line.text[:MAX_LINE]
    lower = text.lower()
    return next((one for one in among if one.may_know(lower) and one.regex.search(text)), None)


def _match(line: LogLine, known: _Known) -> Match:
    pattern, regex, _ = known
    shown = without_secrets(line.text[:MAX_LINE])
    found = regex.search(shown) or regex.search(line.text[:MAX_LINE])
    facts = found.groupdict(default="") if found is not None else {}
    return Match(pattern, replace(line, text=shown), _fill(pattern.cause, facts), _fill(pattern.hint, facts))


def _in_blocks(lines: Iterable[LogLine]) -> Iterator[tuple[LogLine, tuple[_Known, ...]]]:
    """Each line with the patterns that may match a line of its block, which are few in most blocks."""
    rest = iter(lines)
    while block := tuple(islice(rest, BLOCK)):
        lower = "\n".join(line.text[:MAX_LINE] for line in block).lower()
        among = tuple(one for one in _known() if one.may_know(lower))
        yield from ((line, among) for line in block)


def explain(lines: Iterable[LogLine]) -> Explanation:
    """Explains a set of logs."""
    firsts: dict[tuple[str, int | None], Match] = {}  # by pattern and rank
    counts: Counter[str] = Counter()
    launcher, watchdogs = _Launcher(), _Watchdogs()
    total = 0
    for line, among in _in_blocks(lines):
        total += 1
        launcher.read(line)
        watchdogs.read(line)
        known = _find_known(line, among)
        if known is None:
            continue
        key = (known.pattern.id, line.rank)
        counts[known.pattern.id] += 1
        if key not in firsts or _earlier(line, firsts[key].line):
            firsts[key] = _match(line, known)
    ordered = sorted(firsts.values(), key=lambda match: _weight(match, launcher.blamed))
    first = _long_before(ordered) or next(iter(ordered), None)
    if first is not None and first.pattern.id in _OF_WATCHDOG:
        first = watchdogs.explain(first)
    seen = {first.pattern.id} if first is not None else set()
    others = [m for m in ordered if not (m.pattern.id in seen or seen.add(m.pattern.id))]  # type: ignore[func-returns-value]
    return Explanation(first, tuple((m, counts[m.pattern.id]) for m in others), total)


@dataclass
class _Launcher:
    """The rank that failed first, from torchrun's summary: two lines below its heading."""

    blamed: int | None = None
    _in_summary: bool = False

    def read(self, line: LogLine) -> None:
        if "Root Cause (first observed failure)" in line.text:
            self._in_summary = True
        elif self._in_summary and (found := _SUMMARY_RANK.match(line.text)):
            self.blamed, self._in_summary = int(found.group(1)), False


@dataclass(frozen=True)
class _Status:
    """A rank's progress in a group, as printed by its watchdog."""

    line: LogLine
    stuck: int | None  # the call that timed out; None: only calls of other ranks did
    entered: int
    completed: int


@dataclass
class _Watchdogs:
    """Compares the output of the NCCL watchdogs of all ranks at a timeout, to find ranks that never entered the call."""

    groups: dict[str, dict[int, _Status]] = field(default_factory=dict)

    def read(self, line: LogLine) -> None:
        found = _WORKS.search(line.text) if "nqueued" in line.text and line.rank is not None else None
        if found is None or line.rank is None or "periodically" in line.text:  # of a running job
            return
        stuck = int(found["stuck"]) if found["stuck"] else None
        status = _Status(line, stuck, int(found["entered"]), int(found["completed"]))
        ranks = self.groups.setdefault(found["group"], {})
        if line.rank not in ranks or stuck is not None:
            ranks[line.rank] = status

    def explain(self, first: Match) -> Match:
        """The match, with the ranks that are behind, if the numbers of a group show them."""
        for group, ranks in sorted(self.groups.items(), key=lambda item: -len(item[1])):
            stuck = min((one.stuck for one in ranks.values() if one.stuck is not None), default=None)
            # sends and receives have separate numbers, which may exceed those of the collectives
            if stuck is None or any(one.completed > one.entered for one in ranks.values()):
                continue
            behind = [rank for rank, one in ranks.items() if one.entered < stuck]
            waiting = [rank for rank in ranks if rank not in behind]
            if behind:
                few = behind if len(behind) < len(waiting) else waiting
                cause, hint = _behind(f"call #{stuck} of group {group}", behind, waiting)
                return replace(first, line=ranks[min(few)].line, cause=cause, hint=hint)
        return first


def _behind(call: str, behind: list[int], waiting: list[int]) -> tuple[str, str]:
    """(cause, hint) of a call that some ranks never entered."""
    late, those = ranks_text(behind), ranks_text(waiting)
    if len(behind) < len(waiting):
        cause = f"{late.capitalize()} never entered {call}, in which {those} timed out: {late} is behind."
        return cause, _BEHIND_HINT.format(ranks=late)
    cause = f"Only {those} entered {call} and timed out in it; {late} never did: an extra call, or they are stuck before it."
    return cause, _BEHIND_HINT.format(ranks=those)


def _long_before(ordered: list[Match]) -> Match | None:
    """A generic exception that came well before the first specific cause, which then is a consequence."""
    roots = [m for m in ordered if m.pattern.level == "root"]
    if not roots or roots[0].line.at is None or roots[0].pattern.id in _GENERIC:
        return None
    limit = roots[0].line.at - 5.0
    early = [m for m in roots if m.pattern.id in _GENERIC and m.line.at is not None and m.line.at < limit]
    return min(early, key=lambda match: match.line.at or 0.0, default=None)


def read_lines(paths: Iterable[Path], unreadable: list[tuple[str, str]] | None = None) -> Iterator[LogLine]:
    """The lines of log files and folders of them (plain or gz). Files that cannot be read, or not to the end, are added to
    `unreadable` with the reason."""

    def note(error: OSError) -> None:
        if unreadable is not None:
            unreadable.append((str(error.filename), str(error.strerror)))

    for path in paths:
        inside = (Path(folder, name) for folder, _, names in os.walk(path, onerror=note) for name in names)
        for file in sorted(p for p in inside if p.is_file()) if path.is_dir() else [path]:
            try:
                yield from _file_lines(file)
            except (OSError, EOFError, zlib.error, _TooLong) as error:
                if unreadable is not None:
                    unreadable.append((str(file), getattr(error, "strerror", None) or str(error)))


def parse_line(path: str, number: int, text: str, rank: int | None = None) -> LogLine:
    """Reads rank and time from the head of a line."""
    text = _ANSI.sub("", text)
    found = _RANK.match(text)
    if found:
        rank = int(next(group for group in found.groups() if group is not None))
        text = text[found.end() :]
    return LogLine(path, number, text, rank, _time(text))


_GENERIC = frozenset({"python_exception", "assertion"})
#: Patterns of lines that any rank's watchdog prints after a timeout of a collective.
_OF_WATCHDOG = frozenset({"watchdog_timeout", "nccl_dump_signal"})
_BEHIND_HINT = (
    "Check what {ranks} did instead: the end of the log, or `allranks diagnose FOLDER` with black boxes or Flight Recorder "
    "dumps. Next time run `allranks stacks` before the job is killed."
)
#: torch 2.4 to 2.15: "[PG 1 Rank 0]" or "[PG ID 0 PG GUID 0(default_pg) Rank 0]", then the numbers of the group's calls.
_WORKS = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<group>.+?) Rank \d+\](?:.* at (?:NCCL )?work(?: sequence id)?: (?P<stuck>\d+))?"
    r".*[Ll]ast enqueued (?:NCCL )?work: (?P<entered>-?\d+),.* last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_SUMMARY_RANK = re.compile(r"\s*rank\s*:\s*(\d+)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RANK = re.compile(
    r"^\s*(?:\[rank[ :]?(\d+)\]:? ?|\[(?:default|trainer|role)?(\d+)\]:|rank[ =:](\d+)[:\]] )", re.I
)
_FILE_RANK = re.compile(r"rank[_-]?(\d+)|(?:^|[_/.-])(\d+)/(?:stdout|stderr)", re.I)
_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_GLOG = re.compile(r"\b[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?")


def _file_lines(file: Path) -> Iterator[LogLine]:
    found = _FILE_RANK.search(str(file))
    rank = int(next(g for g in found.groups() if g is not None)) if found else None
    opener = gzip.open if file.suffix == ".gz" else open
    last: dict[int | None, float | None] = {}
    with opener(file, "rb") as log:
        limit = MAX_UNPACKED if file.suffix == ".gz" else None
        for number, raw in enumerate(_bounded(cast(BinaryIO, log), limit), 1):
            line = parse_line(str(file), number, raw.decode("utf-8", "replace").rstrip("\r\n"), rank)
            at = last[line.rank] = line.at if line.at is not None else last.get(line.rank)
            yield replace(line, at=at)


class _TooLong(Exception):
    """A compressed log is larger than MAX_UNPACKED."""


def _bounded(log: BinaryIO, limit: int | None) -> Iterator[bytes]:
    """The lines, truncated, so that memory is bounded for long lines and compressed files."""
    read, inside = 0, False
    while piece := log.readline(1 << 16):
        read += len(piece)
        if limit is not None and read > limit:
            raise _TooLong(f"only its first {limit >> 20} MiB (unpacked) were read")
        if not inside:
            yield piece[: 4 * MAX_LINE]
        inside = not piece.endswith(b"\n")


def _time(text: str) -> float | None:
    found = _TIME.search(text[:200]) or _GLOG.search(text[:200])
    if found is None:
        return None
    *parts, fraction = found.groups()
    year, month, day, hour, minute, second = map(int, [0] * (6 - len(parts)) + parts)  # glog has no year
    whole = ((((year * 12 + month) * 31 + day) * 24 + hour) * 60 + minute) * 60 + second
    return whole + float(f"0.{fraction or 0}")


def _weight(match: Match, blamed: int | None) -> tuple[int, int, float, bool, int, str]:
    """Sort key: level, generic patterns last, time, blamed rank, position."""
    level = {"root": 0, "symptom": 1, "warning": 2}[match.pattern.level]
    generic = int(match.pattern.id in _GENERIC and match.line.rank != blamed)
    at = match.line.at if match.line.at is not None else float("inf")
    line = match.line
    return (level, generic, at, blamed is not None and line.rank != blamed, line.number, line.path)


def _earlier(a: LogLine, b: LogLine) -> bool:
    if a.at is not None and b.at is not None and a.at != b.at:
        return a.at < b.at
    return a.path == b.path and a.number < b.number


def _fill(text: str, facts: dict[str, str]) -> str:
    text = re.sub(
        r"\[([^\[\]]*\{(\w+)\}[^\[\]]*)\]", lambda m: m.group(1) if facts.get(m.group(2)) else "", text
    )
    return re.sub(r"\{(\w+)\}", lambda m: facts.get(m.group(1), m.group(0)), text).strip()


def _find_parser() -> ModuleType | None:
    """The interpreter's parser of regular expressions. It is not public, and needed for speed only."""
    try:
        return importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
    except ImportError:
        return None


def needed_words(expression: str) -> tuple[str, ...]:
    """Words in lower case of which every matching line contains at least one: searching for them is much faster than the
    expression. Empty if there are none."""
    parser = _find_parser()
    return tuple(sorted(_needed(parser.parse(expression)))) if parser is not None else ()


def _needed(parts: Iterable[tuple[object, object]]) -> frozenset[str]:
    """The best set of needed words among the parts of a sequence."""
    found, run = [], ""
    for kind, argument in parts:
        if str(kind) == "LITERAL" and isinstance(argument, int):
            run += chr(argument).lower()
            continue
        found += [frozenset({run}), _needed_by(str(kind), argument)]
        run = ""
    known = [one for one in (*found, frozenset({run})) if one and all(one)]
    return max(known, key=lambda one: (min(map(len, one)), -len(one)), default=frozenset())


def _needed_by(kind: str, argument: object) -> frozenset[str]:
    if not isinstance(argument, tuple):
        return frozenset()
    if kind == "SUBPATTERN" or (kind in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] > 0):
        return _needed(argument[-1])
    if kind == "BRANCH":
        ways = [_needed(way) for way in argument[1]]
        return frozenset().union(*ways) if all(ways) else frozenset()
    return frozenset()
