"""The private machine of a soak: own processes, network, /dev/shm and disk, so that whatever is left behind is ours.

Root only; an ordinary user's soak runs without it and skips the faults that need it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NODE = "soak-node"  # the network namespace of the second node
HERE, THERE = "10.214.1.1", "10.214.1.2"  # our end of the cable and that of the second node
_MARK = "ALLRANKS_SOAK_SANDBOX"
_TIME_WAIT = "06"


def inside() -> bool:
    """Whether this process is in the sandbox already."""
    return os.environ.get(_MARK) == "1"


def enter(arguments: Sequence[str]) -> int:
    """Runs this program again inside new namespaces and returns its exit status."""
    words = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    again = [sys.executable, "-m", "tests.soak.run", *arguments]
    return subprocess.run([*words, *again], env={**os.environ, _MARK: "1"}, check=False).returncode


def prepare(disk: Path) -> None:
    """A small disk for the checkpoints, an empty /dev/shm and a second node behind one cable."""
    for size, path in (("64m", disk), ("1g", Path("/dev/shm")), ("1m", Path("/run"))):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "soak", str(path)], check=True)
    for words in (
        "link set lo up",
        f"netns add {NODE}",
        f"link add soak0 type veth peer name eth0 netns {NODE}",
        f"addr add {HERE}/30 dev soak0",
        "link set soak0 up",
        f"-n {NODE} addr add {THERE}/30 dev eth0",
        f"-n {NODE} link set lo up",
    ):
        _ip(words)
    switch("up")


def switch(state: str) -> None:
    """Pulls the cable of the second node ("down") or plugs it in ("up")."""
    _ip(f"-n {NODE} link set eth0 {state}")


@contextmanager
def filtering(passes: Sequence[int], only_new: bool) -> Iterator[None]:
    """Inside, the second node gets nothing but what these ports of the first send; `only_new`: only its new connections."""
    ports = ", ".join(map(str, passes))
    dropped = "tcp flags & (syn | ack) == syn drop" if only_new else "drop"
    rules = f'iifname "eth0" tcp sport {{ {ports} }} accept; iifname "eth0" {dropped};'
    table = f"table inet soak {{\nchain c {{\ntype filter hook input priority 0; {rules}\n}}\n}}\n"
    _nft("-f", "-", text=table)
    try:
        yield
    finally:
        _nft("delete", "table", "inet", "soak")


def left_behind() -> list[str]:
    """Processes, sockets and shared memory that nobody needs any more; read when everything has ended."""
    return [*_processes(), *_sockets(), *_shared_memory()]


def _processes() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if int(path.name) != os.getpid() and state not in "ZX" and command:
            found.append(f"process {path.name}: {command[:120]}")
    return found


def _sockets() -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != _TIME_WAIT and fields[9] != "0":  # inode 0: the kernel alone finishes it
                found.append(f"{table} socket {fields[1]} -> {fields[2]} in state {fields[3]}")
    return found


def _shared_memory() -> list[str]:
    """Black boxes stay for `allranks diagnose`, up to 256 MiB; nothing else may."""
    boxes = Path("/dev/shm") / f"allranks-{os.getuid()}"
    files = [path for path in Path("/dev/shm").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files if path.is_relative_to(boxes))
    found = [f"{path} in shared memory" for path in files if not path.is_relative_to(boxes)]
    if size > 256 << 20:
        found.append(f"{size >> 20} MiB of black boxes in shared memory")
    return found


def _nft(*words: str, text: str = "") -> None:
    """In the second node."""
    command = ["ip", "netns", "exec", NODE, "nft", *words]
    subprocess.run(command, input=text, text=True, check=True, capture_output=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)
