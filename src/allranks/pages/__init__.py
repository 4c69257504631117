"""The one look of every HTML page: base template, style sheet, filters. Importable by every part; imports none.

A page is one file that opens from file:// without a network. Everything from outside is escaped by the template engine,
and the content security policy allows exactly our own script, by its hash. Jinja2 is imported when a page is rendered.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_COMMAND = re.compile(r"(?:: run )?`((?:\w+=\S+ )*allranks [^`]+)`")
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


def render(template: str, *, script: str = "", **values: object) -> str:
    """The whole page; `script` names a file of this folder that runs on it."""
    code = "\n".join(asset(name) for name in ("copy.js", script) if name)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    values = {"connect": "'none'", "icon": "", **values}
    found: str = (
        _environment()
        .get_template(template)
        .render(style=_safe(asset("style.css")), script=_safe(code), script_hash=f"sha256-{digest}", **values)
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


def seconds(value: float) -> str:
    """ "80 µs", "340 ms", "5.4 s", "12 min"."""
    if 0 < value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return (
        f"{value:.1f} s"
        if value < 120
        else f"{value / 60:.0f} min"
        if value < 7200
        else f"{value / 3600:.1f} h"
    )


def upper(text: str) -> str:
    """A sentence that begins with a capital letter."""
    return text[:1].upper() + text[1:]


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
        _made.filters.update(breaks=breaks, data=data, seconds=seconds, sentence=_sentence)
    return _made


_made: Environment | None = None


def breaks(text: object) -> Markup:
    """Escaped text that may wrap after the separators of paths and names, so that no word is cut."""
    from markupsafe import Markup, escape

    wbr = Markup("<wbr>")
    parts, end = [], 0
    for word in _LONG.finditer(str(text)):
        parts += [
            escape(str(text)[end : word.start()]),
            wbr.join(escape(part) for part in _BREAKS.split(word[0])),
        ]
        end = word.end()
    return Markup("").join([*parts, escape(str(text)[end:])])


def data(value: object) -> Markup:
    """JSON that cannot end its own script element, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return _safe(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _sentence(text: str) -> Markup:
    """A sentence with `code` in backticks set as code."""
    from markupsafe import Markup

    parts = str(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(breaks(part))
        if index % 2 and index < len(parts) - 1
        else breaks(part)
        for index, part in enumerate(parts)
    )


def _safe(text: str) -> Markup:
    from markupsafe import Markup

    return Markup(text)
