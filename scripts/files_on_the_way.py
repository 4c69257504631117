"""Count the files of src/allranks that one command passes through: `python scripts/files_on_the_way.py diagnose FOLDER`.

A file counts when one of its functions is called; what runs while a module is imported does not.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

SOURCE = str(Path(__file__).resolve().parent.parent / "src" / "allranks") + os.sep
CALLED: dict[str, str] = {}


def note(frame: FrameType, event: str, argument: object) -> None:
    """Called by Python for each call of a function."""
    code = frame.f_code
    name = code.co_filename
    if (
        event != "call"
        or name in CALLED
        or not name.startswith(SOURCE)
        or not code.co_flags & inspect.CO_OPTIMIZED
    ):
        return
    above: FrameType | None = frame.f_back
    while above is not None:
        if above.f_code.co_name == "<module>" and "importlib" in str(
            above.f_back and above.f_back.f_code.co_filename
        ):
            return
        above = above.f_back
    CALLED[name] = code.co_name


def show() -> None:
    names = sorted(name.removeprefix(SOURCE) for name in CALLED)
    folders = Counter(name.rpartition("/")[0] or "." for name in names)
    for name in names:
        print(f"{name}  {CALLED[SOURCE + name]}", file=sys.stderr)
    counts = ", ".join(f"{folder} {count}" for folder, count in folders.most_common())
    print(f"{len(names)} files: {counts}", file=sys.stderr)


def main() -> None:
    from allranks.cli import main as command

    atexit.register(show)
    threading.setprofile(note)
    sys.setprofile(note)
    sys.exit(command(sys.argv[1:]))


if __name__ == "__main__":
    main()
