"""Output of ranks: every line gets its rank in front on the terminal, and goes unchanged to a file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

MAX_LINE_BYTES = 1 << 16


@dataclass
class LogPump:
    """Reads one rank's pipe without ever blocking; `read()` is called when the pipe is readable."""

    fd: int
    prefix: str
    terminal: BinaryIO | None
    file: BinaryIO | None
    _rest: bytes = field(default=b"")

    def read(self) -> bool:
        """Passes on what is there. False once the other side has closed the pipe."""
        try:
            chunk = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)
        return True

    def close(self) -> None:
        """Drains what is left and closes the pipe and the file."""
        try:
            while self.read():
                if not self._readable():
                    break
        except OSError:
            pass
        if self._rest:
            self._write([self._rest])
            self._rest = b""
        os.close(self.fd)
        if self.file is not None:
            self.file.close()

    def _readable(self) -> bool:
        import select

        return bool(select.select([self.fd], [], [], 0)[0])

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self.file is not None:
            try:
                self.file.write(b"".join(line + b"\n" for line in lines))
                self.file.flush()
            except OSError:
                self.file = None  # a full disk must not stop training; the terminal still has the lines
        if self.terminal is not None:
            head = self.prefix.encode()
            try:
                self.terminal.write(b"".join(head + line + b"\n" for line in lines))
                self.terminal.flush()
            except (BrokenPipeError, ValueError):
                self.terminal = None


def open_log(folder: Path | None, name: str) -> BinaryIO | None:
    """Opens a rank's log file for appending, or None when there is no folder or it cannot be written."""
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return open(folder / name, "ab")
    except OSError:
        return None
