"""Texts that a line must have for a regular expression to match it: looking for them is much faster than the expression."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import ModuleType


def _find_parser() -> ModuleType | None:
    """How the interpreter reads an expression: not a public module, and not needed for right answers."""
    try:
        return importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
    except ImportError:
        return None


_parser = _find_parser()


def needed_words(expression: str) -> tuple[str, ...]:
    """In lower case; every line that matches has at least one of them. Empty: nothing is known."""
    return tuple(sorted(_needed(_parser.parse(expression)))) if _parser is not None else ()


def _needed(parts: Iterable[tuple[object, object]]) -> frozenset[str]:
    """Of a sequence: the best of what each of its parts needs."""
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
