"""Dumps of torch 2.15: real hangs on gloo, recorded by `torch215_hangs.py`; and those of torch's hook, real and in its form."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis import diagnose
from allranks.load import load_paths
from allranks.model.diagnosis import Diagnosis
from allranks.model.torch_dump import to_torch_dump
from allranks.model.trace import Flag
from allranks.report import text

from .hook_form import write_hook_dumps
from .test_recorded import NAMES, TRUTH, _read, gallery
from .torch215_hangs import HANGS
from .torch_dumps import entry, reduces

pytestmark = pytest.mark.usefixtures("forks")

RECORDED = Path(__file__).parent / "torch215"
#: gloo's dump does not say who is in the pair: rank 2, which waits for both, is named too.
ONE_TOO_MANY = "groups_crossed"


def judged(folder: Path) -> Diagnosis:
    loaded = load_paths([str(folder)])
    return diagnose(loaded.traces, loaded.files)


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_that_gloo_recorded_is_named(name: str) -> None:
    """Rank and cause; where nothing is wrong, nothing is found."""
    hang = HANGS[name]
    loaded = load_paths([str(RECORDED / f"{name}.tar.gz")])
    assert len(loaded.traces) == (2 if name == "killed" else 3)
    verdict = diagnose(loaded.traces, loaded.files).verdict
    if not hang.causes:
        assert verdict is None
    else:
        assert verdict is not None and verdict.cause in hang.causes, verdict
        assert verdict.ranks == hang.ranks or name == ONE_TOO_MANY


def test_messages_that_gloo_does_not_record_are_not_called_fine() -> None:
    """They move its counters; a job may wait in one. Where there are none, nothing is said of them."""
    said = "keeps no sends and receives"
    assert said in text.headline_text(judged(RECORDED / "healthy_messages.tar.gz"))
    assert said not in text.headline_text(judged(RECORDED / "healthy.tar.gz"))


# -- torch's hook -----------------------------------------------------------------------------------------------


def is_right(name: str, folder: Path) -> bool:
    loaded = load_paths([str(folder)])
    result = diagnose(loaded.traces, loaded.files)
    outcome = gallery.Outcome(TRUTH[name], tuple(loaded.traces), result, 0, ())
    return all(gallery.is_right(outcome)[:2])


@cache
def explained() -> tuple[str, ...]:
    """Recorded hangs that a dump explains: marks of steps, tags, roots and setup calls are not in torch's dumps."""
    found = []
    for name in NAMES:
        facts, traces = _read(name)
        if facts["gone"] or not facts["now_ns"]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            for trace in traces:
                path = Path(folder) / f"trace_{trace.header.rank}"
                path.write_bytes(pickle.dumps(to_torch_dump(trace), protocol=2))
                os.utime(path, ns=(facts["now_ns"],) * 2)
            found += [name] if is_right(name, Path(folder)) else []
    return tuple(found)


@pytest.mark.parametrize(("backend", "completions"), [("nccl2", True), ("mine", False)])
def test_hangs_in_the_form_of_the_hook_are_named(backend: str, completions: bool, tmp_path: Path) -> None:
    """Every recorded hang that a whole dump of its calls explains; nothing is wrong with the healthy ones."""
    wrong = []
    for name in explained():
        facts, traces = _read(name)
        folder = write_hook_dumps(tmp_path / name, traces, facts["now_ns"], backend, completions)
        wrong += [] if is_right(name, folder) else [name]
    assert len(explained()) > 80
    assert len(wrong) <= 0.05 * len(explained()), wrong


HOOKED = """
import sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import FlightRecorderHook, _dump_fr_trace
from torch.testing._internal.distributed.fake_pg import FakeStore
rank, calls, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
hook = FlightRecorderHook.attach(dist.group.WORLD, [0, 1])
tensor = torch.ones(4)
for _ in range(calls):
    dist.all_reduce(tensor)
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
vars(torch)["_inductor"] = type(sys)("_inductor")
open(out, "wb").write(_dump_fr_trace(True, True, False, "fake"))
"""


def test_a_real_dump_of_the_hook_without_completions(tmp_path: Path) -> None:
    """Ranks that made the same calls are healthy although none reads completed; one that made less lacks."""
    pytest.importorskip("torch")
    from torch._C import _distributed_c10d

    if not hasattr(_distributed_c10d, "FlightRecorderHook"):
        pytest.skip("this torch has no recorder hook")
    for rank, calls in ((0, 4), (1, 4), (2, 3)):
        folder = tmp_path / ("short" if rank == 2 else "same")
        folder.mkdir(exist_ok=True)
        out = folder / f"trace_{min(rank, 1)}"
        subprocess.run([sys.executable, "-c", HOOKED, str(min(rank, 1)), str(calls), str(out)], check=True)
    (tmp_path / "short" / "trace_0").write_bytes((tmp_path / "same" / "trace_0").read_bytes())
    loaded = load_paths([str(tmp_path / "same")])
    assert {trace.kind for trace in loaded.traces} == {"torch hook pickle 2.10"}
    assert all((trace.calls["flags"] & Flag.ENDED_UNSEEN).all() for trace in loaded.traces)
    assert diagnose(loaded.traces, loaded.files).status == "ok"
    result = judged(tmp_path / "short")
    assert result.verdict is None or result.verdict.ranks == (1,)
    assert "#4" in (result.verdict or result.findings[0]).sentence or result.findings[0].cause == "skew"


def hook_entries(count: int, **last: Any) -> list[dict[str, Any]]:
    """all_reduces of nccl2; `last` changes the last one."""
    made = []
    for index, one in enumerate(reduces(1, count, lib="nccl2")):
        made.append({**one, "record_id": index, "op_id": index, "time_created_ns": 10**18 + index * 10**6})
    made[-1] |= last
    return made


def write_hook(folder: Path, ranks: dict[int, list[dict[str, Any]]], members: list[int], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, entries in ranks.items():
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(members)}}
        dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries, **more}
        path = folder / f"trace_{rank}"
        path.write_bytes(pickle.dumps(dump, protocol=2))
        os.utime(path, ns=(10**18 + 60 * 10**9,) * 2)
    return folder


WAITS = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}


def test_a_rank_that_did_not_dump_is_not_called_dead(tmp_path: Path) -> None:
    """On nccl2 only the ranks that wait write a file."""
    ranks = {0: hook_entries(5, **WAITS), 2: hook_entries(5, **WAITS)}
    verdict = judged(write_hook(tmp_path, ranks, [0, 1, 2])).verdict
    assert verdict is not None
    assert (verdict.cause, verdict.ranks) == ("missing_rank", (1,))
    assert "died" not in verdict.sentence and "only the ranks that wait write a dump" in str(verdict.evidence)


def test_a_status_that_counts_messages_hides_nobody(tmp_path: Path) -> None:
    """Six operations are done: five collectives and a message, not six collectives."""
    message = entry("send 0->1", 5, lib="nccl2", p2p_seq=1, is_p2p=True)
    status = {
        "0": {"last_enqueued_collective": 6, "last_started_collective": -1, "last_completed_collective": 5}
    }
    waits = [*hook_entries(5), message | {"record_id": 5, "op_id": 5}]
    waits += [hook_entries(6)[-1] | WAITS | {"record_id": 6, "op_id": 6, "p2p_seq_id": 1}]
    receive = entry("recv 1<-0", 5, lib="nccl2", p2p_seq=1, is_p2p=True) | {"record_id": 5, "op_id": 5}
    folder = write_hook(tmp_path, {0: waits}, [0, 1], pg_status=status)
    status = {
        "0": {"last_enqueued_collective": 5, "last_started_collective": -1, "last_completed_collective": 6}
    }
    write_hook(folder, {1: [*hook_entries(5), receive]}, [0, 1], pg_status=status)
    verdict = judged(folder).verdict
    assert verdict is not None and (verdict.cause, verdict.ranks) == ("missing_rank", (1,))


def test_a_batch_that_reads_completed_is_open_where_its_partner_posted_nothing(tmp_path: Path) -> None:
    frames = [{"name": "batch_isend_irecv", "filename": "torch/distributed/distributed_c10d.py", "line": 1}]
    frames.append({"name": "step", "filename": "train.py", "line": 7})
    receive = entry("recv 0<-1", 3, lib="nccl2", p2p_seq=1, is_p2p=True)
    receive |= {"frames": frames, "record_id": 3, "op_id": 3, "time_created_ns": 10**18 + 4 * 10**6}
    receive["time_discovered_completed_ns"] = receive["time_created_ns"] + 4_000
    ranks = {0: [*hook_entries(3), receive], 1: hook_entries(3)}
    verdict = judged(write_hook(tmp_path, ranks, [0, 1])).verdict
    assert verdict is not None and verdict.ranks == (1,)
    assert "train.py:7" in verdict.where


def test_two_ranks_that_both_take_a_gather_named_different_roots(tmp_path: Path) -> None:
    """Dumps do not record the root: a rank with an output is the root by its own account."""

    def gathers(root: int, last: bool, more: dict[str, Any]) -> list[dict[str, Any]]:
        whole = [[8], [8], [8]]
        made = [entry("gather", n, sizes=[[8]], out=whole if root else [], lib="nccl2") for n in range(1, 5)]
        made.append(entry("gather", 5, sizes=[[8]], out=whole if last else [], lib="nccl2") | more)
        return [one | {"record_id": i, "op_id": i} for i, one in enumerate(made)]

    ranks = {0: gathers(1, True, WAITS), 1: gathers(0, True, WAITS), 2: gathers(0, False, {})}
    verdict = judged(write_hook(tmp_path, ranks, [0, 1, 2])).verdict
    assert verdict is not None and (verdict.cause, verdict.ranks) == ("root_mismatch", (1,)), verdict
    assert "with itself as the root, where rank 0 had itself as the root" in verdict.sentence


def test_a_message_that_a_rank_passed_over_comes_before_a_rank_without_a_dump(tmp_path: Path) -> None:
    """Rank 1 waits in the barrier and has not posted the receive for the send of rank 0; of rank 2 there is no file."""
    send = entry("send 0->1", 3, lib="nccl2", p2p_seq=1, is_p2p=True) | WAITS | {"record_id": 3, "op_id": 3}
    waits = entry("barrier", 4, lib="nccl2", line=12) | WAITS
    ranks = {
        0: [*hook_entries(3), send, waits | {"record_id": 4, "op_id": 4}],
        1: [*hook_entries(3), waits | {"record_id": 3, "op_id": 3}],
    }
    verdict = judged(write_hook(tmp_path, ranks, [0, 1, 2])).verdict
    assert verdict is not None and (verdict.cause, verdict.ranks) == ("p2p_mismatch", (1,)), verdict


@pytest.mark.parametrize(
    "backend", ["nccl", "nccl2", "nccl-legacy", "nccl-lazy", "ucc", "xccl", "mpi", "mine"]
)
def test_a_backend_keeps_its_name(backend: str, tmp_path: Path) -> None:
    """Read, and written again, under the name that it has."""
    entries = [one | {"profiling_name": f"{backend}:all_reduce"} for one in hook_entries(3)]
    (trace,) = load_paths([str(write_hook(tmp_path, {0: entries}, [0, 1]))]).traces
    assert trace.groups[1].backend == backend
    dump: Any = to_torch_dump(trace)
    assert {one["profiling_name"] for one in dump["entries"]} == {f"{backend}:all_reduce"}
