"""Python programs that tests start, as forks of a process that has torch loaded: milliseconds instead of CPU seconds.

A test file or a test asks for it with `pytest.mark.usefixtures("forks")`, which changes `subprocess.Popen` while a test
runs. These command lines are then forked from a template, a process that has imported torch and has done nothing
else; every other one runs as always:

    python [-u] SCRIPT …        python [-u] -m MODULE …        python [-u] -c CODE …        allranks …        torchrun …

The new process is a child of the one that asked, with the descriptors, session, folder, environment, `sys.path`, and, in
/proc, the command line that it would have had. Programs that start ranks fork a template of their own before they begin.
What torch reads from the environment while it is imported is that of the template, so a start whose environment differs
in such a variable is an ordinary one.

`python tests/forks.py suite N ARGUMENTS…` runs pytest with N workers (`make test` does). They are forks too, of one process
that has torch loaded, and each begins with a template of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import io
import json
import mmap
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES, MOST_FDS = 1 << 20, 16
PR_SET_MM, PR_SET_MM_MAP, PR_SET_CHILD_SUBREAPER = 35, 14, 36
#: Programs that start others like them.
LAUNCHERS = ("allranks", "torchrun", "torch.distributed.run")
IMPORTS = (
    "numpy", "torch", "torch.distributed", "torch.distributed.run", "torch.nn.parallel", "torch.utils.data", "torch._dynamo",
    "allranks.cli", "allranks.recording.recorder", "allranks.manager.manager", "allranks.manager.ddp",
    "allranks.manager.optimizer", "allranks.checkpoint.manager", "allranks.launch.node_agent", "allranks.launch.whole_job",
    "allranks.launch.spares", "allranks.incidents.loop", "allranks.diagnosis", "allranks.report",
)  # fmt: skip
#: Read once, when the interpreter starts or torch is imported.
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "TORCH_LOGS", "TORCH_SHOW", "TORCH_TRACE")
HANDLED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")

_ordinary = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_template: socket.socket | None = None
_at_start: dict[str, str] = {}
_one_at_a_time = threading.Lock()


def start_template() -> subprocess.Popen[bytes]:
    """Starts the template of this process, which needs seconds until its first fork."""
    global _template
    ours, theirs = _line()
    found = importlib.util.find_spec("allranks")  # the same one, wherever it is
    path = {"PYTHONPATH": str(Path(found.origin).parents[1]) if found and found.origin else ""}
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()], env={**os.environ, **path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    theirs.close()
    _template = ours
    _at_start.update(_read_at_start(os.environ))
    return process


def has_template() -> bool:
    """Whether this process began with one."""
    return _template is not None


def stop_template(process: subprocess.Popen[bytes]) -> None:
    """Ends it. It also ends with this process, however that ends."""
    global _template
    assert _template is not None
    _template.close()
    _template = None
    process.wait(60)


def patch(on: bool) -> None:
    """Makes `subprocess.Popen` fork, or not."""
    subprocess.Popen._execute_child = _execute_child if on else _ordinary  # type: ignore[attr-defined]


def _line() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for side in (ours, theirs):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    return ours, theirs


def _read_at_start(environment: Any) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_START) and k not in HANDLED}


def _execute_child(popen: Any, args: Any, executable: Any, *rest: Any) -> None:
    """As subprocess does it, with a fork where the command line is one of ours."""
    preexec, close_fds, passed, cwd, env, _, _, shell = rest[:8]
    pipes, special, session = rest[8:14], rest[15:19], rest[19]
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
    plain = preexec is None and close_fds and not shell and special == (None, None, None, -1)
    words = _forkable(args, executable, cwd, environment) if plain and rest[20:] in ((), (-1,)) else []
    if not words or _template is None:
        _ordinary(popen, args, executable, *rest)
        return
    inner = [p if p != -1 else own for p, own in zip((pipes[0], pipes[3], pipes[5]), (0, 1, 2), strict=True)]
    order = {
        "words": words, "env": environment, "passed": list(passed), "session": bool(session),
        "cwd": os.fspath(cwd or os.getcwd()), "parent": os.getpid(),
    }  # fmt: skip
    popen.pid = _ask(json.dumps(order).encode(), [*inner, *passed])
    popen._child_created = True
    popen._close_pipe_fds(*pipes)


def _forkable(args: Any, executable: Any, cwd: Any, environment: dict[str, str]) -> list[str]:
    """The command line, with the path of the program, when the template can be it; otherwise nothing."""
    if isinstance(args, (str, bytes, os.PathLike)) or executable is not None:
        return []
    words = [os.fsdecode(word) for word in args]
    if words[0] in ("allranks", "torchrun"):
        found = shutil.which(words[0], path=environment.get("PATH")) or words[0]
        words = (
            [sys.executable, found, *words[1:]] if Path(found).parent == Path(sys.executable).parent else []
        )
    ours = [word for word in words if word != "-u"][:2]
    if len(ours) < 2 or ours[0] != sys.executable or _read_at_start(environment) != _at_start:
        return []
    if not ours[1].startswith("-"):
        return words if Path(cwd or ".", ours[1]).is_file() else []
    return words if ours[1] in ("-m", "-c") else []


def _ask(order: bytes, fds: list[int]) -> int:
    """The pid of a new child of this process, forked from the template."""
    assert _template is not None
    libc = ctypes.CDLL(None)
    with _one_at_a_time:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the template forks twice: the orphan comes to us
        try:
            socket.send_fds(_template, [order], fds)
            answer = _template.recv(64)
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if not answer:
        raise OSError("the template has ended")
    return int(answer)


def _serve(line: socket.socket) -> dict[str, Any]:
    """The template: one fork for each order until the asking process is gone. Returns only in the forks."""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(line, MOST_BYTES, MOST_FDS)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                order: dict[str, Any] = json.loads(data)
                while os.getppid() != order["parent"]:
                    time.sleep(0.0005)
                line.send(str(os.getpid()).encode())
                line.detach()
                _take_descriptors(fds[:3], dict(zip(order["passed"], fds[3:], strict=True)))
                return order
            os._exit(0)
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


def _take_descriptors(inner: list[int], passed: dict[int, int]) -> None:
    """0, 1, 2 and those that are passed, at their numbers; nothing else of the template."""
    import fcntl

    wanted = {**dict(enumerate(inner)), **passed}
    safe = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, max(1000, *wanted) + 1) for number, fd in wanted.items()}
    for number, fd in safe.items():
        os.dup2(fd, number, inheritable=True)
    low = 0
    for number in sorted(safe):
        if low < number:  # closerange(0, 0) closes everything
            os.closerange(low, number)
        low = number + 1
    os.closerange(low, 65536)


def own_template() -> None:
    """Forks a template for this process, while there is nothing in it that a new one must not have."""
    global _template
    ours, theirs = _line()
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        _take_descriptors([null, null, null], {3: theirs.fileno()})
        ours.detach()
        theirs.detach()
        _become(_serve(socket.socket(fileno=3)))
    theirs.close()
    _template = ours
    patch(True)


def _become(order: dict[str, Any]) -> NoReturn:
    """In the fork: is the program, and ends as an interpreter does, but for what the template's modules have to say."""
    code: Any = 0
    interrupted = False
    try:
        _run(order)
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            end()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(int(code) & 0xFF)  # pytest's is an enum


def _run(order: dict[str, Any]) -> None:
    global _template
    _template = None
    patch(False)
    if order["session"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    words = order["words"]
    _show_in_proc(words, order["env"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    unbuffered = "-u" in words[:2] or bool(order["env"].get("PYTHONUNBUFFERED"))
    sys.stdin, sys.stdout, sys.stderr = _stream(0, False), _stream(1, unbuffered), _stream(2, True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.orig_argv, sys.dont_write_bytecode = list(words), bool(order["env"].get("PYTHONDONTWRITEBYTECODE"))
    _seed()
    what, *rest = [word for number, word in enumerate(words) if number and not (number == 1 and word == "-u")]
    if (rest[0] if what == "-m" else Path(what).name) in LAUNCHERS:
        own_template()
    elif "worker" in order:
        own_template()
        patch(False)  # until a test asks for forks
        sys.modules["forks"] = sys.modules["__main__"]
    sys.path[0:1] = filter(
        None, [_first_of_path(what), *order["env"].get("PYTHONPATH", "").split(os.pathsep)]
    )
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [what, *rest]
    if what == "-m":
        sys.argv = ["-m", *rest[1:]]
        if not hasattr(sys.modules.get(rest[0]), "__path__"):
            sys.modules.pop(rest[0], None)  # the template has it, a new interpreter has not
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif what == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        main.__file__ = what
        exec(compile(Path(what).read_bytes(), what, "exec", dont_inherit=True), main.__dict__)


def _first_of_path(what: str) -> str:
    if what in ("-m", "-c"):
        return os.getcwd()
    return str(Path(what).resolve().parent)


def _stream(fd: int, at_once: bool) -> Any:
    try:
        if fd == 0:
            return open(0, encoding="utf-8", closefd=False)
        raw: Any = open(fd, "wb", buffering=0 if at_once else -1, closefd=False)  # noqa: SIM115
    except OSError:
        return None
    errors = "backslashreplace" if fd == 2 else "strict"
    return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=os.isatty(fd), write_through=at_once)


def _seed() -> None:
    """What an import has made of the environment or of chance."""
    import numpy
    import torch.distributed

    numpy.random.seed()
    torch.distributed.set_debug_level_from_env()


def _show_in_proc(words: list[str], environment: dict[str, str]) -> None:
    """The command line and the environment, where /proc shows them. Without the right to do so they are the template's."""
    shown = b"".join(os.fsencode(word) + b"\0" for word in words)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    place = mmap.mmap(-1, len(shown) + len(variables) + 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place.write(shown + variables)
    sys._allranks_shown = place  # type: ignore[attr-defined]  # as long as the process lives
    begin = ctypes.addressof(ctypes.c_char.from_buffer(place))
    middle, end = begin + len(shown), begin + len(shown) + len(variables)
    fields = [0, 0, 0, *Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()]
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    code, data = [int(fields[26]), int(fields[27])], [int(fields[45]), int(fields[46])]
    heap = [int(fields[47]), libc.sbrk(0), int(fields[28])]
    described = struct.pack("<12QIi", *code, *data, *heap, begin, middle, middle, end, 0, 0, -1)
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.c_char_p(described), ctypes.c_ulong(len(described)), 0)


def load() -> None:
    """Imports what programs need, in a process that is then forked."""
    _at_start.update(_read_at_start(os.environ))
    for name in IMPORTS:
        importlib.import_module(name)
    # torchrun asks for the name of the calling function at every step of a rendezvous, through `inspect`, which looks at
    # every module there is: a program that has loaded this many would spend its time there.
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # type: ignore[attr-defined]
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("threads after the imports: forks would not be whole")
    gc.collect()
    gc.freeze()


def suite(workers: int, words: list[str]) -> int:
    """pytest with so many workers, forked from this process; its exit code."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    load()
    del os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"]
    folder = tempfile.mkdtemp()
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(f"{folder}/door")
    door.listen(workers)
    starter = shlex.join([sys.executable, "-S", "-E", __file__, "worker", f"{folder}/door"])
    spread = ["--tx", f"{workers}*popen//python={starter}"] if workers else ["-n", "0"]
    order = {"env": dict(os.environ), "session": False, "cwd": os.getcwd()}
    pytest = os.fork()
    if pytest == 0:
        door.close()
        _become({**order, "words": [sys.executable, "-m", "pytest", *spread, *words]})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest has it too, and ends the workers
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pytest, signal.SIGTERM))
    try:
        while True:
            if select.select([door], [], [], 0.2)[0]:
                _start_worker(door, order)
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid not in (0, pytest):
                pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == pytest:
                return os.waitstatus_to_exitcode(status)
    finally:
        shutil.rmtree(folder)


def _start_worker(door: socket.socket, order: dict[str, Any]) -> None:
    line, _ = door.accept()
    data, fds, _, _ = socket.recv_fds(line, MOST_BYTES, MOST_FDS)
    pid = os.fork()
    if pid == 0:
        line.detach()
        door.detach()
        _take_descriptors(fds, {})
        _become({**order, "words": [sys.executable, *json.loads(data)], "worker": True})
    line.send(str(pid).encode())
    line.close()
    for fd in fds:
        os.close(fd)


def worker(door: str, words: list[str]) -> None:
    """What execnet takes for its worker: has one forked, and ends with it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(door)
        socket.send_fds(line, [json.dumps(words).encode()], [0, 1, 2])
        ended = os.pidfd_open(int(line.recv(64)))
    select.select([ended], [], [])


if __name__ == "__main__" and sys.argv[1] == "worker":
    worker(sys.argv[2], sys.argv[3:])
elif __name__ == "__main__" and sys.argv[1] == "suite":
    os._exit(suite(int(sys.argv[2]), sys.argv[3:]))  # nothing of the loaded modules has to be taken apart
elif __name__ == "__main__":
    line = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load()
    _become(_serve(line))
