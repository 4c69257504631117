"""Python stacks as small numbers: walk the frames, look the walk up, describe it only when it is new.

Runs in the rank on the hot path. The key of a stack is one integer per frame (code object and instruction), so
a stack seen before costs a dictionary lookup; names and lines are worked out once per distinct stack.
User frames come first: plumbing of torch.distributed and of allranks is left out, and of other library code only
the innermost few frames are kept, so that eight frames reach the user's line even from inside FSDP.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType

PLUMBING, LIBRARY, USER = 0, 1, 2
LIBRARY_FRAMES = 3  # innermost library frames kept: they say which feature made the call
MAX_WALK = 96
MAX_STACKS = 20_000  # distinct stacks remembered; further ones are recorded without a stack

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY_ROOTS = tuple(
    sorted(
        {
            path + os.sep
            for name in ("stdlib", "platstdlib", "purelib", "platlib")
            if (path := sysconfig.get_paths().get(name))
        }
    )
)
_PLUMBING_ENDS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "contextlib.py",
)

Described = list[list[object]]


class Stacks:
    """Turns the current stack into an id. `intern` stores a described stack and returns its id."""

    def __init__(self, intern: Callable[[Described], int], depth: int) -> None:
        self._intern = intern
        self._depth = depth
        self._known: dict[tuple[int, ...], int] = {}
        self._kinds: dict[int, int] = {}
        self._codes: list[CodeType] = []  # keeps ids of code objects from being reused

    def capture(self, frame: FrameType | None) -> int:
        """The id of the stack that starts at `frame`; 0 when there is none or the table is full."""
        kinds = self._kinds
        key: list[int] = []
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
        return self._known.get(tuple(key), -1)

    def describe(self, frame: FrameType | None) -> int:
        """Like `capture`, and interns a stack not seen before."""
        found = self.capture(frame)
        if found >= 0:
            return found
        if len(self._known) >= MAX_STACKS:
            return 0
        key, frames = self._walk(frame)
        number = self._intern(frames) if frames else 0
        self._known[key] = number
        return number

    def describe_other(self, thread_id: int) -> int:
        """The stack of another thread: a call made by C++ (the autograd thread) has no Python stack of its own."""
        return self.describe(sys._current_frames().get(thread_id))

    def _walk(self, frame: FrameType | None) -> tuple[tuple[int, ...], Described]:
        key: list[int] = []
        frames: Described = []
        left, library, walked = self._depth, LIBRARY_FRAMES, MAX_WALK
        while frame is not None and left and walked:
            code = frame.f_code
            kind = self._kinds.get(id(code), PLUMBING)
            if kind == USER or (kind == LIBRARY and library):
                library -= kind == LIBRARY
                left -= 1
                key.append(id(code) + (frame.f_lasti << 52))
                frames.append(
                    [
                        code.co_qualname if hasattr(code, "co_qualname") else code.co_name,
                        code.co_filename,
                        frame.f_lineno or 0,
                    ]
                )
            walked -= 1
            frame = frame.f_back
        return tuple(key), frames

    def _classify(self, code: CodeType) -> int:
        kind = classify(code.co_filename)
        self._codes.append(code)
        self._kinds[id(code)] = kind
        return kind


def classify(file: str) -> int:
    """Whether a source file is the user's, a library's, or plumbing that says nothing."""
    if file.startswith(_HERE) or file.endswith(_PLUMBING_ENDS) or file.startswith("<frozen"):
        return PLUMBING
    return LIBRARY if file.startswith(_LIBRARY_ROOTS) else USER
