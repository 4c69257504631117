"""Finds the part of the recorder that is written in C, where it was built. Runs in the rank."""

from __future__ import annotations

from types import ModuleType

#: What asking torch may end with where a version, a backend or an unfinished group does not know the answer.
TORCH_ERRORS = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
EXPECTED = 5  # VERSION in _fast.c: raised with every change of what the two sides say to each other


def fast(accelerate: bool) -> ModuleType | None:
    """The module `_fast`; None when it is not wanted, was not built, or was built from another source."""
    if not accelerate:
        return None
    try:
        from allranks.record import _fast
    except ImportError:
        return None
    return _fast if getattr(_fast, "VERSION", None) == EXPECTED else None
