"""One thing wrong with a configuration, and the result of checking all of it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


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
