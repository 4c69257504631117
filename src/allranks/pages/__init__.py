"""The one look of every HTML page: base template, style sheet, filters, cards of stacks with the code around the line where a
rank is, if its file is on this machine. Importable by every part.

A page is one file that opens from file:// without a network. Everything from outside is escaped by the template engine,
and the content security policy allows exactly our own script, by its hash. Jinja2 is imported when a page is rendered.
"""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.model.formatting import FLAG, duration, rank_list
from allranks.model.parsing import without_secrets
from allranks.model.stacks import is_user_file

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


_COMMAND = re.compile(r"(?:: run )?`((?:\w+=\S+ )*allranks [^`]+)`")
SHORT = 36  # letters of code that fit a line of the narrowest screen
_LONG = re.compile(r"\S{19,}")
_BREAKS = re.compile(r"(?<=[/_.:;=\\\-])(?=\w)|(?<=,)(?=\D)|(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True)
class About:
    """The facts under the headline: what the page is about and when it was made. Empty ones are left out."""

    job: str = ""
    host: str = ""
    taken_s: float = 0.0  # when the evidence was taken, epoch seconds; 0: unknown
    taken_name: str = "Taken"
    made_s: float = 0.0  # when the page was made; 0: not shown
    facts: tuple[tuple[str, str], ...] = ()  # more (name, value) pairs

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) in reading order."""
        from allranks import __version__

        found = [("Job", self.job), ("Host", self.host), (self.taken_name, stamp(self.taken_s)), *self.facts]
        made = stamp(self.made_s)
        found.append(("Written by", f"allranks {__version__}" + (f", {made}" if made else "")))
        return [(name, value) for name, value in found if value]


def render(
    template: str, *, scripts: Sequence[str] = (), styles: Sequence[str] = (), **values: object
) -> str:
    """The whole page; `scripts` and `styles` name files of this folder that it has besides those of all pages."""
    code = "\n".join(asset(name) for name in ("copy.js", *scripts))
    style = "\n".join(asset(name) for name in ("style.css", *styles))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    values = {"connect": "'none'", "icon": "", **values}
    found: str = (
        _environment()
        .get_template(template)
        .render(style=_safe(style), script=_safe(code), script_hash=f"sha256-{digest}", **values)
    )
    return found


@lru_cache(maxsize=16)
def asset(name: str) -> str:
    """The text of a file of this folder."""
    return (files("allranks.pages") / name).read_text("utf-8")


def commands(lines: Iterable[str]) -> list[tuple[str, str]]:
    """(command, what it tells) for the commands that stand in backticks in these sentences, each once."""
    found: dict[str, str] = {}
    for line in lines:
        for match in _COMMAND.finditer(line):
            found.setdefault(match[1], f"{line[: match.start()]}{line[match.end() :]}".strip(" :,;"))
    return list(found.items())


def stamp(at: float) -> str:
    """ "2026-03-01 14:03:22 UTC"; "" for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) if at else ""


def upper(text: str) -> str:
    """A sentence that begins with a capital letter, unless it begins with the name of an operation (all_reduce)."""
    return text if "_" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def _environment() -> Environment:
    global _made
    if _made is None:
        from jinja2 import Environment, FunctionLoader, StrictUndefined

        _made = Environment(
            loader=FunctionLoader(asset),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        _made.filters.update(breaks=breaks, data=data, duration=duration, sentence=_sentence)
    return _made


_made: Environment | None = None


def breaks(text: object) -> Markup:
    """Escaped text that may wrap after the separators of paths and names, so that no word is cut. Flags do not wrap."""
    from markupsafe import Markup

    parts, end = [], 0
    for flag in FLAG.finditer(str(text)):
        parts += [_with_breaks(str(text)[end : flag.start()]), _whole("span", flag[0])]
        end = flag.end()
    return Markup("").join([*parts, _with_breaks(str(text)[end:])])


def _with_breaks(text: str) -> Markup:
    from markupsafe import Markup, escape

    wbr = Markup("<wbr>")
    parts, end = [], 0
    for word in _LONG.finditer(text):
        parts += [
            escape(text[end : word.start()]),
            wbr.join(escape(part) for part in _BREAKS.split(word[0])),
        ]
        end = word.end()
    return Markup("").join([*parts, escape(text[end:])])


def _whole(tag: str, text: str) -> Markup:
    from markupsafe import Markup

    return Markup('<{0} class="whole">{1}</{0}>').format(Markup(tag), text)


def data(value: object) -> Markup:
    """JSON that cannot end its own script element, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return _safe(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _sentence(text: str) -> Markup:
    """A sentence with `code` in backticks set as code."""
    from markupsafe import Markup

    parts = str(text).split("`")
    return Markup("").join(
        (_whole("code", part) if len(part) <= SHORT else Markup("<code>{}</code>").format(breaks(part)))
        if index % 2 and index < len(parts) - 1
        else breaks(part)
        for index, part in enumerate(parts)
    )


def _safe(text: str) -> Markup:
    from markupsafe import Markup

    return Markup(text)


AROUND = 4  # lines of code before and after
MAX_FRAMES = 14
MAX_SOURCE_BYTES = 4 << 20
MAX_LINE = 200

#: What is said of a stack besides its label.
NOTES = {"last finished call": "This is where it made its last finished call, not where it is now."}


@dataclass(frozen=True)
class FrameLine:
    """One frame as it is shown."""

    name: str
    file: str
    line: int
    library: bool = False


@dataclass(frozen=True)
class Source:
    """A piece of a source file: (line number, text, whether it is the line meant)."""

    title: str
    lines: tuple[tuple[int, str, bool], ...]


@dataclass(frozen=True)
class StackCard:
    """A stack with its heading."""

    title: str
    label: str
    level: str  # "bad", "warn", "good" or ""
    frames: tuple[FrameLine, ...]
    guilty: bool = False
    note: str = ""
    source: Source | None = None


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    cells: tuple[str, ...]
    level: str = ""


def stack_card(ranks: tuple[int, ...], lines: tuple[FrameLine, ...], label: str, guilty: bool) -> StackCard:
    """The card of ranks that share a stack; a guilty rank's shows its code too."""
    title = f"Rank{'s' if len(ranks) > 1 else ''} {rank_list(ranks)}"
    if not guilty:
        return StackCard(title, "waiting", "warn", lines)
    note = NOTES.get(label, "")
    shown = f"{label} stack" if label == "live" else label or "stack"
    return StackCard(title, shown, "warn" if note else "bad", lines, True, note, read_source(lines))


def frame_lines(frames: Iterable[tuple[str, str, int]]) -> tuple[FrameLine, ...]:
    """(name, file, line) of each frame, innermost first; in long stacks frames of libraries are left out."""
    lines = [FrameLine(name, file, line, not is_user_file(file)) for name, file, line in frames]
    room = MAX_FRAMES - sum(not frame.library for frame in lines)
    kept = []
    for frame in lines:
        room -= frame.library
        if not frame.library or room >= 0:
            kept.append(frame)
    return tuple(kept[: 3 * MAX_FRAMES])


def without_stale(cards: Iterable[StackCard]) -> list[StackCard]:
    """Leaves out where a rank was when it is known where it is."""
    found = list(cards)
    live = {card.title for card in found if card.label == "live stack"}
    return [card for card in found if card.title not in live or card.label == "live stack" or not card.guilty]


def read_source(frames: Sequence[FrameLine]) -> Source | None:
    """The code around the innermost line of the user's own, without secrets; None when its file is not here.

    The writer of the dump chose the path: a link of that name must not lead to anything but Python.
    """
    frame = next((f for f in frames if not f.library), None)
    if frame is None or not frame.file.endswith(".py") or frame.line < 1:
        return None
    try:
        real = Path(frame.file).resolve()
        if real.suffix != ".py" or not real.is_file() or real.stat().st_size > MAX_SOURCE_BYTES:
            return None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle
        return None
    linecache.checkcache(frame.file)
    text = linecache.getlines(frame.file)
    if frame.line > len(text):
        return None
    low, high = max(1, frame.line - AROUND), min(len(text), frame.line + AROUND)
    lines = [
        (number, without_secrets(text[number - 1].rstrip())[:MAX_LINE], number == frame.line)
        for number in range(low, high + 1)
    ]
    return Source(f"{frame.file}:{frame.line}", tuple(lines))
