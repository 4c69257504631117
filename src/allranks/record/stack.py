"""Python stacks as small numbers: walk the frames, look the walk up, describe it only when it is new.

Runs in the rank on the hot path. The key of a stack is made of its code objects and instructions, so a stack seen
before costs a lookup; names and lines are worked out once per distinct stack. User frames come first: plumbing of
torch.distributed and of allranks is left out, and of other library code only the innermost few frames are kept, so
that eight frames reach the user's line even from inside FSDP. `_fast.c` holds the same walk in C.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from types import CodeType, FrameType
from typing import Any

from allranks.blackbox.file_writer import Box
from allranks.blackbox.layout import Item
from allranks.record.engine import fast

PLUMBING, LIBRARY, USER = 0, 1, 2
LIBRARY_FRAMES = 3  # innermost library frames kept: they say which feature made the call (as in _fast.c)
MAX_WALK = 96  # as in _fast.c
MAX_STACKS = 20_000  # distinct stacks remembered; further ones are recorded without a stack
MAX_CODES = 8_192  # code objects remembered; as in _fast.c

_PLUMBING_STARTS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, "<frozen")
_LIBRARY_ROOTS = tuple(
    {
        path + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    }
    # Packages of the user, of the distribution, of another environment on PYTHONPATH.
    | {path + os.sep for path in sys.path if os.path.basename(path) in {"site-packages", "dist-packages"}}
)
_PLUMBING_ENDS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "/contextlib.py",
)


class Stacks:
    """Turns stacks into ids of the black box."""

    def __init__(self, box: Box, depth: int, accelerate: bool) -> None:
        self._box = box
        self._depth = depth
        self._main = threading.main_thread().ident or 0
        self._count = 0
        self.engine = _make_engine(depth, self._main, accelerate)

    def at(self, frame: FrameType | None) -> int:
        """The id of the stack that starts at `frame`; 0 when there is none or the table is full.

        A call made by C++ on a thread of its own (autograd's) has no user frames: then the main thread's stack is
        taken, which waits in backward().
        """
        found: int = self.engine.capture(frame)
        if found > 0:
            return found
        if found < 0:
            found = self._learn(frame)
        if found == 0 and threading.get_ident() != self._main:
            return self._main_stack()
        return found

    def _main_stack(self) -> int:
        frame = sys._current_frames().get(self._main)
        found: int = self.engine.capture(frame)
        return found if found >= 0 else self._learn(frame)

    def _learn(self, frame: FrameType | None) -> int:
        if self._count >= MAX_STACKS or frame is None:
            return 0
        self._count += 1
        frames = describe(frame, self._depth)
        number = self._box.intern(Item.STACK, frames) if frames else 0
        self.engine.remember(frame, number)
        return number


class PyEngine:
    """The lookup of stacks in Python: one integer per frame is the key."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._known: dict[tuple[int, ...], int] = {}
        self._kinds: dict[int, int] = {}
        self._codes: list[CodeType] = []  # keeps ids of code objects from being reused

    def capture(self, frame: FrameType | None) -> int:
        """The id of the stack at this frame; 0 without a frame, -1 when it is new."""
        if frame is None:
            return 0
        return self._known.get(self._key(frame), -1)

    def remember(self, frame: FrameType, number: int) -> None:
        """Gives a stack its id."""
        self._known[self._key(frame)] = number

    def _key(self, start: FrameType) -> tuple[int, ...]:
        kinds = self._kinds
        key: list[int] = []
        frame: FrameType | None = start
        left, library, walked = self._depth, LIBRARY_FRAMES, MAX_WALK
        while frame is not None and left and walked:
            code = frame.f_code
            number = id(code)
            kind = kinds.get(number)
            if kind is None:
                kind = self._classify(code)
            if kind == 2:
                key.append(number + (frame.f_lasti << 52))
                left -= 1
            elif kind == 1 and library:
                key.append(number + (frame.f_lasti << 52))
                library -= 1
                left -= 1
            walked -= 1
            frame = frame.f_back
        return tuple(key)

    def _classify(self, code: CodeType) -> int:
        if len(self._codes) >= MAX_CODES:
            return PLUMBING
        kind = kind_of(code)
        self._codes.append(code)
        self._kinds[id(code)] = kind
        return kind


def _make_engine(depth: int, main: int, accelerate: bool) -> Any:
    module = fast(accelerate)
    if module is not None:
        return module.Stacks(depth, main, _PLUMBING_STARTS, _PLUMBING_ENDS, _LIBRARY_ROOTS)
    return PyEngine(depth)


def describe(start: FrameType, depth: int) -> list[list[object]]:
    """[name, file, line] of the frames that are kept, innermost first."""
    frames: list[list[object]] = []
    frame: FrameType | None = start
    left, library, walked = depth, LIBRARY_FRAMES, MAX_WALK
    while frame is not None and left and walked:
        code = frame.f_code
        kind = kind_of(code)
        if kind == USER or (kind == LIBRARY and library):
            library -= kind == LIBRARY
            left -= 1
            frames.append([getattr(code, "co_qualname", code.co_name), code.co_filename, frame.f_lineno or 0])
        walked -= 1
        frame = frame.f_back
    return frames


def kind_of(code: CodeType) -> int:
    """Whether a code object is the user's, a library's, or plumbing that says nothing."""
    file = code.co_filename
    if file.startswith(_PLUMBING_STARTS) or file.endswith(_PLUMBING_ENDS):
        return PLUMBING
    return LIBRARY if file.startswith(_LIBRARY_ROOTS) else USER
