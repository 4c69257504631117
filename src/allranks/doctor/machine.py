"""Checks of this node: environment variables, Python packages, GPUs, network interfaces, limits, shared memory, folders."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from allranks.doctor import Check, DoctorOptions
from allranks.ledger.history import known_bad
from allranks.stacktraces.gpus import ask_nvidia_smi, csv_cells

PROBE_BYTES = 32 << 20
SLOW_MB_S = 100.0
_INTEGERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def check_history(options: DoctorOptions) -> list[Check]:
    """This node has not failed repeatedly in earlier jobs."""
    bad = known_bad(socket.gethostname())
    if bad is None:
        return [Check("earlier jobs", "ok", "no repeated failures of this node")]
    hint = "`allranks history --node NAME` lists them; leave the node out: `allranks history --slurm-exclude`"
    return [Check("earlier jobs", "warning", f"this node failed before: {bad.reason}", hint)]


def check_environment(options: DoctorOptions) -> list[Check]:
    """The launcher's variables are all set, or none is."""
    have = {name: os.environ[name] for name in (*_INTEGERS, "MASTER_ADDR") if name in os.environ}
    if not have:
        return [Check("environment", "ok", "no rank variables are set: a launcher will set them")]
    found = []
    missing = [n for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in have]
    if missing:
        hint = "Start through a launcher: allranks run --standalone --nproc-per-node N SCRIPT"
        text = f"{', '.join(missing)} not set, but {', '.join(have)} is"
        found.append(Check("environment", "problem", text, hint))
    wrong = [n for n in _INTEGERS if n in have and not have[n].isdigit()]
    for name in wrong:
        text = f"{name}={have[name]!r} is not a whole number of at least 0"
        found.append(Check("environment", "problem", text, f"unset {name} or correct it"))
    if not wrong and {"RANK", "WORLD_SIZE"} <= have.keys() and int(have["RANK"]) >= int(have["WORLD_SIZE"]):
        text = f"RANK={have['RANK']} is not below WORLD_SIZE={have['WORLD_SIZE']}"
        found.append(Check("environment", "problem", text, "Check the launcher's node ranks"))
    if "MASTER_ADDR" in have:
        found.append(_check_master(have["MASTER_ADDR"]))
    return found or [Check("environment", "ok", ", ".join(f"{k}={v}" for k, v in have.items()))]


def _check_master(name: str) -> Check:
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        hint = "Use an IP address, or fix DNS or /etc/hosts on this node"
        return Check("MASTER_ADDR", "problem", f"{name} does not resolve: {error}", hint)
    if str(address).startswith("127.") and os.environ.get("GROUP_WORLD_SIZE", "1") not in ("", "1"):
        text = f"{name} is this machine's loopback: other nodes cannot reach it"
        return Check("MASTER_ADDR", "problem", text, "Set MASTER_ADDR to an address that all nodes can reach")
    return Check("MASTER_ADDR", "ok", f"{name} is {address}")


def check_python(options: DoctorOptions) -> list[Check]:
    """The versions of Python and torch are supported. Does not import torch."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        text = f"Python {platform.python_version()}, torch is not installed"
        return [Check("torch", "warning", text, "pip install 'allranks[torch]'")]
    found = [_recorded_torch(torch)]
    if _restarts_mix() and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        text = f"torchrun of torch {torch} may fail restarts and scale-ups: ranks read addresses of the previous attempt"
        hint = "Start with `allranks run`, which fixes it, or: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        found.append(Check("torchrun restarts", "warning", text, hint))
    return found


def _recorded_torch(version: str) -> Check:
    """Whether the recorder supports all calls of this torch (recording/torch_internals.py)."""
    text = f"Python {platform.python_version()}, torch {version}"
    numbers = [int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal()]
    if numbers >= [2, 7]:
        return Check("torch", "ok", text)
    lost = "calls from C++ (DDP, functional collectives) are not recorded"
    return Check("torch", "warning", f"{text}: {lost}", "Recording them needs torch 2.7 or later")


def _restarts_mix() -> bool:
    """Whether this torch uses the same keys of torchrun's store for all attempts (a bug of some versions)."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        with contextlib.suppress(OSError):
            return "/worker/attempt_" not in Path(folder, "distributed", "rendezvous.py").read_text()
    return False


_GPU_FIELDS = "index,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"


def check_gpus(options: DoctorOptions) -> list[Check]:
    """nvidia-smi reports a driver and enough GPUs, without errors and other users."""
    if shutil.which("nvidia-smi") is None:
        return [Check("GPU", "skipped", "no nvidia-smi on this node: CPU only")]
    try:
        out = ask_nvidia_smi(f"--query-gpu={_GPU_FIELDS}", max(10.0, options.timeout_s))
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = "The driver hangs: drain this node and reboot it"
        return [Check("GPU", "problem", f"nvidia-smi does not answer: {error}", fix)]
    if out.returncode:
        text = (out.stdout + out.stderr).strip()[:300]
        return [Check("GPU", "problem", text, "Reload the driver or reboot this node")]
    rows = csv_cells(out.stdout)
    found = [Check("GPU", "ok", f"{len(rows)} x {rows[0][1]}, driver {rows[0][2]}")] if rows else []
    found += [check for row in rows for check in _check_gpu(*row)]
    if options.nproc_per_node and options.nproc_per_node > len(rows):
        text = f"{options.nproc_per_node} ranks, but only {len(rows)} GPUs"
        found.append(Check("GPU", "problem", text, "Lower --nproc-per-node, or check CUDA_VISIBLE_DEVICES"))
    return found


def _check_gpu(
    number: str, name: str, driver: str, total: str, used: str, errors: str, slowed: str
) -> Iterator[Check]:
    """Checks one row of nvidia-smi. Values that a GPU does not report are not numbers."""
    if errors.isdigit() and int(errors) > 0:
        text = f"GPU {number} has {errors} uncorrected memory errors"
        yield Check("GPU ECC", "problem", text, "Drain the node; nvidia-smi --gpu-reset, or replace the card")
    if slowed.lower() == "active":
        text = f"GPU {number} is slowed down by hardware (heat or power)"
        hint = "Check cooling and power of this node, which will slow the job down"
        yield Check("GPU clocks", "warning", text, hint)
    if total.isdigit() and used.isdigit() and int(used) > 0.1 * int(total):
        text = f"GPU {number} already has {used} of {total} MiB in use"
        yield Check("GPU memory", "warning", text, "nvidia-smi lists the processes; end left-over ranks")


def check_network(options: DoctorOptions) -> list[Check]:
    """The interfaces in NCCL's and gloo's variables exist, and the host name resolves."""
    names = {p.name for p in Path("/sys/class/net").iterdir()} if Path("/sys/class/net").exists() else set()
    found = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        if value and not _names_interface(value, names):
            text = f"{value!r} matches no interface of this node ({', '.join(sorted(names))})"
            hint = f"export {variable}=NAME with a name from `ip -br addr`"
            found.append(Check(variable, "problem", text, hint))
    up = sorted(n for n in names if n != "lo" and _up(n))
    if len(up) > 1 and "NCCL_SOCKET_IFNAME" not in os.environ:
        text = f"several interfaces are up ({', '.join(up)}); nodes may choose different ones"
        fix = "export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME with the interface that all nodes share"
        found.append(Check("interfaces", "warning", text, fix))
    found += _check_host_name()
    return found or [Check("network", "ok", f"interfaces up: {', '.join(up) or 'lo only'}")]


def _names_interface(value: str, names: set[str]) -> bool:
    """Whether an interface matches NCCL's list (prefixes; ^: none of these, =: exact names)."""
    wanted = [word.lstrip("=^") for word in value.split(",") if word]
    exact = value.startswith("=")
    return value.startswith("^") or any(
        name == word or (not exact and name.startswith(word)) for word in wanted for name in names
    )


def _check_host_name() -> list[Check]:
    host = socket.gethostname()
    try:
        own = str(socket.getaddrinfo(host, None)[0][4][0])
    except (OSError, UnicodeError):
        fix = "Add it to /etc/hosts or DNS: gloo and torchrun resolve it"
        return [Check("host name", "warning", f"{host} does not resolve", fix)]
    if not own.startswith("127.") and own != "::1":
        return []
    text = f"{host} resolves to {own}: other nodes cannot connect to this address"
    hint = "Fix /etc/hosts, or export GLOO_SOCKET_IFNAME / pass --local-addr"
    return [Check("host name", "warning", text, hint)]


def _up(name: str) -> bool:
    try:
        return Path(f"/sys/class/net/{name}/operstate").read_text().strip() == "up"
    except OSError:
        return False


def check_limits(options: DoctorOptions) -> list[Check]:
    """Limits of open files, processes and locked memory are high enough."""
    found = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 16384:
        enough = hard == resource.RLIM_INFINITY or hard > soft
        hint = f"ulimit -n {min(65536, hard) if enough else 65536}"
        hint += "" if enough else " (the hard limit too: limits.conf)"
        text = f"ulimit -n is {soft}; many ranks and loaders need more"
        found.append(Check("open files", "warning", text, hint))
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if tasks != resource.RLIM_INFINITY and tasks < 8192:
        text = f"ulimit -u is {tasks}; each rank has dozens of threads, and its loaders"
        hint = "ulimit -u unlimited (limits.conf, or docker --ulimit nproc=-1)"
        found.append(Check("processes", "warning", text, hint))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if Path("/sys/class/infiniband").exists() and locked != resource.RLIM_INFINITY:
        text = f"ulimit -l is {locked}: RDMA cannot register memory"
        hint = "ulimit -l unlimited (limits.conf, or docker --ulimit memlock=-1)"
        found.append(Check("locked memory", "problem", text, hint))
    quota = _memory_limit()
    if quota is not None:
        found.append(Check("memory limit", "ok", f"this cgroup may use {quota / 2**30:.1f} GiB"))
    return found or [Check("limits", "ok", f"open files {soft}")]


def _memory_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if re.fullmatch(r"\d+", text) and int(text) < 1 << 50:
            return int(text)
    return None


def check_shared_memory(options: DoctorOptions) -> list[Check]:
    """/dev/shm holds DataLoader tensors and black boxes."""
    path = Path("/dev/shm")
    if not path.exists():
        text = "there is no /dev/shm; black boxes go to the temp folder"
        return [Check("shared memory", "warning", text, "Mount a tmpfs at /dev/shm")]
    usage = shutil.disk_usage(path)
    text = f"/dev/shm has {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.total <= 64 << 20:
        text += ": a container's default, too small for DataLoader workers"
        hint = "docker run --shm-size=16g (Kubernetes: an emptyDir with medium Memory at /dev/shm)"
        return [Check("shared memory", "problem", text, hint)]
    if usage.free < 512 << 20:
        hint = "Remove left-over files (ls -la /dev/shm), or make it larger"
        return [Check("shared memory", "warning", text, hint)]
    return [Check("shared memory", "ok", text)]


def check_folders(options: DoctorOptions) -> list[Check]:
    """Each checkpoint folder can be written, has space, and is fast enough."""
    found = [_check_folder(Path(name)) for name in options.checkpoint_folders]
    return found or [Check("checkpoint folders", "skipped", "none given (--checkpoint-folder PATH)")]


def _check_folder(path: Path) -> Check:
    name = f"folder {path}"
    if not path.exists():
        return Check(name, "problem", "it does not exist", f"mkdir -p {path}")
    try:
        speed = _write_speed(path)
    except OSError as error:
        what, hint = "cannot be written", f"Check owner and mount: ls -ld {path}; df -h {path}; df -i {path}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            rest = f"remove other files (du -sh {path}/*; df -h {path})"
            what, hint = "full", f"allranks checkpoint prune {path} --keep-last N, or {rest}"
        return Check(name, "problem", f"{what}: {error.strerror}", hint)
    free = shutil.disk_usage(path).free
    text = f"{free / 2**30:.1f} GiB free, {speed:.0f} MB/s with fsync"
    if free < 10 << 30:
        hint = f"allranks checkpoint prune {path} --keep-last N, or a larger disk"
        return Check(name, "warning", text, hint)
    if speed < SLOW_MB_S:
        hint = "Use a local NVMe folder, and the object store as the last tier"
        return Check(name, "warning", f"{text}: saves will take long", hint)
    return Check(name, "ok", text)


def _write_speed(path: Path) -> float:
    """MB/s of writing a file with fsync."""
    block = os.urandom(1 << 20)
    handle, name = tempfile.mkstemp(prefix=".allranks-doctor-", dir=path)
    try:
        begin = time.monotonic()
        with os.fdopen(handle, "wb") as out:
            for _ in range(PROBE_BYTES // len(block)):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        return PROBE_BYTES / 1e6 / max(1e-6, time.monotonic() - begin)
    finally:
        os.unlink(name)
