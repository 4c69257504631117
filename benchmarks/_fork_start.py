"""Starts `allranks run` and its ranks by fork from a process that has imported torch: milliseconds instead of seconds.

For benchmarks that run hundreds of short jobs. Everything else is the real thing: an agent process, rank processes
that are its children, their own memory, sessions and output. After `install()` and `make_template()`, before any thread
is started, `subprocess.Popen` gets these from the template, a process that has done nothing yet, and runs every other
command line as always:

    python -m allranks …      (which makes a template of its own)
    python -u -m allranks.launch.rank_entry …
    python -u -m allranks.launch.spares …

A new process must be a child of the one that asked, which sees it end: the template forks twice, and the asking process,
which is a reaper of orphans for that moment, becomes the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy is imported: its threads do not survive a fork
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

PR_SET_CHILD_SUBREAPER = 36
MOST_BYTES, MOST_FDS = 1 << 20, 16
MODULES = {
    "allranks": lambda words: _be_agent(words),
    "allranks.launch.rank_entry": lambda words: _call("allranks.launch.rank_entry", "main"),
    "allranks.launch.spares": lambda words: _call("allranks.launch.spares", "wait_and_run", *map(int, words)),
}
IMPORTS = (
    "torch", "torch.distributed", "torch.distributed.run", "torch.nn.parallel", "torch.utils.data", "torch._dynamo", "numpy",
    "allranks.cli.run", "allranks.recording.recorder", "allranks.manager.manager", "allranks.manager.ddp",
    "allranks.manager.optimizer", "allranks.checkpoint.manager", "allranks.launch.node_agent", "allranks.launch.whole_job",
    "allranks.launch.spares", "allranks.incidents.loop", "allranks.diagnosis", "allranks.report",
)  # fmt: skip
_template: socket.socket | None = None
_one_at_a_time = threading.Lock()
_ordinary = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def install() -> None:
    """Imports what agents and ranks need, and changes `subprocess.Popen` in this process and its forks."""
    for name in IMPORTS:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(f"{threads} threads after the imports: forks may not be whole", file=sys.stderr)
    gc.collect()
    gc.freeze()
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def _execute_child(popen: Any, args: Any, executable: Any, *rest: Any) -> None:
    """As subprocess does it, with a fork where the command line is ours."""
    words = [args] if isinstance(args, (str, bytes)) else [os.fspath(word) for word in args]
    (_, _, pass_fds, cwd, env, _, _, _) = rest[:8]
    pipes, new_session = rest[8:14], rest[19]
    inner = [p if p != -1 else own for p, own in zip((pipes[0], pipes[3], pipes[5]), (0, 1, 2), strict=True)]
    environment = dict(os.environ if env is None else env)
    ours = [word for word in words[:4] if word != "-u"]
    if _template is None or ours[:2] != [sys.executable, "-m"] or ours[2] not in MODULES:
        _ordinary(popen, args, executable, *rest)
        return
    asked = words[words.index("-m") + 1 :]
    pid = _ask(asked, environment, inner, list(pass_fds), bool(new_session), cwd)
    popen._child_created, popen.pid = True, pid
    popen._close_pipe_fds(*pipes)


def _ask(
    words: list[str],
    environment: dict[str, str],
    inner: list[int],
    passed: list[int],
    session: bool,
    cwd: Any,
) -> int:
    """The pid of a new child of this process, forked from the template."""
    assert _template is not None
    order = {
        "words": words,
        "env": environment,
        "passed": passed,
        "session": session,
        "cwd": cwd,
        "parent": os.getpid(),
    }
    libc = ctypes.CDLL(None)
    with _one_at_a_time:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(_template, [json.dumps(order).encode()], [*inner, *passed])
            answer = _template.recv(64)
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if not answer:
        raise OSError("the template of the ranks has ended")
    return int(answer)


def make_template() -> None:
    """Forks the process that new ones are forked from, while there is nothing in this one that they must not have."""
    global _template
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for side in (ours, theirs):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    if os.fork() == 0:
        ours.close()
        os.setsid()
        _serve(theirs)
    theirs.close()
    _template = ours


def _be_agent(words: list[str]) -> int:
    make_template()
    from allranks.cli import main

    sys.argv = ["allranks", *words]
    return main(words)


def _serve(line: socket.socket) -> NoReturn:
    """The template: one fork for each order, until the agent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(line, MOST_BYTES, MOST_FDS)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                _start(json.loads(data), fds, line)
            os._exit(0)
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


def _start(order: dict[str, Any], fds: list[int], line: socket.socket) -> NoReturn:
    """In the new process: waits until the agent is its parent, then is that rank."""
    while os.getppid() != order["parent"]:
        time.sleep(0.0005)
    line.send(str(os.getpid()).encode())
    line.close()
    module, *words = order["words"]

    def run() -> int:
        if order["cwd"]:
            os.chdir(order["cwd"])
        sys.argv = [module, *words]
        return MODULES[module](words) or 0

    passed = dict(zip(order["passed"], fds[3:], strict=True))
    _become(fds[:3], passed, order["env"], order["session"], run)


def _call(module: str, name: str, *args: Any) -> None:
    getattr(importlib.import_module(module), name)(*args)


def _become(
    inner: list[int],
    passed: dict[int, int],
    environment: dict[str, str],
    session: bool,
    run: Callable[[], int],
) -> NoReturn:
    """A forked process turns into the command: descriptors, session, environment, signals; ends as an interpreter does."""
    code = 1
    try:
        if session:
            os.setsid()
        _take_descriptors(inner, passed)
        os.environ.clear()
        os.environ.update(environment)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        code = run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            end()
    os._exit(code & 0xFF)


def _take_descriptors(inner: list[int], passed: dict[int, int]) -> None:
    """0, 1, 2 and those that are passed, at their numbers; nothing else of the process before."""
    moved = {number: os.dup(fd) for number, fd in [*enumerate(inner), *passed.items()]}
    safe = {}
    for number, fd in moved.items():  # above all numbers that are wanted, so that none is overwritten
        safe[number] = _move_up(fd, max([2, *passed]) + 1)
    for number, fd in safe.items():
        os.dup2(fd, number, inheritable=True)
    low = 0
    for number in sorted(safe):
        if low < number:  # closerange(0, 0) closes everything
            os.closerange(low, number)
        low = number + 1
    os.closerange(low, 65536)


def _move_up(fd: int, above: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, max(above, 1000))
