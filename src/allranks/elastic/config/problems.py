"""Problems of a configuration, and YAML mistakes in words: what the parser says is about grammar, what the user needs is the line to change.

Pure: text and the parser's error in, problems out. After a mistake the parser cannot go on, so every line is
looked at for the mistakes that one glance can tell (tabs, `key:value`), and all of them are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class Problem(str):
    """A sentence that is also a place: a str, so that lists of messages stay lists of messages.

    `message` is the bare sentence; `path` is dotted ("elastic.min_nodes"); `line` and `column` count from 1
    and are None when the configuration did not come from YAML text.
    """

    message: str
    path: str
    line: int | None
    column: int | None

    def __new__(cls, message: str, path: str = "", mark: tuple[int, int] | None = None) -> Problem:
        text = message
        if mark is not None:
            text = f"line {mark[0]}, column {mark[1]}: {path + ': ' if path else ''}{message}"
        self = super().__new__(cls, text)
        self.message, self.path = message, path
        self.line, self.column = mark if mark is not None else (None, None)
        return self

    def to_dict(self) -> dict[str, str | int | None]:
        """The facts, for JSON."""
        return {"message": self.message, "path": self.path, "line": self.line, "column": self.column}


@dataclass
class ValidationResult:
    """`valid` is True when there is no error; warnings do not count against it."""

    valid: bool = True
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def result_of(errors: list[str], warnings: list[str]) -> ValidationResult:
    """The result that these problems amount to."""
    return ValidationResult(not errors, errors, warnings)


_NO_SPACE = re.compile(r"^(?P<indent>\s*(?:- +)?)(?P<key>[A-Za-z_][\w.-]*):(?P<value>[^\s:/\\].*)$")
_UNQUOTED = re.compile(r"^\s*(?:- +)?(?P<key>[\w.-]+): +(?P<value>[^\"'\[{|>#\s].*:(?: .*|$))")
_STARTS = {
    "*": "an alias (*name)",
    "&": "an anchor (&name)",
    "!": "a tag (!name)",
    "%": "a directive",
    "@": "a reserved character",
    "`": "a reserved character",
}


def explain(text: str, error: Any) -> list[Problem]:
    """Every mistake found, first to last; at least one problem."""
    lines = text.splitlines()
    found = {problem.line: problem for problem in _glance(lines)}
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        first = _unreadable(text, error)
        return [first, *found.values()]
    line = mark.line + 1
    near = {line, line - 1}
    if not near & set(found):
        problem = _at(lines, mark, error)
        found[problem.line] = problem
    return [found[key] for key in sorted(found, key=lambda key: key or 0)]


def missing_space(text: str) -> str | None:
    """The cure when `text` is a mapping whose colon lacks its space ("lr:1e-4"), else None."""
    match = _NO_SPACE.match(text.split("\n")[0].split(" ")[0]) if text else None
    if match is None:
        return None
    return f"missing space after the colon: write '{match['key']}: {match['value']}'"


def _glance(lines: list[str]) -> Iterator[Problem]:
    for number, line in enumerate(lines, 1):
        indent = line[: len(line) - len(line.lstrip())]
        if "\t" in indent and line.strip():
            yield Problem(
                "indented with a tab: YAML allows only spaces; replace each tab by two spaces",
                mark=(number, indent.index("\t") + 1),
            )
            continue
        match = _NO_SPACE.match(line)
        if match:
            cure = f"write '{match['key']}: {match['value'].strip()}'"
            yield Problem(
                f"missing space after the colon: {cure}",
                mark=(number, len(match["indent"]) + len(match["key"]) + 1),
            )


def _at(lines: list[str], mark: Any, error: Any) -> Problem:
    """The mistake at the place where the parser stopped."""
    line = lines[mark.line] if mark.line < len(lines) else ""
    place = (mark.line + 1, mark.column + 1)
    said = str(getattr(error, "problem", "") or error)
    context = str(getattr(error, "context", "") or "")
    if "\t" in line:
        return Problem("a tab stands where YAML allows only spaces; replace it by spaces", mark=place)
    first = line[mark.column : mark.column + 1] or line.strip()[:1]
    value = re.match(r"^\s*(?:- +)?[\w.-]+: +(\S.*)$", line)
    start = value[1][0] if value else first
    if start in _STARTS and (
        "scanning" in context or "cannot start any token" in said or "undefined alias" in said
    ):
        return Problem(
            f"unquoted special character {start!r}: in YAML it starts {_STARTS[start]}; "
            f"put the value in quotes{_quoted(value)}",
            mark=place,
        )
    if "mapping values are not allowed" in said:
        return _extra_colon(lines, place)
    for word, text, sentence, at_context in _GRAMMAR:
        if word in (said if text == "said" else context):
            return Problem(sentence.format(said=said), mark=_context(error, place) if at_context else place)
    return Problem(f"not valid YAML: {said}", mark=place)


#: (what stands in the parser's sentence or in its context, which of them, our sentence, where its context began)
_GRAMMAR = (
    ("another document", "said", "the file holds more than one document: a line '---' starts a second one", False),
    ("quoted scalar", "context", "a quote opened here is never closed ({said})", True),
    ("flow", "context", "a bracket or brace opened here is never closed, or a comma is missing", True),
    ("could not find expected ':'", "said", "no colon after this key: write 'key: value'", True),
    ("block", "context", "this line does not line up with the lines before it: keys of one section need the same indentation", False),
)  # fmt: skip


def _extra_colon(lines: list[str], place: tuple[int, int]) -> Problem:
    match = _UNQUOTED.match(lines[place[0] - 1])
    before = next(
        ((n, lines[n - 1].rstrip()) for n in range(place[0] - 1, 0, -1) if lines[n - 1].strip()), None
    )
    if before and re.fullmatch(r"\s*[\w.-]+", before[1]):
        return Problem(
            f"no colon after '{before[1].strip()}': write '{before[1].strip()}:'",
            mark=(before[0], len(before[1])),
        )
    if match:
        value = match["value"].strip()
        return Problem(
            f"mapping values are not allowed here: the value has an unquoted special character ':'; "
            f'quote it: {match["key"]}: "{value}"',
            mark=place,
        )
    return Problem(
        "mapping values are not allowed here: this line is indented deeper than the line before it, "
        "which already has a value; or the line before lacks the space after its colon",
        mark=place,
    )


def _quoted(value: re.Match[str] | None) -> str:
    return f': "{value[1].strip()}"' if value else ""


def _context(error: Any, place: tuple[int, int]) -> tuple[int, int]:
    mark = getattr(error, "context_mark", None)
    return (mark.line + 1, mark.column + 1) if mark is not None else place


def _unreadable(text: str, error: Any) -> Problem:
    """A character that no YAML file may hold."""
    position = getattr(error, "position", None)
    if not isinstance(position, int):
        return Problem(f"not valid YAML: {error}")
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    bad = text[position : position + 1]
    return Problem(f"the character {bad!r} is not allowed in YAML", mark=(line, column))
