"""Runs the scripts of examples/hangs on NCCL, several ranks sharing one GPU, and keeps what torch's recorder dumped.

    python3 scripts/gpu_hangs.py [--jobs 8] [--seconds 200] [--modes queued,synced] [--backend gloo] [--skip-known] [NAME ...]

Writes $OUT/hangs.tar.gz: MODE/NAME/trace_RANK (torch's dump), MODE/NAME/boxes and MODE/NAME/truth.json; prints one line per job,
at the end how often rank, cause and line were right, and writes that to $OUT/gpu_hangs.json.
`queued`: calls are only enqueued, as always on NCCL, and waited for at the script's end. `synced`: each is waited for.
No job is begun after --seconds. `--skip-known`: only kinds that NCCL has and that tests/diagnose/nccl_hangs lacks. `--backend gloo` rehearses it without a GPU. tests/diagnose/nccl_hangs holds a choice of these.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import runpy
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "examples" / "hangs")]
import gallery  # noqa: E402

from allranks.launch.rank_entry import die_with_parent  # noqa: E402

_position = gallery._position

#: Ranks of one GPU must look like ranks of several hosts.
NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
#: So long may init_process_group take.
INIT_S = 35.0
#: Kinds that are no hangs on NCCL: it has no tags, no receive from anyone and no monitored_barrier (that raises), and it
#: keeps small messages that nobody takes.
NOT_ON_NCCL = (
    "barrier_kinds",
    "batch_tags",
    "batch_without_partner",
    "message_tags",
    "monitored_barrier_without_one",
    "ok_receive_from_anyone",
    "ok_tags_in_other_order",
    "receive_from_anyone",
)
#: How long a rank that was asked for its dump may take.
DUMP_S = 4.0


def rank_on_gpu(rank: int, world: int, script: str) -> None:
    """A rank of the gallery whose tensors are on the GPU and whose groups are NCCL's."""
    if os.environ["HANGS_BACKEND"] == "nccl":
        os.environ.update(NCCL, NCCL_HOSTID=f"host-{rank}")
        use_gpu()
    threading.Thread(target=dump_when_asked, args=(rank,), daemon=True).start()
    import allranks

    null = os.open(os.devnull, os.O_WRONLY)
    log = os.open(f"{os.environ['ALLRANKS_DIR']}/log_{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(null, 1)
    os.dup2(log, 2)
    recorder = allranks.record()
    try:
        runpy.run_path(script, run_name="__main__")
        if os.environ["HANGS_BACKEND"] == "nccl":
            importlib.import_module("torch").cuda.synchronize()
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    recorder.close("exit")
    if Path(script).name.startswith("ok_"):
        write_dump(rank)
    os._exit(0)


def use_gpu() -> None:
    """Lets what a script makes of gloo and of the CPU be of NCCL and of the GPU."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    original = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        original("nccl" if backend in (None, "gloo") else backend, *args, device_id=device, **options)

    dist.init_process_group = init_process_group


def write_dump(rank: int) -> None:
    """Torch's own dump, whole or not at all."""
    if os.environ["HANGS_BACKEND"] != "nccl":
        return
    import torch._C._distributed_c10d as c10d

    rings = [c10d._dump_nccl_trace()]
    for name in ("nccl2", "nccl") if hasattr(c10d, "FlightRecorderHook") else ():  # one ring for each backend
        rings.append(c10d._dump_fr_trace(backend=name))
    data = max(rings, key=len)
    folder = Path(os.environ["ALLRANKS_DIR"])
    (folder / f"part_{rank}").write_bytes(data)
    (folder / f"part_{rank}").rename(folder / f"trace_{rank}")


def dump_when_asked(rank: int) -> None:
    while not Path(os.environ["ALLRANKS_DIR"], "dump").exists():
        time.sleep(0.1)
    write_dump(rank)


def run(case: gallery.Truth, mode: str, backend: str, archive: Path) -> str:
    """One job; the line about it."""
    os.environ["HANGS_BACKEND"] = backend
    os.environ["CUDA_LAUNCH_BLOCKING"] = str(int(mode == "synced"))
    with tempfile.TemporaryDirectory(prefix="allranks-hangs-") as name:
        folder = Path(name, case.name)
        with gallery.hanging(case, folder, 60.0) as ranks:
            living = [rank for rank, pid in ranks.pids.items() if gallery._state(pid) != "Z"]
            now_ns = time.time_ns() if living else 0
            (folder / "dump").touch()
            deadline = time.monotonic() + (DUMP_S if backend == "nccl" else 0)
            while time.monotonic() < deadline and not all((folder / f"trace_{r}").exists() for r in living):
                time.sleep(0.05)
            gone = [
                gallery.RankNow(r, "gone", "", "its process is gone") for r in ranks.pids if r not in living
            ]
            # Before the ranks are killed: the others would note that the first is gone.
            folder = Path(
                shutil.copytree(folder, folder / "kept", ignore=shutil.ignore_patterns("kept", "dump"))
            )
        truth = {
            "name": case.name,
            "mode": mode,
            "processes": case.processes,
            "causes": case.causes,
            "ranks": case.ranks,
        }
        truth |= {"lines": case.lines, "now_ns": now_ns, "gone": [now.rank for now in gone]}
        (folder / "truth.json").write_text(json.dumps(truth))
        with tarfile.open(archive / f"{mode}-{case.name}.tar", "w") as tar:
            for path in sorted(folder.iterdir()):
                inside = f"boxes/{path.name}" if path.suffix == ".box" else path.name
                tar.add(path, f"{mode}/{case.name}/{inside}")
        found = [
            judged(case, folder, "*.box", now_ns, gone if living else []),
            judged(case, folder, "trace_*", 0, []),
        ]
    right = {
        kind: said.split()[2] for kind, said in zip(("boxes", "dumps"), found, strict=True) if said != "none"
    }
    (archive / f"{mode}-{case.name}.json").write_text(json.dumps(right))
    return f"{mode} {case.name}: truth {case.causes} {case.ranks}; boxes {found[0]}; dumps {found[1]}"


def judged(case: gallery.Truth, folder: Path, pattern: str, now_ns: int, seen: list[gallery.RankNow]) -> str:
    """The verdict on some of the files, and whether rank, cause and line are right."""
    paths = sorted(map(str, folder.glob(pattern)))
    if not paths:
        return "none"
    loaded = gallery.load_paths(paths, gallery.LoadOptions(allow_nothing=True))
    options = gallery.DiagnoseOptions(now_ns=now_ns, ended=pattern == "*.box" and not now_ns)
    result = gallery.diagnose(loaded.traces, loaded.files, stacks=seen, options=options)
    right = gallery.is_right(gallery.Outcome(case, tuple(loaded.traces), result, now_ns))
    said = (
        f"{result.verdict.cause} {result.verdict.ranks} {result.verdict.where}"
        if result.verdict
        else "nothing"
    )
    return f"({len(loaded.traces)} files) {''.join('-+'[held] for held in right)} {said}"


def count(marks: list[str]) -> dict[str, int]:
    """Of the marks of `judged`: how often each was right."""
    found = {
        name: sum(mark[place] == "+" for mark in marks)
        for place, name in enumerate(("rank", "cause", "line"))
    }
    return {"jobs": len(marks), **found, "rank and line": sum(mark[0] == mark[2] == "+" for mark in marks)}


def position(folder: Path, processes: int) -> tuple[object, ...] | None:
    """As the gallery's; None also while NCCL may still be connecting, which takes long on a shared GPU."""
    now = _position(folder, processes)
    since = (p.inside_ns for _, _, p in now or () if p.inside == "init_process_group")
    return None if any(time.time_ns() - ns < INIT_S * 1e9 for ns in since) else now


def work(cases: list[tuple[gallery.Truth, str]], backend: str, archive: Path, end: float) -> None:
    """The jobs of one worker process, one after the other."""
    for case, mode in cases:
        if time.monotonic() > end:
            break
        try:
            print(run(case, mode, backend, archive), flush=True)
        except Exception as error:  # the other jobs go on
            print(f"{mode} {case.name}: {type(error).__name__}: {error}", flush=True)


def pack(archive: Path, target: Path) -> None:
    """Each job that got as far as a call as one small archive: what tests/diagnose/nccl_hangs holds."""
    from tests.box_files import box_bytes

    from allranks.blackbox.reader import read_trace

    target.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, dict[str, bytes]] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            _, job, *inside = member.name.split("/")
            file = tar.extractfile(member)
            if file is not None and (
                inside[-1].startswith("trace_") or inside[-1].endswith((".box", ".json"))
            ):
                # Of the paths only their length may stay: strings in dumps are counted.
                data = re.sub(
                    rb"/[\w./-]+(?=/(?:examples/hangs|src/allranks|scripts)/)",
                    lambda m: b"/x".ljust(len(m[0]), b"x"),
                    file.read(),
                )
                jobs.setdefault(job, {})["/".join(inside)] = data
    for job, files in jobs.items():
        traces = {name: read_trace(data) for name, data in files.items() if name.endswith(".box")}
        if not any(len(trace.calls) for trace in traces.values()):
            continue
        files |= {name: box_bytes(trace) for name, trace in traces.items()}
        with tarfile.open(target / f"{job}.tar.xz", "w:xz") as small:
            for name, data in sorted(files.items()):
                if not name.startswith("dumps/"):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    small.addfile(member, io.BytesIO(data))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--modes", default="queued,synced")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--skip-known", action="store_true")
    parser.add_argument("--pack", nargs=2, type=Path, metavar=("hangs.tar.gz", "FOLDER"), help="only this")
    args = parser.parse_args()
    if args.pack:
        pack(*args.pack)
        return 0
    began = time.monotonic()
    # the other check would begin CUDA before ranks are forked
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    gallery.preload()
    gallery._rank, gallery._position = rank_on_gpu, position
    gallery.ASLEEP_S = gallery.BUSY_S = 4.0 if args.backend == "nccl" else 2.0
    table = gallery.truth()
    names = args.names or list(table)
    if args.skip_known:
        kept = {path.name.split(".")[0] for path in (ROOT / "tests/diagnose/nccl_hangs").iterdir()}
        names = [name for name in names if name not in kept]
    if args.backend == "nccl":
        names = [name for name in names if name not in NOT_ON_NCCL]
    cases = [(table[name], mode) for mode in args.modes.split(",") for name in names]
    out = Path(os.environ.get("OUT", "."))
    with tempfile.TemporaryDirectory(prefix="allranks-hangs-") as name:
        workers, parent = [], os.getpid()
        for number in range(args.jobs):
            pid = os.fork()
            if pid == 0:
                die_with_parent(parent)
                try:
                    work(cases[number :: args.jobs], args.backend, Path(name), began + args.seconds)
                finally:
                    os._exit(0)
            workers.append(pid)
        for pid in workers:
            os.waitpid(pid, 0)
        tars = sorted(Path(name).glob("*.tar"))
        with tarfile.open(out / "hangs.tar.gz", "w:gz") as whole:
            for path in tars:
                with tarfile.open(path) as part:
                    for member in part:
                        whole.addfile(member, part.extractfile(member))
        rows = {path.stem: json.loads(path.read_text()) for path in Path(name).glob("*.json")}
    numbers = {
        kind: count([row[kind] for row in rows.values() if kind in row]) for kind in ("boxes", "dumps")
    }
    enough = numbers["boxes"]["rank and line"] >= 0.95 * len(cases)
    claim = f"rank and line named in 95 % of {len(cases)} hangs"
    print(f"{'PASS' if enough else 'FAIL'}  {claim}  {json.dumps(numbers)}")
    found = {"verdicts": {claim: enough}, "numbers": {**numbers, "jobs": rows}}
    (out / "gpu_hangs.json").write_text(json.dumps(found, indent=1))
    print(f"{len(tars)} of {len(cases)} jobs in {time.monotonic() - began:.0f} s; {out / 'hangs.tar.gz'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
