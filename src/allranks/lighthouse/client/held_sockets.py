"""Connected sockets of process groups, held by number of the quorum, to be shut when a member of it is gone.

`shutdown` works on the connection, not on the descriptor: a duplicate held by another process ends a
collective that the rank is blocked in (measured: in 0.5 ms), without the rank's help.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class HeldSockets:
    """Descriptors that we own, by quorum number."""

    by_number: dict[int, list[int]] = field(default_factory=dict)
    aborted_up_to: int = 0  # a member of this quorum is gone: no group of it, or of an earlier one, works

    def add(self, number: int, fds: Iterable[int]) -> None:
        """Takes ownership. What comes too late, for a quorum that lost a member already, is shut at once."""
        self.by_number.setdefault(number, []).extend(fds)
        if number <= self.aborted_up_to:
            self.shut(number)

    def shut(self, number: int) -> int:
        """Ends the connections of one quorum; returns how many. The descriptors stay held until released."""
        self.aborted_up_to = max(self.aborted_up_to, number)
        fds = self.by_number.get(number, [])
        for fd in fds:
            _shutdown(fd)
        return len(fds)

    def release(self, number: int) -> None:
        """Closes our duplicates of one quorum; the connections live on in the rank."""
        for fd in self.by_number.pop(number, []):
            os.close(fd)

    def drop_all(self, shut: bool) -> None:
        """Closes everything; `shut` ends the connections too (the rank is dead, its peers must know)."""
        for number in sorted(self.by_number):
            if shut:
                self.shut(number)
            self.release(number)


def _shutdown(fd: int) -> None:
    sock = socket.socket(fileno=fd)
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was faster
    finally:
        sock.detach()
