"""Count the files of src/allranks that a command passes through.

    python scripts/files_on_the_way.py diagnose FOLDER
    python scripts/files_on_the_way.py --after FLAG --until publish.py:write_page run --standalone --nproc-per-node 2 hang.py
    python scripts/files_on_the_way.py --after FLAG --until training.py:_committed --thread lighthouse-server run --replicas 3 train.py

A file counts when one of its functions is called; what runs while a module is imported does not. With `--after` a file counts from the
moment that FLAG exists (the program makes it before it hangs or dies), with `--until` up to the first call of that function. The ranks
of a job are traced too; `--thread` is for the command's own process: only calls in threads of this name count there.
"""

from __future__ import annotations

import argparse
import atexit
import inspect
import os
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

SOURCE = str(Path(__file__).resolve().parent.parent / "src" / "allranks") + os.sep
VARIABLE = "FILES_ON_THE_WAY"  # folder, flag and last function, for the ranks


class Way:
    """The files that this process has called, in the order of their first calls."""

    def __init__(self, folder: str, after: str, until: str, thread: str = "") -> None:
        self.folder, self.after, self.until, self.thread = folder, after, until, thread
        self.called: dict[str, None] = {}
        self.over = False
        atexit.register(self.write)
        threading.setprofile(self.note)
        sys.setprofile(self.note)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Python calls it for each call of a function."""
        code = frame.f_code
        if event != "call" or self.over or not code.co_filename.startswith(SOURCE):
            return
        if self.until == f"{os.path.basename(code.co_filename)}:{code.co_name}" and self._begun():
            self.over = True
        if (
            code.co_filename not in self.called
            and code.co_flags & inspect.CO_OPTIMIZED
            and self._counts(frame)
        ):
            self.called[code.co_filename] = None
        if self.over:
            self.write()  # a rank may be killed

    def _begun(self) -> bool:
        return not self.after or os.path.exists(self.after)

    def _counts(self, frame: FrameType) -> bool:
        if self.thread not in threading.current_thread().name or not self._begun():
            return False
        above = frame.f_back
        while above is not None:  # not while a module is imported
            if "importlib._bootstrap" in above.f_code.co_filename:
                return False
            above = above.f_back
        return True

    def write(self) -> None:
        names = (name.removeprefix(SOURCE) for name in self.called)
        Path(self.folder, str(os.getpid())).write_text("\n".join(names))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--after", default="", metavar="FLAG")
    parser.add_argument("--until", default="", metavar="FILE.py:FUNCTION")
    parser.add_argument("--thread", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="files-on-the-way-")
    os.environ[VARIABLE] = "|".join((folder, args.after, args.until))
    os.environ["ALLRANKS_PRELOAD"] = "files_on_the_way"
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    atexit.register(show, Path(folder))  # runs after `write`
    from allranks.cli import main as command

    Way(folder, args.after, args.until if not args.thread else "", args.thread)
    sys.exit(command(args.command))


def show(folder: Path) -> None:
    sys.setprofile(None)
    found: dict[str, list[str]] = {}
    for one in sorted(folder.iterdir()):
        for name in filter(None, one.read_text().split("\n")):
            found.setdefault(name, []).append("here" if one.name == str(os.getpid()) else "rank")
    for name in sorted(found):
        print(f"{name}  {' '.join(sorted(set(found[name])))}", file=sys.stderr)
    folders = Counter(name.rpartition("/")[0] or "." for name in found)
    counts = ", ".join(f"{one} {count}" for one, count in folders.most_common())
    print(f"{len(found)} files: {counts}", file=sys.stderr)


if __name__ == "__main__":
    main()
elif os.environ.get(VARIABLE):
    Way(*os.environ[VARIABLE].split("|"))
