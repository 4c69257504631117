"""The exceptions of allranks. Every one says what happened with the values, and carries a hint.

AllranksError                  anything we raise on purpose; `.hint` holds the cure
├── MissingExtra               an optional dependency is not installed; names the pip command
├── InputError                 the user gave something unreadable (file, flag, plan)
│   └── ConfigurationError     a job configuration does not hold together
└── (each area adds its own branch below, in this file)
"""

from __future__ import annotations

import importlib
from types import ModuleType


class AllranksError(Exception):
    """Base of all errors raised on purpose. `hint` is one or more lines that name the cure."""

    hint: str = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        if hint:
            self.hint = hint


class MissingExtra(AllranksError):
    """An optional dependency is needed and not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs the extra [{extra}]: pip install 'allranks[{extra}]'")
        self.feature = feature
        self.extra = extra


class InputError(AllranksError):
    """What the user gave cannot be read or used."""


class ConfigurationError(InputError):
    """A configuration value is wrong, or two of them contradict each other."""


def require(module: str, *, feature: str, extra: str) -> ModuleType:
    """Imports an optional module, or says in one sentence how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(feature, extra) from error
