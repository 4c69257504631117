"""Sets of ranks as people write them: `0-3,5,7-1023`. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def compress(ranks: Iterable[int]) -> str:
    """`0-3,5,7-1023` for a set of ranks; "" for none."""
    parts: list[str] = []
    start = last = None
    for rank in sorted(set(ranks)):
        if last is not None and rank == last + 1:
            last = rank
            continue
        if start is not None and last is not None:
            parts.append(_span(start, last))
        start = last = rank
    if start is not None and last is not None:
        parts.append(_span(start, last))
    return ",".join(parts)


def _span(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first},{last}" if last == first + 1 else f"{first}-{last}"
