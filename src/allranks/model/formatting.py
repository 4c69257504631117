"""Formats ranks, durations and sizes for messages, reports and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports numpy
    from allranks.model.trace import World

#: A flag with its command, which must not be split over two lines.
FLAG = re.compile(r"(?:\ballranks (?:\w+ )?)?(?<![\w-])--?[a-z][\w-]*")
_RANKS = re.compile(r"\b([Rr])anks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)")


def rank_runs(ranks: Iterable[int]) -> list[str]:
    """["0-7", "9"]: three or more consecutive ranks form a run."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    each = ([f"{low}-{high}"] if high - low > 1 else map(str, range(low, high + 1)) for low, high in runs)
    return list(chain.from_iterable(each))


def rank_list(ranks: Iterable[int], limit: int = 12) -> str:
    """ "0-7, 9", with at most `limit` runs."""
    named = set(ranks)
    parts = rank_runs(named)
    return ", ".join(parts[:limit]) + (f", … ({len(named)} in all)" if len(parts) > limit else "")


def ranks_text(ranks: Iterable[int], limit: int = 12) -> str:
    """ "rank 5", "ranks 0, 2", "ranks 0-7, 9", "no rank"."""
    named = set(ranks)
    return f"rank{'s' if len(named) > 1 else ''} {rank_list(named, limit)}" if named else "no rank"


def rename(text: str, worlds: Sequence[World]) -> str:
    """Names ranks by their world: "ranks 0, 3 wait" becomes "trainer 0, rollout 1 wait". Unchanged with one world."""

    def named_by_world(match: re.Match[str]) -> str:
        named = set()
        for run in match[2].split(", "):
            low, _, high = run.partition("-")
            named |= set(range(int(low), int(high or low) + 1))
        parts = []
        for world in worlds:
            inside = {rank for rank in named if world.first <= rank < world.first + world.size}
            named -= inside
            parts += [f"{world.role} {rank_list(n - world.first for n in inside)}"] if inside else []
        parts += [f"a process without a black box (number {rank_list(named)})"] if named else []
        words = ", ".join(parts)
        return words[0].upper() + words[1:] if match[1] == "R" else words

    return _RANKS.sub(named_by_world, text) if worlds else text


def count(number: int, word: str, several: str = "") -> str:
    """ "1 rank", "1,024 ranks", "2 child processes"."""
    return f"{number:,} {word if number == 1 else several or f'{word}s'}"


def duration(seconds: float) -> str:
    """ "80 µs", "350 ms", "5.4 s", "31 s", "5 min 12 s", "3 h 10 min"."""
    if 0 < seconds < 0.0009995:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def age(seconds: float) -> str:
    """The duration of something that continues: whole seconds, at least one."""
    whole = max(1, round(seconds))
    return f"{whole} s" if whole < 120 else duration(whole)


def speed(per_s: float, word: str) -> str:
    """ "1,234 steps/s", "6.6 steps/s", "2.4 s per step"."""
    if per_s >= 99.95:
        return f"{per_s:,.0f} {word}s/s"
    return (
        f"{per_s:.1f} {word}s/s"
        if per_s >= 1
        else f"{1 / per_s:.1f} s per {word}"
        if per_s > 0
        else f"0 {word}s/s"
    )


def byte_size(count: int | float) -> str:
    """ "512 B", "1.5 MB": powers of 1000."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def one_line(text: str, limit: int = 200) -> str:
    """The first line of a text, with the second if the first ends with a colon, truncated to `limit`."""
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return first if len(first) <= limit else f"{first[: limit - 1].rstrip()}…"
