"""`python -m allranks.recording train.py ARGS…`: records an unchanged script. Also for torchrun:

    torchrun --nproc-per-node 8 -m allranks.recording train.py --lr 1e-4
    torchrun --nproc-per-node 8 -m allranks.recording -m mypackage.train
    deepspeed --num_gpus 8 --module allranks.recording train.py

Runs in the rank. The script gets the same argv and `__main__` as without the recorder.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import pkgutil
import re
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

import allranks.recording

if TYPE_CHECKING:
    from allranks.recording.recorder import Recorder

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
SAME_ERROR_S = 30.0  # equal errors of ranks within this time are one error
USAGE = (
    "usage: python -m allranks.recording SCRIPT [ARGS…]  |  python -m allranks.recording -m MODULE [ARGS…]"
)


def main() -> None:
    """Starts the recorder, then runs the script in this process."""
    words = _script_first(sys.argv[1:])
    if not words or words[0] in {"-h", "--help"}:
        print(USAGE, file=sys.stderr if not words else sys.stdout)
        sys.exit(0 if words else 2)
    as_module = words[0] == "-m"
    if as_module and len(words) < 2:
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    sys.excepthook = partial(_show, sys.excepthook)
    recorder = _start()
    try:
        _run(words)
    except (SystemExit, KeyboardInterrupt) as error:  # sys.excepthook does not see these
        if recorder is not None:
            recorder.note_exit(error)
        raise


def _run(words: list[str]) -> None:
    """Runs the script as Python does: as `__main__` (exit handlers pickle its classes), with an absolute `__file__`."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.argv, path = words, os.path.abspath(words[0])
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        _lead_path(os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif pkgutil.get_importer(path) is not None:  # a folder, or an archive
        _lead_path(path, safe=True)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    else:
        _lead_path(os.path.dirname(os.path.realpath(path)))
        compiled = path.endswith(".pyc")
        loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
        vars(main).update(__file__=path, __cached__=None, __loader__=loader)
        with io.open_code(path) as file:
            code = loader.get_code("__main__") if compiled else compile(file.read(), path, "exec", 0, True)
        exec(code, vars(main))  # type: ignore[arg-type]


def _lead_path(folder: str, safe: bool = False) -> None:
    """Replaces our folder at the start of sys.path; with -P or $PYTHONSAFEPATH only a `safe` folder is added."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    elif safe:
        sys.path.insert(0, folder)


def _show(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Shows an error of the script without the frames of runpy and of this package."""
    theirs = trace
    while theirs is not None and _starts_scripts(theirs.tb_frame.f_code.co_filename):
        theirs = theirs.tb_next
    # a script that cannot be compiled has no frames
    if theirs is not None or issubclass(kind, SyntaxError):
        trace = theirs
    first = _raised_before(kind, error, trace)
    if first:
        text = f"{kind.__name__}: {error}".split("\n")[0]
        print(f"the same error as rank {first}, whose output has the traceback: {text}", file=sys.stderr)
    else:
        show(kind, error.with_traceback(trace), trace)


def _raised_before(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> str:
    """The rank of this node that raised the same error a moment ago; "" if there is none, or it is unknown."""
    folder, rank = os.environ.get("ALLRANKS_DIR"), os.environ.get("RANK", "")
    if not folder or not rank.isdigit() or os.environ.get("LOCAL_WORLD_SIZE") == "1":
        return ""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(trace)]
    place = hashlib.sha256(repr((kind.__name__, str(error), frames)).encode()).hexdigest()[:16]
    path = os.path.join(folder, f"raised.{place}")
    try:
        if time.time() - os.stat(path).st_mtime > SAME_ERROR_S:
            os.unlink(path)  # from an earlier attempt
    except OSError:
        pass
    try:
        with open(path, "x") as file:
            file.write(rank)
        return ""
    except FileExistsError:
        with open(path) as file:
            return file.read() or ""
    except OSError:
        return ""


def _starts_scripts(file: str) -> bool:
    return "runpy" in os.path.basename(file) or file.startswith(_OURS)


def _start() -> Recorder | None:
    """Starts the recorder; None if it cannot be loaded."""
    try:
        return allranks.recording.record(late=True)
    except Exception as error:
        print(f"allranks: recording disabled: {error}; training continues", file=sys.stderr)
        return None


def _script_first(words: list[str]) -> list[str]:
    """Moves `--local_rank=N`, which DeepSpeed and torch.distributed.launch put first, behind the script."""
    own = [word for word in words[:1] if re.fullmatch(r"--local[-_]rank=\d+", word)]
    rest = words[len(own) :]
    script = 2 if rest[:1] == ["-m"] else 1
    return [*rest[:script], *own, *rest[script:]]


if __name__ == "__main__":
    main()
