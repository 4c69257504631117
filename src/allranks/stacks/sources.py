"""Reads the text of the lines that threads stand on, through the target's own root folder."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from allranks.model.stacks import StackFrame, ThreadStack
from allranks.stacks.user_code import is_user_file

MAX_BYTES = 4 << 20
MAX_FRAMES = 3  # of the user's own, innermost


class SourceLines:
    """A cache of source files. A file changed since the process read it gives a wrong line: it is a hint only."""

    def __init__(self) -> None:
        self._files: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def attach(self, stacks: tuple[ThreadStack, ...], pid: int) -> tuple[ThreadStack, ...]:
        """The same stacks, with the text of the user's innermost lines."""
        return tuple(replace(stack, frames=self._frames(stack.frames, pid)) for stack in stacks)

    def _frames(self, frames: tuple[StackFrame, ...], pid: int) -> tuple[StackFrame, ...]:
        done, result = 0, []
        for frame in frames:
            if done < MAX_FRAMES and not frame.native and is_user_file(frame.file):
                done += 1
                frame = replace(frame, source=self._line(frame, pid))
            result.append(frame)
        return tuple(result)

    def _line(self, frame: StackFrame, pid: int) -> str:
        with self._lock:
            if frame.file not in self._files:
                self._files[frame.file] = self._read(frame.file, pid)
            lines = self._files[frame.file]
        return lines[frame.line - 1].strip()[:200] if 0 < frame.line <= len(lines) else ""

    def _read(self, file: str, pid: int) -> list[str]:
        if not file.startswith("/"):
            return []
        try:
            path = Path(f"/proc/{pid}/root{file}")
            if path.stat().st_size > MAX_BYTES or not path.is_file():
                return []
            return path.read_bytes().decode("utf-8", "replace").splitlines()
        except OSError:
            return []
