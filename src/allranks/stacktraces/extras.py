"""What the kernel knows of a waiting thread beyond its stack: the descriptors, the lock and the address that it waits for.
Reads /proc and, for the arguments of system calls, a few words of memory; stops nothing."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from allranks.model.stacks import ThreadFacts
from allranks.stacktraces.asked import ThreadExtra
from allranks.stacktraces.links import epoll_members
from allranks.stacktraces.procfs import PROC, Peek, memory_of, open_inodes, read_proc, signal_set
from allranks.stacktraces.variables import Variables

_DIRECT_TEXT = "read readv write writev recvfrom recvmsg recvmmsg sendto sendmsg connect splice sendfile"
_DIRECT = frozenset(_DIRECT_TEXT.split())
MAX_FDS = 64


def read_extras(
    pid: int,
    facts: Mapping[int, ThreadFacts],
    variables: Mapping[int, Variables],
    locks: FileLocks,
) -> dict[int, ThreadExtra]:
    """What each thread waits for, by its id."""
    shared = _shared_maps(pid) if any(one.syscall == "futex" for one in facts.values()) else []
    with memory_of(pid) as peek:
        return {
            tid: _extra(pid, fact, peek, shared, variables.get(tid, Variables()), locks)
            for tid, fact in facts.items()
        }


def _extra(
    pid: int,
    fact: ThreadFacts,
    peek: Peek,
    shared: list[tuple[int, int, str]],
    known: Variables,
    locks: FileLocks,
) -> ThreadExtra:
    name, args = fact.syscall, (*fact.args, 0, 0, 0)
    waits = int.from_bytes(peek(args[0], 8), "little") if name == "rt_sigtimedwait" else 0
    pending = signal_set(pid, "ShdPnd") & ~waits if waits else 0
    opens = peek(args[1], 512).split(b"\0")[0] if name == "openat" else b""
    return ThreadExtra(
        fds=_descriptors(pid, name, fact.args, peek),
        shared=next((key for first, last, key in shared if name == "futex" and first <= args[0] < last), ""),
        connects=_address(peek(args[1], min(args[2], 112))) if name == "connect" else "",
        opens=opens.decode("utf-8", "replace"),
        signals=_signals(waits),
        pending=_signals(pending),
        holders=locks.waiting.get(pid, ()) if name in ("flock", "fcntl") else (),
        polled=locks.of_files(pid) if name in ("nanosleep", "clock_nanosleep") else (),
        selves=known.selves,
        members=known.members,
    )


def _signals(bits: int) -> tuple[str, ...]:
    return tuple(one.name for one in signal.Signals if bits >> (one - 1) & 1)


def _address(data: bytes) -> str:
    """Where a socket connects to: "unix /path", or "tcp port"."""
    family = struct.unpack_from("=H", data)[0] if len(data) > 4 else 0
    if family == socket.AF_UNIX:
        return "unix " + data[2:].split(b"\0")[0].decode("utf-8", "replace")
    internet = family in (socket.AF_INET, socket.AF_INET6)
    return f"tcp {struct.unpack_from('>H', data, 2)[0]}" if internet else ""


def _shared_maps(pid: int) -> list[tuple[int, int, str]]:
    """(first address, last, identity) of memory that several processes share: semaphores lie there."""
    found = []
    for line in read_proc(pid, "maps").splitlines():
        words = line.split(None, 5)
        if len(words) > 4 and words[1].endswith("s") and words[1].startswith("rw"):
            first, _, last = words[0].partition("-")
            found.append((int(first, 16), int(last, 16), f"shared {words[3]} {words[4]}"))
    return found


def _descriptors(pid: int, name: str, args: tuple[int, ...], peek: Peek) -> tuple[int, ...]:
    if not args:
        return ()
    if name in _DIRECT:
        return (args[0],)
    if name in ("poll", "ppoll"):
        data = peek(args[0], 8 * min(args[1], MAX_FDS))
        return tuple(struct.unpack_from("=i", data, at)[0] for at in range(0, len(data) - 7, 8))
    if name in ("select", "pselect6"):
        count = min(args[0], 1024)
        sets = [int.from_bytes(peek(at, (count + 7) // 8), "little") for at in args[1:3]]
        return tuple(fd for fd in range(count) if any(bits >> fd & 1 for bits in sets))
    if name.startswith("epoll"):
        return tuple(epoll_members(pid, args[0])[:MAX_FDS])
    return ()


# a process that waits behind another one that waits stands further to the right
_LOCK_LINE = re.compile(r"^(\d+):\s*(->)?\s*\S+\s+\S+\s+(\S+)\s+(-?\d+) \w+:\w+:(\d+)")


@dataclass(frozen=True)
class FileLocks:
    """Locks on files: process -> those that hold the one it waits for; file -> those that hold it alone."""

    waiting: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    held: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def of_files(self, pid: int) -> tuple[int, ...]:
        """The other processes that hold a lock on a file that a process has open: libraries ask for it again and again."""
        if not any(pid not in holders for holders in self.held.values()):
            return ()
        found = [holder for inode in open_inodes(pid) for holder in self.held.get(inode, ())]
        return tuple(dict.fromkeys(one for one in found if one != pid))


def with_lock_holders(pid: int, facts: tuple[ThreadFacts, ...]) -> tuple[ThreadFacts, ...]:
    """A thread that waits for a lock on a file, with the process that holds it: `lock 4711`."""
    if not any(fact.syscall in ("flock", "fcntl") for fact in facts):
        return facts
    holders = file_locks().waiting.get(pid, ())[:1]
    return tuple(
        replace(fact, file=f"lock {holders[0]}") if holders and fact.syscall in ("flock", "fcntl") else fact
        for fact in facts
    )


def file_locks() -> FileLocks:
    """All locks on files of this machine."""
    held: dict[str, list[int]] = {}
    waiting: dict[int, str] = {}
    files: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for line in (PROC / "locks").read_text().splitlines():
            if match := _LOCK_LINE.match(line):
                number, arrow, mode, pid, inode = match.groups()
                if arrow:
                    waiting[int(pid)] = number
                else:
                    held.setdefault(number, []).append(int(pid))
                    files.setdefault(int(inode), []).extend([int(pid)] if mode == "WRITE" else [])
    found = {pid: tuple(held.get(number, ())) for pid, number in waiting.items()}
    return FileLocks(found, {inode: tuple(pids) for inode, pids in files.items() if pids})
