"""Options as frozen dataclasses, whose fields contain default, help, unit and bounds.

Checks, command-line flags, the schema of the job file and the tables in the docs are derived from them.

    @dataclass(frozen=True)
    class SaveOptions:
        interval: int = option(500, "between two checkpoints", unit="steps", above=0)

        def __post_init__(self) -> None:
            check_options(self)
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from allranks.errors import ConfigurationError


@dataclass(frozen=True)
class Meaning:
    """The metadata of one option. `choices` are its allowed values, as text; `title` is its name in messages."""

    help: str
    unit: str = ""
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    title: str = ""
    flags: tuple[str, ...] = ()  # (): --name-with-dashes
    ms: bool = False  # in seconds, but the flag takes milliseconds: --join-timeout-ms for join_timeout_s
    metavar: str = ""
    nargs: str = ""  # "+": one flag takes all values; "": repeat the flag; "...": all following words
    environment: str = ""  # variable that is used without the flag
    key: str = ""  # in the job file, with dots for sections; "": the field's name
    group: str = ""  # heading in the help
    argument: bool = False  # positional
    required: bool = False


def option(
    default: Any,
    help: str,
    *,
    flags: str = "",
    choices: Sequence[str] = (),
    **more: Any,  # the other fields of Meaning
) -> Any:
    """A field of an options class. A mutable default is given as a factory; `flags` are separated by spaces."""
    kept = {"option": Meaning(help, flags=tuple(flags.split()), choices=tuple(choices), **more)}
    if callable(default):
        return field(default_factory=default, metadata=kept)
    return field(default=default, metadata=kept)


def argument(default: Any, help: str, **more: Any) -> Any:
    """A positional argument: one word, or all remaining words for a tuple."""
    return option(default, help, argument=True, **more)


def meanings(options: Any) -> Iterator[tuple[Field[Any], Meaning]]:
    """Every option of a class or an instance, with its metadata."""
    for one in fields(options):
        if "option" in one.metadata:
            yield one, one.metadata["option"]


def key_of(one: Field[Any]) -> str:
    """An option's name in its section of the job file, with dots for subsections."""
    meaning: Meaning = one.metadata["option"]
    return meaning.key or one.name


def default_of(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def check_options(options: Any, of: str = "") -> None:
    """Raises ConfigurationError for the first option outside its bounds or choices; `of` is a prefix of the message."""
    for one, meaning in meanings(options):
        value = getattr(options, one.name)
        if value is None and default_of(one) is None:
            continue
        shown, what = value.value if isinstance(value, enum.Enum) else value, ""
        if meaning.choices and shown not in meaning.choices:
            what = f"is {shown!r}. Valid options: {list(meaning.choices)}"
        elif not meaning.choices and not isinstance(value, str | tuple) and (bound := missed(value, meaning)):
            what = f"({value}) must {bound}"
        if what:
            raise ConfigurationError(f"{of}{key_of(one)} {what}", hint=meaning.help)


def missed(value: Any, meaning: Meaning) -> str:
    """The bound that a number violates, as text; "" if it is within its bounds."""
    if meaning.above is not None and not value > meaning.above:
        return "be positive" if meaning.above == 0 else f"be above {meaning.above:g}"
    if meaning.at_least is not None and not value >= meaning.at_least:
        return "not be negative" if meaning.at_least == 0 else f"be at least {meaning.at_least:g}"
    if meaning.at_most is not None and not value <= meaning.at_most:
        return f"be at most {meaning.at_most:g}"
    return ""
