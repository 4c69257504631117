"""Shared by commands: output, colour, progress, and writing files."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from allranks.errors import InputError, why
from allranks.model.files import replacing
from allranks.model.formatting import FLAG
from allranks.model.parsing import printable

LONG_S = 1.0  # longer work shows progress
_CLEAR = "\r\x1b[K"  # the line under the cursor
_PAINT = re.compile(r"\x1b\[[0-9;]*m")
_WHOLE = re.compile(rf"`[^`]{{1,36}}`|{FLAG.pattern}")
_GLUE = "\xa0"  # where textwrap does not break
_OURS = re.compile(r"(\x1b\[(?:[0-2]|3[1-6])m|[\n\t])")


def answer(as_json: bool, facts: Mapping[str, object], lines: str | Iterable[str]) -> None:
    """Prints one JSON object, or lines of text."""
    if as_json:
        print(json.dumps({"schema": 1, **facts}))
        return
    for line in [lines] if isinstance(lines, str) else lines:
        print(harmless(line))


def harmless(text: str) -> str:
    """Replaces control characters, except line ends and our colours, since names may contain escape sequences."""
    if text.isprintable():
        return text
    parts = _OURS.split(text)  # odd parts are ours
    return "".join(part if i % 2 else printable(part, len(part)) for i, part in enumerate(parts))


def fold(line: str) -> list[str]:
    """Wraps a line to the width of the terminal; unchanged if the output is not a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    plain = _PAINT.sub("", line)
    if not width or len(plain) <= width:
        return [line]
    indent = " " * min(len(plain) - len(plain.lstrip(" -")), width // 2)
    lines = wrap(plain, width, indent or "  ")
    codes = _PAINT.findall(line)
    return [f"{codes[0]}{each}{codes[-1]}" for each in lines] if codes else lines


def wrap(text: str, width: int, indent: str = "  ") -> list[str]:
    """Wraps a text between words. Short commands, and flags with their values, stay on one line."""
    glued = _WHOLE.sub(lambda found: found[0].replace(" ", _GLUE), text)
    lines = textwrap.wrap(
        glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_GLUE, " ") for line in lines]


def note(text: str) -> None:
    """Prints a line on stderr."""
    print(harmless(text), file=sys.stderr, flush=True)


def use_color(stream: TextIO | None = None) -> bool:
    """Whether to use colour: by NO_COLOR, FORCE_COLOR, then the terminal."""
    stream = stream or sys.stdout
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return os.environ["FORCE_COLOR"] != "0"
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def at_work(label: str) -> Iterator[None]:
    """Shows "label … 3 s" on a terminal's stderr during long work, and clears it at the end."""
    if not sys.stderr.isatty():
        yield
        return
    done, began, pause = threading.Event(), time.monotonic(), LONG_S

    def show() -> None:
        nonlocal pause
        while not done.wait(pause):
            pause = 0.5
            print(f"{_CLEAR}{label} … {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True)

    worker = threading.Thread(target=show, name="allranks-progress", daemon=True)
    worker.start()
    try:
        yield
    finally:
        done.set()
        worker.join()
        if pause != LONG_S:  # the label is shown
            print(_CLEAR, end="", file=sys.stderr, flush=True)


class ProgressBar:
    """A progress line on a terminal's stderr, redrawn at most ten times a second; `clear` removes it."""

    def __init__(self, title: str = "", *, quiet: bool = False) -> None:
        self._title, self._visible = f"{title} " if title else "", not quiet and sys.stderr.isatty()
        self._began, self._drawn = time.monotonic(), 0.0

    def show(self, done: int, total: int, text: str = "") -> None:
        """Draws the bar, followed by the text."""
        now = time.monotonic()
        if not self._visible or (now - self._drawn < 0.1 and done < total):
            return
        self._drawn = now
        share = min(1.0, done / total) if total else 1.0
        full = int(share * 30)
        line = f"{self._title}[{'#' * full}{'.' * (30 - full)}] {share:4.0%}  {text}"
        print(f"{_CLEAR}{line}", end="", file=sys.stderr, flush=True)

    def per_second(self, done: float) -> float:
        """The speed since the bar was made."""
        return done / max(1e-6, time.monotonic() - self._began)

    def clear(self) -> None:
        if self._drawn:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


def check_target(name: str, force: bool) -> None:
    """InputError when this file cannot be written, before any work; "" means no file."""
    path = Path(name)
    if not name:
        return
    if not path.parent.is_dir():
        raise InputError(f"cannot write {name}: there is no folder {path.parent}", hint="Make it first.")
    if path.is_dir():
        raise InputError(f"cannot write {name}: it is a folder", hint="Name a file in it.")
    if not force and path.is_file() and path.stat().st_size:
        raise InputError(f"{name} exists", hint="Give another name, or --force to overwrite it.")


def check_folder(name: str) -> None:
    """InputError when this folder can neither be written nor created; "" means no folder."""
    path = Path(name).absolute()
    nearest = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if name and not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        why = "may not be written" if nearest.is_dir() else "is not a folder"
        raise InputError(f"cannot write to {name}: {nearest} {why}", hint="Give another folder.")


def write_whole(name: str, parts: Iterable[str | bytes]) -> None:
    """Writes a file completely or not at all; gzipped if its name ends with .gz."""
    import gzip

    target = Path(name)
    special = target.exists() and not target.is_file()  # /dev/stdout
    try:
        with (
            at_work(f"writing {name}"),
            nullcontext(target) if special else replacing(target) as draft,
            gzip.open(draft, "wb", 5) if name.endswith(".gz") else draft.open("wb") as file,
        ):
            for part in parts:
                file.write(part if isinstance(part, bytes) else part.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(f"cannot write {name}: {why(error)}") from error
    print(f"Wrote {name}", file=sys.stderr)
