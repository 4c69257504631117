"""Flags of a command made from an options class (allranks.model.options): names, kinds, bounds, help, defaults.

A flag that is not given leaves None, so that a job file or a variable of the environment can speak before the default.
"""

from __future__ import annotations

import argparse
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from allranks.errors import InputError
from allranks.model.options import Meaning, default_of, meanings

Options = TypeVar("Options")


def add_flags(
    parser: argparse.ArgumentParser, options: Any, names: Collection[str] = (), *, grouped: bool = False
) -> None:
    """Adds a flag for every option of a class, or for those of these names or with a heading, under their headings.
    An object instead of its class has the defaults that the help shows."""
    kinds = typing.get_type_hints(options if isinstance(options, type) else type(options))
    groups: dict[str, argparse._ArgumentGroup | argparse.ArgumentParser] = {
        **{group.title or "": group for group in parser._action_groups},
        "": parser,
    }
    for one, meaning in meanings(options):
        if (names and one.name not in names) or (grouped and not meaning.group):
            continue
        if meaning.group not in groups:
            groups[meaning.group] = parser.add_argument_group(meaning.group)
        spellings = flags_of(one.name, meaning)
        default = default_of(one) if isinstance(options, type) else getattr(options, one.name)
        settings = _settings(default, meaning, kinds[one.name])
        groups[meaning.group].add_argument(*spellings, dest=one.name, default=None, **settings)


def flags_of(name: str, meaning: Meaning) -> tuple[str, ...]:
    """The spellings of an option on the command line."""
    if meaning.ms:
        name = f"{name.removesuffix('_s')}_ms"
        return (f"--{name.replace('_', '-')}", f"--{name}")
    return meaning.flags or (f"--{name.replace('_', '-')}",)


def takes_value(options: type) -> dict[str, bool]:
    """Every spelling of every flag, and whether a value follows it."""
    kinds = typing.get_type_hints(options)
    found = {}
    for one, meaning in meanings(options):
        for flag in flags_of(one.name, meaning):
            found[flag] = bool not in _members(kinds[one.name])
            if kinds[one.name] == bool | None:
                found[flag.replace("--", "--no-", 1)] = False
    return found


def read_flags(
    options: type[Options], args: argparse.Namespace, base: Options | None = None, **more: Any
) -> Options:
    """The options: flags that were given, else `base`, else the environment, else the defaults. `more` wins."""
    found = {} if base is not None else from_variables(options, os.environ)
    for one, _ in meanings(options):
        value = getattr(args, one.name, None)
        if value is not None:
            found[one.name] = tuple(value) if isinstance(value, list) else value
    return replace(options() if base is None else base, **{**found, **more})  # type: ignore[type-var]


def from_variables(options: type, environment: Mapping[str, str]) -> dict[str, Any]:
    """What variables of the environment say."""
    kinds = typing.get_type_hints(options)
    found = {}
    for one, meaning in meanings(options):
        text = environment.get(meaning.environment, "") if meaning.environment else ""
        if text:
            try:
                found[one.name] = _kind(kinds[one.name])(text)
            except ValueError:
                wanted = _kind(kinds[one.name]).__name__
                raise InputError(
                    f"{meaning.environment}={text!r} is no {wanted}", hint=meaning.help
                ) from None
    return found


def _settings(default: Any, meaning: Meaning, hint: Any) -> dict[str, Any]:
    """What argparse must know of a flag."""
    text = meaning.help + (f", or ${meaning.environment}" if meaning.environment else "")
    if bool in _members(hint):
        if default is True:
            return {"action": "store_false", "help": f"do not {text}"}
        optional = default is None and not meaning.flags
        return {"action": argparse.BooleanOptionalAction if optional else "store_true", "help": text}
    kind = _seconds if meaning.ms else _kind(hint)
    found: dict[str, Any] = {"type": kind, "help": (text + _default(default, meaning)).replace("%", "%%")}
    if meaning.choices:
        found["choices"] = meaning.choices
    else:
        found["metavar"] = (
            meaning.metavar or ("" if meaning.ms else _UNITS.get(meaning.unit)) or _METAVARS.get(kind, "TEXT")
        )
    if _is_tuple(hint):
        found |= {"nargs": meaning.nargs} if meaning.nargs else {"action": "append"}
    return found


def _default(value: Any, meaning: Meaning) -> str:
    if value in (None, "", ()):
        return ""
    shown = value * 1000 if meaning.ms else value
    return f" (default: {shown:g})" if isinstance(shown, float) else f" (default: {shown})"


def _seconds(milliseconds: str) -> float:
    return float(milliseconds) / 1000


_UNITS = {"s": "S", "MB": "MB"}
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", _seconds: "MS"}


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union but None; a plain type is alone."""
    whole = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(kind for kind in whole if kind is not type(None))


def _is_tuple(hint: Any) -> bool:
    return any(typing.get_origin(kind) is tuple for kind in _members(hint))


def _kind(hint: Any) -> Callable[[str], Any]:
    """What makes one value from its text."""
    kind = _members(hint)[-1]
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    return kind if kind in (int, float, Path) else str
