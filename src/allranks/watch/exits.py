"""Notices the end of a rank at once, and decides which rank died first, and why. Runs in the agent.

A pidfd becomes readable when the process is gone. A rank whose script raised spends seconds in its exit handlers, so its
recorder writes the exception into the black box and wakes the agent with a datagram. Datagrams have no content, and those of
other users are ignored.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.blackbox.layout import wakeup_address
from allranks.model.diagnosis import Failure, describe_exit
from allranks.watch.samples import RankSample

VMSTAT = Path("/proc/vmstat")
#: Exit codes of a requested end: Ctrl-C, or a stop by the launcher (a restart, a node that joins or leaves).
_ASKED = frozenset(
    {0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 128 + signal.SIGTERM, 128 + signal.SIGINT}
)
_EXCEPTION = re.compile(r"exception: (?P<kind>\w+)(?: \((?P<where>[^()]*:\d+)\))?(?:: ?(?P<text>.*))?", re.S)
_EXIT = re.compile(
    r"exit code (?P<code>\d+)(?: \(sys\.exit at (?P<where>[^()]*:\d+)\))?(?:: ?(?P<text>.*))?", re.S
)
#: Errors of a rank that lost its peer.
_SECONDARY = re.compile(
    r"gloo|nccl|Dist(Backend|Network|Store)Error|Connection (closed|reset|refused)|Broken pipe|socket"
    r"|(Read|Write)v? error \[",
    re.I,
)
#: What torch raises when a connection between ranks breaks.
_TORCH_ERRORS = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
#: A taken port is a primary error: two ranks with the same RANK, or another program on MASTER_PORT.
_OWN = re.compile(r"EADDRINUSE|address already in use", re.I)
#: A broken connection never raises these, whatever their text.
_PROGRAM_ERRORS = frozenset(
    {"ArithmeticError", "AssertionError", "AttributeError", "FileNotFoundError", "ImportError", "IndexError"}
    | {"KeyError", "ModuleNotFoundError", "NameError", "NotImplementedError", "OverflowError"}
    | {"RecursionError", "SyntaxError", "TypeError", "UnboundLocalError", "ValueError", "ZeroDivisionError"}
)


@dataclass(frozen=True)
class Ending:
    """How a process ended. `code` as in subprocess (negative: a signal); None when another process has reaped it."""

    pid: int
    code: int | None
    at: float  # epoch seconds

    @property
    def words(self) -> str:
        return "exited without shutting down" if self.code is None else describe_exit(self.code)


MAX_DATAGRAMS = 64  # read at a time
_REAPED_S = 0.5  # limit for another thread to store the exit code that it has reaped
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass
class ExitWatcher:
    """`wait` and `hold` belong to one thread; `wake` and `know` may be called from any."""

    endings: dict[int, Ending] = field(default_factory=dict)  # by pid
    _held: dict[int, int] = field(default_factory=dict)  # pid -> pidfd
    _children: dict[int, subprocess.Popen[bytes]] = field(
        default_factory=dict
    )  # the launcher waits for these
    _selector: selectors.BaseSelector | None = None
    _datagrams: socket.socket | None = None
    _wake: int = -1  # an eventfd

    def start(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # any user can send
        with contextlib.suppress(OSError):  # a first watch in this process receives the datagrams
            self._datagrams.bind(wakeup_address(os.getpid()))
        self._datagrams.setblocking(False)
        for end in (self._wake, self._datagrams):
            self._selector.register(end, selectors.EVENT_READ, -1)

    def close(self) -> None:
        if self._selector is not None:
            self._selector.close()
            self._selector = None
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        if self._datagrams is not None:
            self._datagrams.close()
            os.close(self._wake)
        self._datagrams, self._wake = None, -1

    def wake(self) -> None:
        """Ends the current wait, or the next one."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def hold(self, pids: Iterable[int]) -> None:
        """Watches these running processes too."""
        if self._selector is None:
            return
        for pid in pids:
            self.endings.pop(pid, None)  # of an earlier process with this pid
            if pid not in self._held:
                with contextlib.suppress(OSError):  # already gone
                    fd = os.pidfd_open(pid)
                    self._held[pid] = fd
                    self._selector.register(fd, selectors.EVENT_READ, pid)

    def note_dead(self, pids: Iterable[int]) -> set[int]:
        """Records processes that were found dead before `wait` returned their end.

        Returns those that are still ending: the main thread of a process may be a zombie while other threads end, and the
        exit code is known after the last one.
        """
        ending = set()
        for pid in pids:
            if pid not in self._held:
                self._note_unheld(pid)
            elif _has_ended(self._held[pid]):
                self._note_end(pid)
            else:
                ending.add(pid)
        return ending

    def know(self, child: subprocess.Popen[bytes]) -> None:
        """Registers a child that another thread waits for and may reap."""
        self._children[child.pid] = child

    def wait(self, timeout_s: float) -> None:
        """Returns when a process ended, a rank sent a datagram or `wake` was called, or after the timeout."""
        assert self._selector is not None and self._datagrams is not None, "start() comes first"
        until = time.monotonic() + timeout_s
        if not self._select(
            timeout_s
        ):  # only other users sent datagrams: ignore further ones until the next wait
            self._selector.unregister(self._datagrams)
            self._select(max(0.0, until - time.monotonic()))
            self._selector.register(self._datagrams, selectors.EVENT_READ, -1)

    def _select(self, timeout_s: float) -> bool:
        """Handles events until the timeout; False if there were only datagrams of other users."""
        assert self._selector is not None
        found = self._selector.select(timeout_s)
        done = not found
        for key, _ in found:
            if key.data != -1:
                self._note_end(key.data)
            elif key.fileobj is self._datagrams:
                done |= self._read_datagrams()
                continue
            else:
                os.eventfd_read(self._wake)
            done = True
        return done

    def _read_datagrams(self) -> bool:
        """Reads all waiting datagrams; True if a process of this user sent one."""
        assert self._datagrams is not None
        ours = False
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_DATAGRAMS):
                for _, kind, sender in self._datagrams.recvmsg(16, socket.CMSG_SPACE(_CREDENTIALS.size))[1]:
                    ours |= kind == socket.SCM_CREDENTIALS and _CREDENTIALS.unpack(sender)[1] == os.getuid()
        return ours

    def _note_end(self, pid: int) -> None:
        assert self._selector is not None
        fd = self._held.pop(pid)
        self._selector.unregister(fd)
        self.endings[pid] = Ending(pid, self._code(os.P_PIDFD, fd, pid), time.time())
        os.close(fd)

    def _note_unheld(self, pid: int) -> None:
        """Records a process that ended before `hold` saw it."""
        if pid not in self.endings and (code := self._code(os.P_PID, pid, pid)) is not None:
            self.endings[pid] = Ending(pid, code, time.time())

    def _code(self, kind: int, child: int, pid: int) -> int | None:
        code, known = _exit_code(kind, child), self._children.pop(pid, None)
        if code is None and known is not None:
            deadline = time.monotonic() + _REAPED_S
            while (code := known.returncode) is None and time.monotonic() < deadline:
                time.sleep(0.002)
        return code


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _exit_code(kind: int, child: int) -> int | None:
    """The exit code of a child (by pid or pidfd), without reaping it; None when it has been reaped."""
    try:
        found = os.waitid(kind, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


@dataclass(frozen=True)
class Death:
    """A rank that ended and should not have. `secondary`: it ended as ranks do that lose their peer."""

    rank: int
    pid: int
    at: float  # epoch seconds
    reason: str  # "died of SIGKILL", "raised RuntimeError"
    where: str = ""  # the line that raised, "" for a sudden death
    text: str = ""  # of the exception, truncated
    secondary: bool = False
    seen: float = 0.0  # epoch seconds: when the agent noticed it; 0 = now

    @property
    def of_torch(self) -> bool:
        """Whether a connection of torch raised. Python's ConnectionRefusedError and the like belong to the program."""
        return self.reason.removeprefix("raised ") in _TORCH_ERRORS

    @property
    def loss(self) -> str:
        """How it lost the other ranks, where none of them had died."""
        timed_out = re.search(r"[Tt]ime(d |-)?out", self.text)
        return "a wait for other ranks timed out" if timed_out else "connections between ranks broke"

    @property
    def sentence(self) -> str:
        return Failure(self.rank, self.reason, self.where, self.text).sentence

    def failure(self, samples: Sequence[RankSample]) -> Failure | None:
        """The failure of the program, which may repeat; None for a secondary failure and for a kill."""
        own = next((s for s in samples if s.pid == self.pid), None)
        if own is None or self.secondary or not self.reason.startswith(("raised", "exited")):
            return None
        return Failure(self.rank, self.reason, self.where, self.text, own.step, own.calls_completed)


def find_deaths(
    samples: Sequence[RankSample], endings: Mapping[int, Ending], *, since_ns: int, raised_only: bool = False
) -> list[Death]:
    """Deaths of ranks that started at or after `since_ns`; with `raised_only`, only those that the ranks recorded themselves."""
    found, left = [], []
    for sample in samples:
        if sample.start_ns < since_ns:
            continue
        ending = endings.get(sample.pid)
        if ending is not None and ending.at * 1e9 < sample.start_ns:
            ending = None  # of an earlier process with this pid
        death = _recorded(sample) or (None if raised_only else _ended(sample, ending))
        if death is not None:
            found.append(death)
        elif ending is not None and ending.code == 0 and not (raised_only or sample.closed):
            why = f"{ending.words} while the others needed it (os._exit)"
            left.append(Death(sample.rank, sample.pid, ending.at, why, seen=ending.at))
    # a clean exit counts only if the other ranks lost their connections to this rank
    missed = found and all(death.secondary and death.reason.startswith("raised") for death in found)
    return [*found, *left] if missed else found


def find_first(deaths: Collection[Death]) -> Death | None:
    """The first primary death, else the first secondary one; None without deaths."""
    return min(deaths, key=lambda death: (death.secondary, death.at, death.rank), default=None)


def _recorded(sample: RankSample) -> Death | None:
    """The death that the rank itself recorded."""
    if (found := _EXIT.match(sample.closed)) is not None:
        if int(found["code"]) in _ASKED:
            return None
        kind, reason = "", f"exited with code {found['code']} (sys.exit)"
    elif (found := _EXCEPTION.match(sample.closed)) is not None:
        kind, reason = found["kind"], f"raised {found['kind']}"
    if found is None or kind in ("KeyboardInterrupt", "SystemExit", "SignalException"):
        return None
    text, where = (found["text"] or "").strip(), found["where"] or ""
    own = kind in _PROGRAM_ERRORS or _OWN.search(sample.closed) is not None
    secondary = not own and bool(_SECONDARY.search(sample.closed))
    return Death(sample.rank, sample.pid, sample.closed_ns / 1e9, reason, where, text, secondary)


def _ended(sample: RankSample, ending: Ending | None) -> Death | None:
    if sample.alive:
        return None
    if ending is None or ending.code is None:
        if sample.closed:
            return None
        at, seen = (ending.at, ending.at) if ending else (sample.last_ns / 1e9, 0.0)
        return Death(sample.rank, sample.pid, at, "exited without shutting down", seen=seen)
    if ending.code in _ASKED:
        return None
    secondary = ending.code == -signal.SIGABRT
    return Death(sample.rank, sample.pid, ending.at, ending.words, secondary=secondary, seen=ending.at)


def count_memory_kills() -> int:
    """Processes that the kernel has killed for lack of memory since this machine started."""
    try:
        lines = VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
