"""A short job of both modes on machines where something is missing, full, closed or has an odd name: it trains, and ends with 0."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.needs_root]

WHOLE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(20):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
print("trained", flush=True)
"""
REPLICAS = """
import torch
from allranks import DistributedDataParallel, Manager, Optimizer
model = torch.nn.Linear(8, 8)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
manager = Manager(state=[model, inner], min_replica_size=1)
ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
while manager.current_step() < 20:
    optimizer.zero_grad()
    ddp(torch.randn(4, 8)).sum().backward()
    optimizer.step()
manager.shutdown()
print("trained", flush=True)
"""
READ_ONLY = "mount -t tmpfs x /mnt; cd /mnt; mount -o remount,ro /mnt"
HOSTS = "echo ::1 localhost $(hostname) > hosts; mount --bind hosts /etc/hosts"
#: name -> how the machine is made odd, in namespaces of its own, in a folder that may be written
MACHINES = {
    "shared memory is full": "head -c 1G /dev/zero > /dev/shm/x 2>/dev/null",
    "shared memory is read-only": "mount -o remount,ro /dev/shm",
    "shared memory and the temporary folder are read-only": f"{READ_ONLY}; mount -o remount,ro /dev/shm; export TMPDIR=/mnt",
    "the temporary folder has a long path": "export TMPDIR=$PWD/$(printf 'y%.0s' $(seq 200)); mkdir $TMPDIR",
    "the temporary folder does not exist": "export TMPDIR=/nonexistent",
    "4 GB of address space": "ulimit -v 4000000",
    "files of at most 64 KiB": 'ulimit -f 64; set -- "${@:1:4}" --no-record "${@:5}"',
    "IPv6 alone": f"ip addr del 127.0.0.1/8 dev lo; {HOSTS}",
    "a host name that does not resolve": "hostname GPU-Node.Example.invalid",
    "a host name of 63 characters": "hostname $(printf 'x%.0s' $(seq 63))",
    "umask 077": "umask 077",
    "umask 000": "umask 000",
    "another time zone": "export TZ=Asia/Kathmandu",
    "no home": "unset HOME USER LOGNAME",
    "a home that does not exist": "export HOME=/nonexistent",
    "a read-only working folder": READ_ONLY,
    "a working folder with an odd name": r"""d=$(printf 'a\nb\377 c'); mkdir "$d"; cd "$d" """,
    "closed input": "exec <&-",
    "closed output": "exec >&- 2>&-",
    "ignored SIGCHLD": "trap '' CHLD",
    # torchrun does not close the log files of ranks that have ended
    "warnings are errors": "export PYTHONWARNINGS=error,ignore::ResourceWarning",
    "no docstrings, ASCII": "export PYTHONOPTIMIZE=2 LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0",
    "a proxy that nobody answers at": "export http_proxy=http://127.0.0.1:9 HTTP_PROXY=http://127.0.0.1:9 all_proxy=http://127.0.0.1:9",
}


@pytest.mark.parametrize("mode", ["whole job", "replicas"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_job_trains_on_an_odd_machine(machine: str, mode: str, tmp_path: Path) -> None:
    """Recording degrades before training does. Shared memory is a private one of 512 MB."""
    script = tmp_path / "train.py"
    script.write_text(WHOLE if mode == "whole job" else REPLICAS)
    flags = ["--standalone", "--nproc-per-node", "2"] if mode == "whole job" else ["--replicas", "2"]
    work = tmp_path / "work"
    work.mkdir()
    ordinary = "mount -t tmpfs -o size=512m x /dev/shm; ip link set lo up"
    inside = f"{ordinary}; cd {shlex.quote(str(work))}; {MACHINES[machine]}\n" + 'exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", inside,
         "bash", sys.executable, "-m", "allranks", "run", *flags, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout.decode(errors="replace")
    if machine != "closed output":
        assert done.stdout.count(b"trained\n") == 2 and b"Traceback" not in done.stdout, done.stdout.decode()
