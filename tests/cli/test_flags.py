"""Flags made from an options class: kinds, names, precedence, and help that shows the true default."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from allranks.cli.parser import add_flags, read_flags, takes_value
from allranks.errors import ConfigurationError, InputError
from allranks.model.options import check_options, option


@dataclass(frozen=True)
class Example:
    """One option of every kind."""

    size: int = option(3, "of it", at_least=1, environment="EXAMPLE_SIZE")
    wait_s: float = option(0.5, "before it", unit="s", ms=True, at_least=0)
    names: tuple[str, ...] = option((), "of all", metavar="NAME")
    ranks: tuple[int, ...] = option((), "of some", nargs="+")
    folder: Path | None = option(None, "for it", flags="-f --folder")
    record: bool = option(True, "record it", flags="--no-record")
    keep: bool | None = option(None, "keep it")
    fast: bool = option(False, "hurry")
    mode: str | None = option(None, "how", choices=("on", "off"))

    def __post_init__(self) -> None:
        check_options(self)


def parse(*words: str) -> Example:
    """The options of a command line."""
    parser = argparse.ArgumentParser()
    add_flags(parser, Example)
    return read_flags(Example, parser.parse_args(words))


def test_no_flag_is_the_default() -> None:
    """Of every kind."""
    assert parse() == Example()


def test_every_kind_of_flag_is_read() -> None:
    """Milliseconds become seconds, lists become tuples, --no-x switches off."""
    words = [
        "--size",
        "7",
        "--wait-ms",
        "250",
        "--names",
        "a",
        "--names",
        "b",
        "--ranks",
        "1",
        "2",
        "-f",
        "/x",
    ]
    found = parse(*words, "--no-record", "--no-keep", "--fast", "--mode", "on")
    assert found == Example(7, 0.25, ("a", "b"), (1, 2), Path("/x"), False, False, True, "on")
    assert parse("--wait_ms", "250") == parse("--wait-ms", "250")


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is not a number is named."""
    monkeypatch.setenv("EXAMPLE_SIZE", "5")
    assert (parse().size, parse("--size", "4").size) == (5, 4)
    monkeypatch.setenv("EXAMPLE_SIZE", "many")
    with pytest.raises(InputError, match="EXAMPLE_SIZE='many' is not a valid int"):
        parse()


def test_a_value_out_of_bounds_is_refused_with_the_value() -> None:
    """Under the name that was written: it was "wait_s (-0.25)". From elsewhere, by the class."""
    for words, text in (
        (("--size", "0"), r"--size \(0\) must be at least 1"),
        (("--wait-ms", "-250"), r"--wait-ms \(-250\) must not be negative"),
    ):
        with pytest.raises(ConfigurationError, match=f"^{text}"):
            parse(*words)
    with pytest.raises(ConfigurationError, match=r"^size \(0\) must be at least 1"):
        Example(0)


def test_the_help_shows_the_defaults_of_the_object_that_it_is_given() -> None:
    """A command may have another default than the part."""
    parser = argparse.ArgumentParser()
    add_flags(parser, Example(size=9, wait_s=2.0), ("size", "wait_s"))
    text = " ".join(parser.format_help().split())
    assert "of it, or $EXAMPLE_SIZE (default: 9)" in text and "before it (default: 2000)" in text
    assert "--names" not in text


def test_which_flags_take_a_value_is_known_without_parsing() -> None:
    """`run` must tell its flags from torchrun's."""
    found = takes_value(Example)
    assert found["--size"] and found["-f"] and found["--wait_ms"] and found["--mode"]
    assert not (found["--no-record"] or found["--keep"] or found["--no-keep"] or found["--fast"])
