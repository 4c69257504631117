"""What processes are connected by: sockets, pipes and shared semaphores, with the other end of each. Reads /proc and the
kernel's socket tables (netlink); stops nothing.

TCP tells which end sent last: who has sent a request and got nothing since waits for the other end, whatever library it uses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from allranks.model.stacks import ProcessLink
from allranks.stacktraces.procfs import PROC, read_proc, turns_of_threads

_LISTEN, _DUMP, _DONE, _ERROR = 10, 0x301, 3, 2
_SOCK_DIAG, _BY_FAMILY = 4, 20


@dataclass(frozen=True)
class Socket:
    """One row of the kernel's tables. `sent_ms`, `received_ms`: how long ago; None unknown."""

    inode: int
    kind: str
    end: str
    peer: str
    port: int = 0
    sent_ms: int | None = None
    received_ms: int | None = None
    volume: int = 0  # bytes so far, both ways
    turn: str = ""  # of a Unix socket: whose bytes are not read yet


@dataclass(frozen=True)
class _OpenFiles:
    """What a process has open: links that do not change, and sockets: descriptor, inode, the library that watches it."""

    turns: dict[int, int]  # of its threads, before it was read
    links: tuple[ProcessLink, ...]
    sockets: tuple[tuple[int, int, str], ...]


class LinkReader:
    """Reads the links of processes. What a process has open is read again only when it has run meanwhile."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._open: dict[int, _OpenFiles] = {}
        self._never_block: dict[str, bool] = {}  # pipes, while one look lasts: forked processes share them

    def read_volumes(self, pids: Sequence[int]) -> dict[str, int]:
        """Bytes that went over each connection so far, by its end."""
        return {one.end: one.volume for table in _tables(pids, self._node).values() for one in table.values()}

    def read_links(
        self, pids: Sequence[int], before: Mapping[str, int]
    ) -> dict[int, tuple[ProcessLink, ...]]:
        """The links of each process, by pid, those marked over which bytes went since `before`. Sockets of a network namespace
        that is not ours have no turn."""
        tables = _tables(pids, self._node)
        waiting: dict[tuple[str, int], list[Socket]] = {}  # connections that nobody has accepted
        for space, table in tables.items():
            for one in (one for inode, one in table.items() if inode < 0):
                waiting.setdefault((space, one.port), []).append(one)
        self._never_block.clear()
        self._open = {pid: self._files(pid) for pid in pids}
        found: dict[int, tuple[ProcessLink, ...]] = {}
        for pid in pids:
            space = _namespace(pid)
            table = tables.get(space, {})
            sockets = [(fd, table[n], owner) for fd, n, owner in self._open[pid].sockets if n in table]
            links = [_link(fd, one, owner, before) for fd, one, owner in sockets]
            ports = {one.port for _, one, _ in sockets if one.kind == "listen"}
            late = [one for port in ports for one in waiting.get((space, port), ())]
            links += [replace(_link(-1, one, "", before), turn="owes") for one in late]
            found[pid] = (*links, *self._open[pid].links)
        return found

    def _files(self, pid: int) -> _OpenFiles:
        turns, known = turns_of_threads(pid), self._open.get(pid)
        same = known is not None and turns and known.turns == turns
        return known if known is not None and same else _read_files(pid, turns, self._node, self._never_block)


def _tables(pids: Sequence[int], node: str) -> dict[str, dict[int, Socket]]:
    """The sockets of each network namespace."""
    spaces = {_namespace(pid): pid for pid in pids}
    own = _namespace(os.getpid())
    tables = {space: _sockets(pid, f"{node}/{space}", space == own) for space, pid in spaces.items()}
    return {"": {}, **tables}  # of a process that ends meanwhile


def _namespace(pid: int) -> str:
    try:
        return os.readlink(PROC / str(pid) / "ns/net").removeprefix("net:")
    except OSError:
        return ""


def _sockets(pid: int, scope: str, ours: bool) -> dict[int, Socket]:
    found = {one.inode: one for one in _tcp_rows(pid, scope)}
    if ours:
        with contextlib.suppress(OSError, struct.error):
            for family in (socket.AF_INET, socket.AF_INET6):
                for row in _ask_kernel(struct.pack("=BBBBI48x", family, 6, 2, 0, 0xFFFFFFFF)):
                    _add_times(found, row)
            for row in _ask_kernel(struct.pack("=BBHIIIQ", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 29, 0)):
                found |= {one.inode: one for one in _unix(row, scope)}
    return found


def _tcp_rows(pid: int, scope: str) -> Iterable[Socket]:
    rows = [
        line.split() for name in ("net/tcp", "net/tcp6") for line in read_proc(pid, name).splitlines()[1:]
    ]
    ports = {(scope, _address(row[1])[1]) for row in rows if row[3] == "0A"}
    for row in rows:
        (host, port), (far, far_port), inode = _address(row[1]), _address(row[2]), int(row[9])
        if row[3] == "0A":
            yield Socket(inode, "listen", f"tcp {scope} listen {port}", "", port)
        elif inode or (scope, port) in ports:
            here = f"{scope} " if host.startswith("127.") or host == "::1" else ""
            end, peer = (
                f"tcp {here}{host}:{port}>{far}:{far_port}",
                f"tcp {here}{far}:{far_port}>{host}:{port}",
            )
            server = (scope, port) in ports
            # a connection that nobody has accepted has no file yet: it belongs to the listener
            yield Socket(inode or -port - 65536 * far_port, "server" if server else "client", end, peer, port)


@lru_cache(maxsize=10_000)
def _address(text: str) -> tuple[str, int]:
    """`0100007F:1F90` is 127.0.0.1, 8080; an IPv4 address in an IPv6 socket is the IPv4 one."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)


def _ask_kernel(request: bytes) -> list[bytes]:
    """The rows of a dump of the kernel's sockets."""
    rows: list[bytes] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as line:
        line.settimeout(2.0)
        line.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = line.recv(1 << 20)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_DONE, _ERROR):
                    return rows
                rows.append(data[16:length])
                data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if length < 4:
            break
        found[kind] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found


def _add_times(found: dict[int, Socket], row: bytes) -> None:
    """Adds when a connection last sent and received (inet_diag_msg, then tcp_info)."""
    inode = struct.unpack_from("=I", row, 68)[0]
    info = _attributes(row[72:]).get(2, b"")
    if inode in found and len(info) >= 136 and row[1] != _LISTEN:
        sent, received = struct.unpack_from("=I", info, 44)[0], struct.unpack_from("=I", info, 52)[0]
        volume = sum(struct.unpack_from("=QQ", info, 120))
        found[inode] = replace(found[inode], sent_ms=sent, received_ms=received, volume=volume)


def _unix(row: bytes, scope: str) -> Iterable[Socket]:
    """A socket; of a listener also the connections that it has not accepted, which have no file yet."""
    inode, more = struct.unpack_from("=I", row, 4)[0], _attributes(row[16:])
    peer = more.get(2, b"")
    if row[2] == _LISTEN:
        name = more.get(0, b"").rstrip(b"\0").decode("utf-8", "replace")
        for (client,) in struct.iter_unpack("=I", more.get(3, b"")) if name else ():
            yield Socket(-client, "unix", f"unix {scope} late {client}", f"unix {scope} {client}", -inode)
        if name:
            yield Socket(inode, "listen", f"unix {scope} listen {name}", "", -inode)
    elif len(peer) >= 4:
        there = struct.unpack("=I", peer[:4])[0] or f"late {inode}"
        unread, sent = struct.unpack("=II", more.get(4, bytes(8)))
        turn = "awaits" if sent else "owes" if unread else ""
        yield Socket(
            inode, "unix", f"unix {scope} {inode}", f"unix {scope} {there}", volume=unread + sent, turn=turn
        )


def _read_files(pid: int, turns: dict[int, int], node: str, never_block: dict[str, bool]) -> _OpenFiles:
    links, sockets = [], []
    owners = _library_sockets(pid)
    for fd, target, mode in _descriptors(pid):
        if target.startswith("socket:["):
            sockets.append((fd, int(target[8:-1]), owners.get(fd, "")))
        elif target.startswith("pipe:[") or _is_fifo(pid, fd, target):
            pipe = f"pipe {node} {target}"
            # a FIFO that is open for both is read, as far as one can tell
            for side, other, bit in (("write", "read", 0o200), ("read", "write", 0o400)):
                if mode & bit:
                    if side == "write" and target not in never_block:
                        never_block[target] = _never_blocks(pid, fd)
                    owner = "signals" if side == "write" and never_block[target] else ""
                    links.append(
                        ProcessLink(fd, "pipe", f"{pipe} {side}", f"{pipe} {other}", side, owner=owner)
                    )
    links += [ProcessLink(-1, "shared", key, key, owner=owner) for key, owner in _shared(pid).items()]
    return _OpenFiles(turns, tuple(links), tuple(sockets))


def _never_blocks(pid: int, fd: int) -> bool:
    """Whether writes to a descriptor never block, as those of signal handlers must not."""
    flags = read_proc(pid, f"fdinfo/{fd}").partition("flags:")[2].split()
    return bool(flags) and bool(int(flags[0], 8) & os.O_NONBLOCK)


def _shared(pid: int) -> dict[str, str]:
    """Identity -> "semaphore" or "memory" of what a process has mapped of /dev/shm."""
    rows = (line.split(None, 5) for line in read_proc(pid, "maps").splitlines() if "/dev/shm/" in line)
    names = {f"shared {row[3]} {row[4]}": row[5] for row in rows if row[1].startswith("rw-s")}
    return {key: "semaphore" if "/sem." in name else "memory" for key, name in names.items()}


def _link(fd: int, one: Socket, owner: str, before: Mapping[str, int]) -> ProcessLink:
    turn = one.turn
    if one.sent_ms is not None and one.received_ms is not None and abs(one.sent_ms - one.received_ms) > 1:
        turn = "awaits" if one.sent_ms < one.received_ms else "owes"
    kind = one.kind if one.kind in ("listen", "unix") else "tcp"
    moved = before.get(one.end, -1) != one.volume  # a new connection, too
    side = one.kind if kind == "tcp" else ""
    quiet = (
        None if one.sent_ms is None or one.received_ms is None else min(one.sent_ms, one.received_ms) / 1000
    )
    return ProcessLink(fd, kind, one.end, one.peer, side, turn, moved, owner, one.volume, quiet)


def _descriptors(pid: int) -> Iterable[tuple[int, str, int]]:
    """(number, what it leads to, permissions) of each descriptor."""
    folder = f"{PROC}/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            try:
                path = f"{folder}/{name}"
                target = os.readlink(path)
                mode = os.lstat(path).st_mode if target.startswith(("pipe", "/")) else 0
            except OSError:  # closed meanwhile
                continue
            yield int(name), target, mode


def _is_fifo(pid: int, fd: int, target: str) -> bool:
    import stat

    if (
        not target.startswith("/")
        or target.startswith(("/dev/", "/proc/"))
        or "." in target.rsplit("/", 1)[-1][-4:]
    ):
        return False
    try:
        return stat.S_ISFIFO(os.stat(PROC / str(pid) / "fd" / str(fd)).st_mode)
    except OSError:
        return False


#: Kernel names of threads that watch the sockets of a library.
_WATCHERS = {"gloo": "gloo", "pt_gloo": "gloo", "ZMQbg": "zmq"}


def _library_sockets(pid: int) -> dict[int, str]:
    """descriptor -> library, by the thread in whose epoll set it is; every process group of gloo has a set of its own."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for tid in os.listdir(PROC / str(pid) / "task"):
            comm = read_proc(pid, f"task/{tid}/comm").strip()
            library = next((name for start, name in _WATCHERS.items() if comm.startswith(start)), "")
            words = read_proc(pid, f"task/{tid}/syscall").split() if library else []
            if len(words) > 2 and words[0].isdigit():
                set_number = int(words[1], 16)
                found |= dict.fromkeys(epoll_members(pid, set_number), f"{library} {set_number}")
    return found


def epoll_members(pid: int, fd: int) -> list[int]:
    """The descriptors in an epoll set."""
    lines = read_proc(pid, f"fdinfo/{fd}").splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
