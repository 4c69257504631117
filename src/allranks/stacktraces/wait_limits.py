"""How long the system call that a thread is in may last: until its own limit, or for ever.

The kernel shows the arguments of the call; a limit given by address is read from the process's memory. A sleep that ends in
a minute and one that ends in a year, a lock with a timeout and one without, look the same in a stack.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

FOR_EVER = -1.0
_TIMESPEC = struct.Struct("<qq")
#: Calls that wait without a limit of their own.
_UNLIMITED = frozenset(
    {"read", "readv", "write", "writev", "recvfrom", "recvmsg", "accept", "accept4"}
    | {"wait4", "waitid", "pause", "rt_sigsuspend", "flock", "semop"}
)
_MILLISECONDS = {"poll": 2, "epoll_wait": 3, "epoll_pwait": 3}  # the argument that holds them
_ADDRESS = {"ppoll": 2, "pselect6": 4, "select": 4, "nanosleep": 0, "rt_sigtimedwait": 2, "epoll_pwait2": 3}
_FUTEX_WAIT, _FUTEX_WAIT_BITSET, _FUTEX_REALTIME = 0, 9, 0x100
_ABSOLUTE = 1  # flag of clock_nanosleep


def wait_limit_s(name: str, args: tuple[int, ...], read: Callable[[int], float | None]) -> float | None:
    """Seconds that a system call may last from now; FOR_EVER without a limit, None when that is not known.

    `read` gives the time, in seconds, that lies at an address.
    """
    if name in _UNLIMITED:
        return FOR_EVER
    if name in _MILLISECONDS and len(args) > _MILLISECONDS[name]:
        low = args[_MILLISECONDS[name]] & 0xFFFFFFFF
        return FOR_EVER if low >> 31 else low / 1000
    if name in _ADDRESS and len(args) > _ADDRESS[name]:
        address = args[_ADDRESS[name]]
        return read(address) if address else FOR_EVER
    if name == "clock_nanosleep" and len(args) > 2:
        clock = time.CLOCK_REALTIME if args[0] == time.CLOCK_REALTIME else time.CLOCK_MONOTONIC
        return _left(read(args[2]), clock) if args[1] & _ABSOLUTE else read(args[2])
    if name == "futex" and len(args) > 3 and args[1] & 0x7F in (_FUTEX_WAIT, _FUTEX_WAIT_BITSET):
        if not args[3]:
            return FOR_EVER
        clock = time.CLOCK_REALTIME if args[1] & _FUTEX_REALTIME else time.CLOCK_MONOTONIC
        until = read(args[3])
        return _left(until, clock) if args[1] & 0x7F == _FUTEX_WAIT_BITSET else until
    return None


def _left(until_s: float | None, clock: int) -> float | None:
    return None if until_s is None else max(0.0, until_s - time.clock_gettime(clock))


def read_time(data: bytes) -> float | None:
    """Seconds of a time as it lies in memory; None when it is none."""
    if len(data) < _TIMESPEC.size:
        return None
    seconds, nanoseconds = _TIMESPEC.unpack(data)
    whole = seconds >= 0 and 0 <= nanoseconds < 10**9
    return float(seconds + nanoseconds / 1e9) if whole else None
