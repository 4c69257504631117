"""Reads /proc of live processes: who they are, and what the kernel says of their threads. Stops nothing.

Every reader returns what it could get: a process may end, or belong to somebody else, between two reads. The same facts,
as JSON that a collector wrote, are read by `parse_facts`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.blackbox.header import process_stat, task_state
from allranks.model.parsing import without_secrets
from allranks.model.stacks import ThreadFacts, ThreadStack
from allranks.stacktraces.wait_limits import FOR_EVER, read_time, wait_limit_s

PROC = Path("/proc")
MAX_THREADS = 4096
_WANTED_TEXT = (
    "RANK LOCAL_RANK WORLD_SIZE SLURM_PROCID SLURM_NTASKS SLURM_JOB_ID SLURM_LOCALID "
    "TORCHELASTIC_RUN_ID ALLRANKS_JOB_ID ALLRANKS_DIR ALLRANKS_RANK NCCL_RAS_ADDR NCCL_RAS_ENABLE "
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP CUDA_COREDUMP_PIPE CUDA_COREDUMP_FILE "
    "OMPI_COMM_WORLD_RANK PMI_RANK GROUP_RANK ROLE_RANK NODE_RANK"
)
_SLURM_CGROUP = re.compile(r"slurm[^\n]*?/job_(\d+)(?:/|$)", re.MULTILINE)
_WANTED = frozenset(_WANTED_TEXT.split())
#: System calls whose first argument is the descriptor that they wait on.
_ON_DESCRIPTOR = frozenset(
    {"read", "readv", "write", "writev", "recvfrom", "recvmsg", "accept", "accept4"}
    | {"epoll_wait", "epoll_pwait", "epoll_pwait2"}
)


@dataclass(frozen=True)
class ProcessEntry:
    """One process as /proc shows it. `environ` holds only the variables that matter here."""

    pid: int
    ppid: int
    state: str
    start_ticks: int
    comm: str
    title: str
    environ: Mapping[str, str] = field(default_factory=dict)
    inner_pid: int = 0  # pid in its own PID namespace; 0 unknown
    python: bool = False
    spawned: bool = False  # by multiprocessing's spawn, and talks over TCP with torch loaded: a rank, or a worker that loads data
    uid: int = -1  # whose rights it has; -1 unknown
    slurm_job: str = ""  # by its cgroup; "" where Slurm uses none


def scan(pids: list[int] | None = None) -> list[ProcessEntry]:
    """All processes of this machine, or the given ones; those that vanish meanwhile are left out."""
    numbers = pids if pids is not None else [int(name) for name in os.listdir(PROC) if name.isdigit()]
    return [entry for entry in (read_entry(pid) for pid in sorted(numbers)) if entry is not None]


def read_entry(pid: int) -> ProcessEntry | None:
    """One process; None when it does not exist."""
    stat = read_proc(pid, "stat")
    if not stat:
        return None
    comm = stat[stat.find("(") + 1 : stat.rfind(")")]
    fields = stat.rsplit(")", 1)[-1].split()
    if len(fields) < 20:
        return None
    title = _command_line(pid)
    status = status_of(pid)
    inner = status.get("NSpid", "").split()
    return ProcessEntry(
        pid=pid,
        ppid=int(fields[1]),
        state=fields[0],
        start_ticks=int(fields[19]),
        comm=comm,
        title=title,
        environ=_environ(pid),
        inner_pid=int(inner[-1]) if inner else 0,
        slurm_job=next(iter(_SLURM_CGROUP.findall(read_proc(pid, "cgroup"))), ""),
        uid=int(status.get("Uid", "-1 -1").split()[1]),
        python=_is_python(pid, comm, title),
        spawned="multiprocessing.spawn import spawn_main" in title and _talks(pid),
    )


def _talks(pid: int) -> bool:
    """Whether a process has torch and a TCP connection, as every rank has."""
    return "libtorch" in read_proc(pid, "maps") and bool((open_files(pid) or set()) & _tcp(pid, "01"))


def is_foreign_port(port: int, pids: Sequence[int]) -> bool:
    """Whether none of these processes listens at a TCP port of theirs, nor another one of the same parent, but somebody
    does. What cannot be seen is not called foreign."""
    listening = _tcp(pids[0], "0A", port) if pids else set()
    parents = {entry.ppid for entry in scan(list(pids))} - {0, 1}
    beside = {pid for parent in parents for pid in children_of(parent)}
    held = [open_files(pid) for pid in {*pids, *beside}]
    return bool(listening) and all(files is not None and not files & listening for files in held)


def _tcp(pid: int, state: str, port: int | None = None) -> set[str]:
    """The TCP sockets that a process can see in this state, as its open files name them."""
    rows = [
        line.split() for name in ("net/tcp", "net/tcp6") for line in read_proc(pid, name).splitlines()[1:]
    ]
    at = "" if port is None else f":{port:04X}"
    return {f"socket:[{row[9]}]" for row in rows if row[3] == state and row[1].endswith(at)}


def open_files(pid: int) -> set[str] | None:
    """What the descriptors of a process lead to; None when they may not be read."""
    folder, found = PROC / str(pid) / "fd", set()
    try:
        names = os.listdir(folder)
    except OSError as error:
        return set() if isinstance(error, FileNotFoundError) else None  # it has ended
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(folder / name))
    return found


def open_inodes(pid: int) -> set[int]:
    """The files that a process has open, by their numbers."""
    folder, found = f"{PROC}/{pid}/fd", set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.stat(f"{folder}/{name}").st_ino)
    return found


def read_proc(pid: int, name: str) -> str:
    try:
        with open(f"{PROC}/{pid}/{name}", "rb") as file:
            return file.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _environ(pid: int) -> dict[str, str]:
    pairs = (item.partition("=") for item in read_proc(pid, "environ").split("\0"))
    return {name: value for name, equals, value in pairs if equals and name in _WANTED}


def _is_python(pid: int, comm: str, title: str) -> bool:
    """By the executable where it may be read, else by the name: a process may have changed its title."""
    try:
        return "python" in os.path.basename(os.readlink(PROC / str(pid) / "exe"))
    except OSError:
        return "python" in comm or "python" in title.split(" ")[0] or comm.startswith("pt_data_worker")


def descendants(pid: int) -> list[int]:
    """Pids of the children of a process and theirs, as the kernel lists them."""
    found: list[int] = []
    todo = [pid]
    while todo:
        children = children_of(todo.pop(0))
        found += children
        todo += children
    return found


def children_of(pid: int) -> list[int]:
    try:
        threads = os.listdir(PROC / str(pid) / "task")
    except OSError:
        return []
    return [int(word) for thread in threads for word in read_proc(pid, f"task/{thread}/children").split()]


def _command_line(pid: int) -> str:
    return without_secrets(read_proc(pid, "cmdline")).replace("\0", " ").strip()


def read_facts(pid: int, only: Container[int] | None = None) -> dict[str, object]:
    """The facts of one process in the shape of the raw capture files; raises OSError when it is gone. Of threads that are
    not in `only` just the names."""
    threads = list(_threads(pid, only))
    if not threads:
        raise ProcessLookupError(f"process {pid} is gone")
    _add_memory(pid, threads)
    return {
        "pid": pid,
        "cmdline": _command_line(pid),
        "wchan": threads[0]["wchan"],
        "at_s": round(time.time(), 3),
        "machine": platform.machine(),
        "threads": threads,
    }


def _threads(pid: int, only: Container[int] | None = None) -> Iterator[dict[str, object]]:
    names = sorted(
        (int(name) for name in os.listdir(PROC / str(pid) / "task")), key=lambda tid: (tid != pid, tid)
    )
    for tid in names[:MAX_THREADS]:
        if only is not None and tid != pid and tid not in only:
            yield {"tid": tid, "comm": read_proc(pid, f"task/{tid}/comm").strip(), "wchan": "", "syscall": ""}
            continue
        stat = read_proc(pid, f"task/{tid}/stat")
        fields = stat.rsplit(")", 1)[-1].split()
        if len(fields) < 13:
            continue
        status = status_of(pid, tid)
        inner = status.get("NSpid", str(tid)).split()[-1]  # in its own PID namespace
        yield {
            "tid": tid,
            **({"inner_tid": int(inner)} if int(inner) != tid else {}),
            "comm": stat[stat.find("(") + 1 : stat.rfind(")")],
            "state": fields[0],
            **({"ended": int(fields[49])} if fields[0] == "Z" and len(fields) > 49 else {}),
            "utime": int(fields[11]),
            "stime": int(fields[12]),
            "switches": sum(int(value) for name, value in status.items() if name.endswith("ctxt_switches")),
            "wchan": read_proc(pid, f"task/{tid}/wchan").strip(),
            "syscall": read_proc(pid, f"task/{tid}/syscall").strip(),
            "kstack": read_proc(pid, f"task/{tid}/stack").strip(),
        }


#: Reads some bytes of a process's memory, from an address; none where it cannot be read.
Peek = Callable[[int, int], bytes]


@contextlib.contextmanager
def memory_of(pid: int) -> Iterator[Peek]:
    """The memory of a process, which is not stopped."""
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(PROC / str(pid) / "mem", "rb", buffering=0))

        def peek(address: int, count: int) -> bytes:
            try:
                if file is None or not address:
                    return b""
                file.seek(address)
                return file.read(count)
            except (OSError, ValueError, OverflowError):
                return b""

        yield peek


def _add_memory(pid: int, threads: list[dict[str, object]]) -> None:
    """Adds what only memory tells: when a wait ends by itself, and who holds the native mutex that a thread waits for
    (glibc keeps the owner 8 bytes behind the futex)."""
    known = {row["tid"] for row in threads}
    alarm = catches(pid, signal.SIGALRM)
    with memory_of(pid) as peek:
        for row in threads:
            name, args = parse_syscall(str(row["syscall"]), platform.machine())
            limit = wait_limit_s(name, args, lambda address: read_time(peek(address, 16)))
            if limit is not None and not (alarm and limit == FOR_EVER):  # an alarm may end it at any time
                row["wait_s"] = round(limit, 3)
            row |= {"file": file} if (file := _waits_on(pid, name, args)) else {}
            if address := _mutex_address(name, args):
                owner = int.from_bytes(peek(address + 8, 4), "little")
                if owner in known:
                    row["mutex_owner"] = owner


def _waits_on(pid: int, name: str, args: tuple[int, ...]) -> str:
    """The pipe or socket of a system call, or how many descriptors an event loop watches; "" for anything else."""
    if not args or name not in _ON_DESCRIPTOR:
        return ""
    if name.startswith("epoll"):
        return f"epoll {read_proc(pid, f'fdinfo/{args[0]}').count('tfd:')}"
    try:
        target = os.readlink(PROC / str(pid) / "fd" / str(args[0]))
    except OSError:
        return ""
    return target if target.startswith(("pipe:", "socket:")) else ""


def _mutex_address(name: str, args: tuple[int, ...]) -> int:
    """The address of a mutex whose holder others wait for (futex WAIT of the value 2), else 0."""
    is_mutex = name == "futex" and len(args) > 2 and args[1] & 0x7F == 0 and args[2] & 0xFFFFFFFF == 2
    return args[0] if is_mutex else 0


@dataclass(frozen=True)
class Work:
    """How much a process has run so far. `state` is the kernel's letter, "" when there is no such process."""

    state: str = ""
    start_ticks: int = 0
    ticks: int = 0  # of its processor time, of all threads
    switches: int = 0  # how often its first thread was given a processor
    ended: int = 0  # the wait status of one that has ended


def work_done(pid: int, main: bool = False) -> Work:
    """Called often. `main`: the ticks of the first thread alone."""
    fields = read_proc(pid, f"task/{pid}/stat").rsplit(")", 1)[-1].split() if main else process_stat(pid)
    if len(fields) < 20:
        return Work()
    ended = int(fields[49]) if len(fields) > 49 else 0
    ticks = int(fields[11]) + int(fields[12])
    return Work(task_state(fields), int(fields[19]), ticks, _turns(pid, pid), ended)


def _turns(pid: int, thread: int) -> int:
    """How often a thread was given a processor; by its context switches where the kernel does not keep that."""
    words = read_proc(pid, f"task/{thread}/schedstat").split()
    if len(words) > 2 and words[2] != "0":
        return int(words[2])
    found = status_of(pid, thread)
    return sum(int(value) for name, value in found.items() if name.endswith("ctxt_switches"))


def turns_of_threads(pid: int) -> dict[int, int]:
    """How often each thread of a process was given a processor: one that was not has done nothing meanwhile. {} where that is
    not known."""
    try:
        found = {int(name): _turns(pid, int(name)) for name in os.listdir(f"{PROC}/{pid}/task")}
    except OSError:
        return {}
    return found if any(found.values()) else {}


def catches(pid: int, signal_number: int) -> bool:
    """Whether the process has installed a handler for a signal; never signal one that has not."""
    return bool(signal_set(pid, "SigCgt") >> (signal_number - 1) & 1)


def status_of(pid: int, thread: int = 0) -> dict[str, str]:
    """The fields of /proc/PID/status of a process or one of its threads; none when it is gone."""
    text = read_proc(pid, f"task/{thread}/status" if thread else "status")
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def signal_set(pid: int, field: str) -> int:
    """A set of signals or capabilities in /proc/PID/status, as bits; 0 when unknown."""
    return int(status_of(pid).get(field, "0"), 16)


def mapped_files(pid: int, suffix: str) -> list[Path]:
    """Files with this end of name that a process has mapped, as paths that work from here."""
    found: dict[Path, None] = {}
    for line in read_proc(pid, "maps").splitlines():
        if line.endswith(suffix):
            path = line.split(None, 5)[-1]
            # Path.exists() raises where another user's folder has the name of a container's
            here = os.path.exists(path)
            found.setdefault(Path(path) if here else PROC / str(pid) / "root" / path.lstrip("/"))
    return list(found)


def _table(text: str) -> dict[int, str]:
    return {int(number): name for number, name in (word.split(":") for word in text.split())}


_X86_64 = _table(
    "0:read 1:write 2:open 3:close 4:stat 5:fstat 6:lstat 7:poll 9:mmap 11:munmap 16:ioctl 17:pread64 "
    "18:pwrite64 19:readv 20:writev 23:select 24:sched_yield 26:msync 28:madvise 34:pause "
    "35:nanosleep 40:sendfile 42:connect 43:accept 44:sendto 45:recvfrom 46:sendmsg 47:recvmsg "
    "56:clone 57:fork 58:vfork 60:exit 61:wait4 62:kill 65:semop 72:fcntl 73:flock 74:fsync "
    "75:fdatasync 76:truncate 77:ftruncate 82:rename 83:mkdir 87:unlink 128:rt_sigtimedwait "
    "130:rt_sigsuspend 162:sync 165:mount 166:umount2 202:futex 206:io_setup 208:io_getevents "
    "217:getdents64 219:restart_syscall 230:clock_nanosleep 231:exit_group 232:epoll_wait 247:waitid "
    "257:openat 262:newfstatat 263:unlinkat 270:pselect6 271:ppoll 275:splice 277:sync_file_range "
    "281:epoll_pwait 285:fallocate 288:accept4 295:preadv 296:pwritev 299:recvmmsg 306:syncfs "
    "307:sendmmsg 326:copy_file_range 332:statx 426:io_uring_enter 435:clone3 437:openat2 "
    "441:epoll_pwait2 449:futex_waitv"
)
_AARCH64 = _table(
    "22:epoll_pwait 25:fcntl 29:ioctl 32:flock 46:ftruncate 56:openat 57:close 61:getdents64 63:read "
    "64:write 65:readv 66:writev 67:pread64 68:pwrite64 71:sendfile 72:pselect6 73:ppoll "
    "79:newfstatat 80:fstat 81:sync 82:fsync 83:fdatasync 84:sync_file_range 93:exit 94:exit_group "
    "95:waitid 98:futex 101:nanosleep 115:clock_nanosleep 124:sched_yield 128:restart_syscall "
    "129:kill 133:rt_sigsuspend 137:rt_sigtimedwait 202:accept 203:connect 206:sendto 207:recvfrom "
    "211:sendmsg 212:recvmsg 220:clone 227:msync 233:madvise 242:accept4 243:recvmmsg 260:wait4 "
    "267:syncfs 269:sendmmsg 285:copy_file_range 291:statx 426:io_uring_enter 435:clone3 437:openat2 "
    "441:epoll_pwait2"
)


def parse_syscall(text: str, machine: str = "x86_64") -> tuple[str, tuple[int, ...]]:
    """(name, arguments) of a line of /proc/PID/syscall; ("running", ()) on a CPU, ("", ()) when unreadable."""
    words = text.split()
    if not words:
        return "", ()
    if words[0] == "running":
        return "running", ()
    try:
        number, values = int(words[0]), tuple(int(word, 16) for word in words[1:7])
    except ValueError:
        return "", ()
    if number < 0:
        return "", ()
    table = _AARCH64 if machine == "aarch64" else _X86_64
    return table.get(number, f"syscall_{number}"), values


_KERNEL_FRAME = re.compile(r"(?:\[<[^>]*>\] )?([A-Za-z_][\w.]*)(?:\+0x|$)")


@dataclass(frozen=True)
class ProcessFacts:
    """One sample of /proc/PID."""

    pid: int | None
    title: str
    threads: tuple[ThreadFacts, ...]
    at_s: float | None = None
    inner: Mapping[int, int] = field(default_factory=dict)  # thread id in its PID namespace -> id outside


def parse_facts(text: str) -> ProcessFacts:
    """Facts from the JSON of a capture; raises ValueError when it is not that."""
    return facts_of(json.loads(text))


def facts_of(row: object) -> ProcessFacts:
    """Facts from what `read_facts` gives, and what is in raw files; raises ValueError when it is not that."""
    if not isinstance(row, dict):
        raise ValueError("not an object")
    machine, listed, at = str(row.get("machine") or "x86_64"), row.get("threads"), row.get("at_s")
    threads = [item for item in listed if _is_thread(item)] if isinstance(listed, list) else []
    return ProcessFacts(
        pid=row["pid"] if isinstance(row.get("pid"), int) else None,
        title=str(row.get("cmdline") or ""),
        threads=tuple(_thread(item, machine) for item in threads),
        at_s=float(at) if isinstance(at, int | float) else None,
        inner={t["inner_tid"]: t["tid"] for t in threads if isinstance(t.get("inner_tid"), int)},
    )


def renumber(stacks: tuple[ThreadStack, ...], inner: Mapping[int, int]) -> tuple[ThreadStack, ...]:
    """Stacks of a process in another PID namespace, with thread ids as seen from here.

    py-spy names threads by their inner ids, and cannot look up whether they run.
    """
    if not inner:
        return stacks
    return tuple(
        replace(one, tid=inner[one.tid], active=None) if one.tid is not None and one.tid in inner else one
        for one in stacks
    )


def _is_thread(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("tid"), int)


def _thread(row: dict[str, object], machine: str) -> ThreadFacts:
    name, args = parse_syscall(str(row.get("syscall") or ""), machine)
    tid, owner, ended = row["tid"], row.get("mutex_owner"), row.get("ended")
    return ThreadFacts(
        tid=tid if isinstance(tid, int) else 0,
        comm=str(row.get("comm") or ""),
        state=str(row.get("state") or "")[:1],
        wchan=_symbol(str(row.get("wchan") or "")),
        syscall=name,
        args=args,
        ticks=_count(row.get("utime")) + _count(row.get("stime")),
        switches=_count(row.get("switches")),
        kernel_stack=kernel_functions(str(row.get("kstack") or "")),
        mutex_owner=owner if isinstance(owner, int) else None,
        wait_s=float(limit) if isinstance(limit := row.get("wait_s"), int | float) else None,
        ended=ended if isinstance(ended, int) else None,
        file=str(row.get("file") or "")[:64],
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _symbol(wchan: str) -> str:
    """`poll_schedule_timeout.constprop.0` is `poll_schedule_timeout`; "0" means not waiting."""
    name = wchan.split(".")[0].strip()
    return "" if name == "0" else name


def kernel_functions(text: str) -> tuple[str, ...]:
    """Function names of a kernel stack, innermost first."""
    found = (_KERNEL_FRAME.search(line.strip()) for line in text.splitlines())
    return tuple(match[1].split(".")[0] for match in found if match)
