"""Starts two NCCL ranks that hang, collects, checks, and packs the bundle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

RANK_PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
from datetime import timedelta

def extra_statistics(tensor):
    dist.all_reduce(tensor)
    torch.cuda.synchronize()

def load_next_batch():
    time.sleep(1000)

def main():
    rank = int(os.environ["RANK"])
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = "cuda:0" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=timedelta(seconds=600))
    tensor = torch.ones(1024, device=device)
    for step in range(3):
        dist.all_reduce(tensor)
    if backend == "nccl":
        torch.cuda.synchronize()
    open(os.path.join(sys.argv[1], f"ready{rank}"), "w").close()
    if rank == 0:
        extra_statistics(tensor)
    load_next_batch()

main()
"""
failures = 0


def check(name: str, holds: bool, detail: str = "") -> None:
    global failures
    failures += not holds
    print(f"{'PASS' if holds else 'FAIL'}  {name}{'  ' + detail if detail else ''}", flush=True)


def main() -> int:
    out = Path(sys.argv[1])
    program = out / "hang_two_ranks.py"
    program.write_text(RANK_PROGRAM)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [start(program, out, rank, port) for rank in (0, 1)]
    try:
        wait_ready(out, ranks)
        time.sleep(3.0)
        look(out, {rank: process.pid for rank, process in enumerate(ranks)})
        check("both ranks live on after the whole collection", all(p.poll() is None for p in ranks))
    finally:
        for process in ranks:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    pack(out)
    print("ALL PASS" if not failures else f"{failures} FAILED")
    return 1 if failures else 0


def start(program: Path, out: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    env = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "NCCL_HOSTID": f"host{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "gpu-stacks",
    }  # fmt: skip
    with open(out / f"rank{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(program), str(out)], stdout=log, stderr=log, start_new_session=True, env=env
        )


def wait_ready(out: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 90
    while not all((out / f"ready{rank}").exists() for rank in (0, 1)):
        dead = [rank for rank, process in enumerate(ranks) if process.poll() is not None]
        if dead or time.monotonic() > deadline:
            for rank in (0, 1):
                print(f"--- rank {rank}\n{(out / f'rank{rank}.log').read_text(errors='replace')[-3000:]}")
            raise SystemExit("FAIL  the ranks did not get ready")
        time.sleep(0.1)


def look(out: Path, pids: dict[int, int]) -> None:
    import importlib.util

    from allranks.stacktraces import (
        CollectOptions,
        Selection,
        classify,
        collect,
        find_targets,
        ras,
        write_bundle,
    )
    from allranks.stacktraces.debuggers import find_cuda_gdb, find_pyspy
    from allranks.stacktraces.text import grow_tree, render_text, report_json

    print(
        f"msgspec here: {importlib.util.find_spec('msgspec') is not None}; py-spy: {find_pyspy()}; cuda-gdb: {find_cuda_gdb()}"
    )
    folder = out / "nccl_hang"
    found = find_targets(Selection(job="gpu-stacks"))
    check(
        "two ranks are found by their environment", {t.rank: t.pid for t in found if t.child is None} == pids
    )
    answer = ras.ask(as_json=True)
    folder.mkdir(parents=True, exist_ok=True)
    if answer is not None:
        (folder / "ras.json.txt").write_text(answer.text)
    begin = time.monotonic()
    cuda = find_cuda_gdb() is not None
    capture = collect(
        found,
        CollectOptions(interval_s=2.0, cuda_gdb=cuda, raw_folder=folder),
        lambda text: print("  ..", text),
    )
    print(f"collected in {time.monotonic() - begin:.1f} s")
    write_bundle(capture, folder)
    report = classify(capture)
    roots = grow_tree(capture)
    (folder / "report.json").write_text(json.dumps(report_json(report, roots), indent=1))
    for line in render_text(report, roots):
        print("   ", line)
    import torch

    if torch.cuda.is_available():
        check("NCCL RAS answered twice", len(capture.ras) == 2, f"{len(capture.ras)} answers")
        check("NCCL RAS names the lagging rank", bool(report.ras), "; ".join(report.ras)[:300])
    check(
        "/proc facts of both ranks",
        all(p.snapshots and p.snapshots[-1].facts for p in capture.processes if p.child is None),
    )
    if find_pyspy():
        check("rank 1 is the culprit", report.culprits == (1,), report.sentence)
        check(
            "rank 0 waits",
            report.ranks[0].cause in ("cuda_wait", "collective_wait"),
            report.ranks[0].evidence,
        )
        check(
            "rank 1 sleeps in load_next_batch",
            report.ranks[1].where.endswith("in load_next_batch"),
            report.ranks[1].where,
        )
    if cuda:
        kernels = {p.rank: p.kernels for p in capture.processes if p.child is None}
        check(
            "cuda-gdb names the collective's kernel on rank 0",
            any("nccl" in k for k in kernels.get(0, ())),
            str(kernels),
        )
    provenance(folder)


def provenance(folder: Path) -> None:
    """Where the bundle comes from, for anyone who reads it as a test fixture."""
    import torch

    facts = {
        "what": "two NCCL ranks sharing one GPU; rank 0 entered one all_reduce more than rank 1",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none",
        "python": sys.version.split()[0],
        "made_by": "scripts/gpu_stacks.py",
    }
    (folder / "provenance.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts))


def pack(out: Path) -> None:
    with tarfile.open(out / "nccl_hang.tar.gz", "w:gz") as archive:
        archive.add(out / "nccl_hang", arcname="nccl_hang")
    print(f"wrote {out / 'nccl_hang.tar.gz'} ({(out / 'nccl_hang.tar.gz').stat().st_size} bytes)")


if __name__ == "__main__":
    sys.exit(main())
