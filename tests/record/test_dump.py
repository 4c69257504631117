"""Dumps: PyTorch's formats, their names, torchfrtrace's verdict, and `allranks dump` from outside."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.blackbox.header import read_header
from allranks.blackbox.reader import find_boxes, read_trace
from allranks.cli import main as command
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as reached
from allranks.model.torch_dump import profiling_name, to_torch_dump
from allranks.model.trace import Group
from allranks.recording import torch_internals as internals
from allranks.recording.dump import dump_ended_ranks
from allranks.recording.options import from_environment

ENTRY = {
    "record_id", "pg_id", "process_group", "thread_name", "thread_id", "collective_seq_id", "p2p_seq_id", "op_id",
    "profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state",
    "time_discovered_started_ns", "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p",
}  # fmt: skip


def _work(rank: int, world: int, out: str, hang: bool) -> dict[str, Any]:
    recorder = allranks.record()
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    if rank < 3:
        dist.all_gather([torch.zeros(2) for _ in range(3)], torch.ones(2), group=group)
        dist.broadcast(torch.ones(3), 1, group=group)
    dist.reduce_scatter(torch.ones(1), [torch.ones(1) for _ in range(world)])
    dist.all_to_all_single(torch.ones(world), torch.ones(world))
    dist.monitored_barrier()
    work = None
    if hang and rank < 2:
        work = dist.all_reduce(torch.ones(5), group=group, async_op=True)  # rank 2 never comes
    path = recorder.dump_file(Path(out) / f"trace_{rank}")
    assert path.name == f"trace_{rank}"
    everything, active = (
        json.loads(recorder.dump_json()),
        json.loads(recorder.dump_json(include_completed=False)),
    )
    reached("dumped")
    del work
    return {"everything": everything, "active": active}


def _frtrace(folder: Path) -> str:
    """What PyTorch's own analyzer says of a folder; "" is a clean bill of health."""
    tool = Path(sys.executable).with_name("torchfrtrace")
    done = subprocess.run([str(tool), str(folder)], capture_output=True, text=True, timeout=300)
    if "No module named 'tools'" in done.stderr:
        pytest.skip(
            "torchfrtrace of this torch cannot start: it lacks its own module `tools` (2.8 and earlier)"
        )
    if "gloo != 'nccl' or 'xccl'" in done.stderr:
        pytest.skip("torchfrtrace of this torch reads dumps of nccl and xccl only (2.11)")
    assert done.returncode == 0, done.stderr
    return "\n".join(line for line in done.stderr.splitlines() if "tabulate" not in line)


@pytest.mark.parametrize("hang", [False, True])
def test_torchfrtrace_reads_our_pickles_with_the_right_verdict(
    folder: Path, tmp_path: Path, hang: bool
) -> None:
    """Silence on a healthy job; on a hang the group, the sequence and the missing rank."""
    out = tmp_path / "out"
    with Ranks(_work, 4, (str(out), hang)) as ranks:
        ranks.wait_for("dumped", timeout_s=60)
        if hang:
            for rank in range(4):
                ranks.kill(rank)
        outcomes = ranks.join()
    verdict = _frtrace(out)
    if not hang:
        assert verdict == ""
        assert outcomes[0].value["active"]["entries"] == []
        return
    assert verdict.count("Not all ranks joining collective") == 1
    assert "Not all ranks joining collective, sequence number: 3" in verdict
    assert "group info: 1" in verdict
    assert "missing ranks: {2}" in verdict
    assert "expected ranks: {0, 1, 2}" in verdict


def _small(rank: int, world: int, out: str) -> str:
    recorder = allranks.record()
    dist.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16))
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    recorder.dump_file(Path(out) / "pickle")
    recorder.dump_file(Path(out) / "json", format="json")
    recorder.dump_file(Path(out) / "box", format="box")
    recorder.dump_file(Path(out) / "no_calls", include_collectives=False)
    recorder.dump_file(Path(out) / "no_stacks", include_stack_traces=False)
    return recorder.dump_json()


def test_the_formats_have_torchs_fields_and_nothing_that_executes(folder: Path, tmp_path: Path) -> None:
    """The pickle holds plain values only; JSON and pickle agree; a copied box reads as the original."""
    with Ranks(_small, 2, (str(tmp_path),)) as ranks:
        text = ranks.values()[0]
    data = (tmp_path / "pickle").read_bytes()
    assert {op.name for op, _, _ in pickletools.genops(data)}.isdisjoint(
        {"GLOBAL", "REDUCE", "STACK_GLOBAL", "INST", "OBJ"}
    )
    dump = pickle.loads(data)
    assert dump["version"] == "2.10"
    assert dump["pg_config"] == {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    first, second = dump["entries"]
    assert set(first) >= ENTRY | {"frames", "duration_ms"}
    assert first["input_sizes"] == [[2, 3]]
    assert first["input_dtypes"] == ["BFloat16"]
    assert (first["process_group"], first["pg_id"]) == (("0", "default_pg"), 0)
    assert first["state"] == "completed"
    assert first["retired"] is True
    assert first["frames"][0]["name"] == "_small"
    assert second["profiling_name"] in {"gloo:send 0->1", "gloo:recv 1<-0"}
    assert second["is_p2p"] is True
    assert dump["pg_status"]["0"]["last_completed_collective"] == 1
    parsed = json.loads(text)
    assert parsed["pg_status"]["0"]["last_completed_collective"] == "1"
    assert "frames" not in parsed["entries"][0]
    assert parsed["nccl_comm_state"] == {}
    assert set(parsed["entries"][0]) >= ENTRY
    assert len(json.loads((tmp_path / "json").read_text())["entries"]) == 2
    assert "entries" not in pickle.loads((tmp_path / "no_calls").read_bytes())
    assert "frames" not in pickle.loads((tmp_path / "no_stacks").read_bytes())["entries"][0]
    copied = read_trace(tmp_path / "box")
    assert copied.names[int(copied.calls[0]["op"])] == "all_reduce"
    for name in ("pickle", "json", "box"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_names_of_calls_are_those_that_torchfrtrace_knows() -> None:
    """Ops are mapped, backends keep their names, which torch 2.15's reader takes; partners are local to their group."""
    group = Group("g", "", (4, 6), "cpu:gloo,cuda:nccl")
    assert profiling_name(group, "send", 4, 6) == "nccl:send 0->1"
    assert profiling_name(group, "recv", 6, 4) == "nccl:recv 1<-0"
    assert profiling_name(group, "recv", 6, -1) == "nccl:recv 1<-?"
    assert (
        profiling_name(Group("g", backend="mpi"), "all_gather_into_tensor", 0, -1) == "mpi:_all_gather_base"
    )


def _by_environment(rank: int, world: int) -> list[str]:
    recorder = allranks.record()
    dist.all_reduce(torch.ones(1))
    first = recorder.dump_file()
    second = recorder.dump_file()
    assert recorder.box is not None
    return [str(first), str(second), str(recorder.box.capacity)]


def _sets_it_itself(rank: int, world: int, prefix: str) -> str:
    recorder = allranks.record()
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = prefix  # as PyTorch's tutorial does, in the script
    dist.all_reduce(torch.ones(1))
    return str(recorder.dump_file(reason="timeout"))


def test_a_script_may_set_the_prefix_of_dumps_itself(folder: Path, tmp_path: Path) -> None:
    """Recording has begun before the script's first line."""
    prefix = str(tmp_path / "trace_")
    with Ranks(_sets_it_itself, 2, (prefix,)) as ranks:
        assert ranks.values() == [f"{prefix}0", f"{prefix}1"]


OTHER_RING = """
import pickle, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from allranks.recording.dump import native_dumps

class Mine(c10d.Backend):
    def name(self):
        return "mine"
    def getBackendName(self):
        return "mine"
    def allreduce(self, tensors, options):
        done = torch.futures.Future()
        done.set_result(tensors)
        return c10d._create_work_from_future(done)
    options = None  # torch's recorder asks for them, without an end where there are none

kept = Mine(0, 1)
dist.Backend.register_backend("mine", lambda *_: kept, devices=["cpu"])
for backend in ("gloo", "mine"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
for name, data in sorted(native_dumps().items()):
    print(name, [entry["profiling_name"] for entry in pickle.loads(data)["entries"]])
"""


@pytest.mark.usefixtures("forks")
def test_torchs_ring_of_every_backend_is_harvested() -> None:
    """torch 2.15 keeps one ring for each backend's own name."""
    if "backend:" not in (internals.c10d._dump_fr_trace.__doc__ or ""):
        pytest.skip("this torch has one ring for all backends")
    done = subprocess.run([sys.executable, "-c", OTHER_RING], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["fr ['gloo:all_reduce']", "fr-mine ['mine:all_reduce']"], done.stderr


def test_the_environment_of_torchs_recorder_is_honoured(folder: Path, tmp_path: Path) -> None:
    """File prefix and buffer size mean what they mean to torch."""
    env = {
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "nccl_trace_rank_"),
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "321",
    }
    with Ranks(_by_environment, 2, env=env) as ranks:
        values = ranks.values()
    for rank, (first, second, capacity) in enumerate(values):
        assert first == second == str(tmp_path / f"nccl_trace_rank_{rank}")
        assert capacity == "321"


def _ends(rank: int, world: int) -> None:
    recorder = allranks.record()
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    if rank == 1:
        recorder.dump_file()
        os._exit(3)
    if rank == 2:
        recorder.close("exit")
        return
    reached("killed next")
    time.sleep(1000)


def test_a_rank_that_was_killed_gets_its_trace_file_from_its_box(folder: Path, tmp_path: Path) -> None:
    """As torch's variables ask for it, with one that exited in good order; what a rank wrote by itself stays as it is."""
    env = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "traces" / "trace_")}
    with Ranks(_ends, 3, env=env) as ranks:
        ranks.wait_for("killed next", [0])
        dump_ended_ranks(find_boxes(folder), env)
        assert not (tmp_path / "traces" / "trace_0").exists()  # it is alive
        ranks.kill(0, signal.SIGKILL)
        ranks.join(timeout_s=60)
    boxes = find_boxes(folder)
    own = tmp_path / "traces" / "trace_1"
    before = own.read_bytes()
    assert dump_ended_ranks(boxes, {}) == []
    assert dump_ended_ranks(boxes, {**env, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}) == []
    well = [box for box in boxes if read_header(box).closed == "exit"]
    assert len(well) == 1 and dump_ended_ranks(well, env) == []
    assert dump_ended_ranks(boxes, env) == [tmp_path / "traces" / f"trace_{rank}" for rank in (0, 2)]
    assert dump_ended_ranks(boxes, env) == []
    assert own.read_bytes() == before
    entries = [
        pickle.loads((tmp_path / "traces" / f"trace_{rank}").read_bytes())["entries"] for rank in (0, 1)
    ]
    assert [[entry["profiling_name"] for entry in found] for found in entries] == [
        ["gloo:all_reduce", "gloo:barrier"]
    ] * 2


def test_dumps_under_names_of_our_own_never_replace_one_another(folder: Path) -> None:
    """The N-th dump of a reason of all ranks stands in one folder."""
    with Ranks(_by_environment, 2) as ranks:
        values = ranks.values()
    assert [Path(path).relative_to(folder) for path in values[1][:2]] == [
        Path("dumps/asked.a0.1/rank_1"),
        Path("dumps/asked.a0.2/rank_1"),
    ]
    assert _frtrace(folder / "dumps" / "asked.a0.1") == ""


@pytest.mark.parametrize(
    ("env", "field", "value"),
    [
        ({"TORCHCOMM_FR_BUFFER_SIZE": "99"}, "capacity", 99),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "capacity", 2000),
        ({"TORCH_FR_BUFFER_SIZE": "many"}, "capacity", 2000),
        ({"TORCHELASTIC_RUN_ID": "run", "SLURM_JOB_ID": "7"}, "job", "run"),
        ({"SLURM_JOB_ID": "7"}, "job", "7"),
        ({"ALLRANKS_ATTEMPT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}, "attempt", 2),
        ({"ALLRANKS_RECORD": "0"}, "enabled", False),
        (
            {"TORCHCOMM_FR_DUMP_TEMP_FILE": "/x", "TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME": "1"},
            "dump_whole_name",
            True,
        ),
        ({"TORCH_FR_DUMP_DYNAMIC_FILE_NAME": "True"}, "dump_whole_name", True),
        ({"TORCH_FR_DUMP_DYNAMIC_FILE_NAME": "no"}, "dump_whole_name", False),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "false"}, "dump_on", frozenset()),
        ({"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, "dump_on", frozenset({"timeout", "exception"})),
    ],
)
def test_options_come_from_the_environment(env: dict[str, str], field: str, value: object) -> None:
    """Names that people already use; a malformed one is passed over."""
    assert getattr(from_environment(env), field) == value


def test_arguments_win_over_the_environment() -> None:
    """`record(capacity=…)` is heard."""
    assert from_environment({"TORCH_FR_BUFFER_SIZE": "50"}, capacity=70, job=None).capacity == 70


def _hang_for_ever(rank: int, world: int) -> None:
    allranks.record()
    dist.all_reduce(torch.ones(1))
    reached("hanging")
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(100)


def test_the_command_takes_boxes_from_a_job_that_hangs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By folder, pid, job and format; refuses to overwrite; a job that is not there is an error that says so."""
    job = f"hangs-{os.getpid()}"  # of this test alone: living processes are asked for their boxes
    monkeypatch.setenv("ALLRANKS_JOB_ID", job)
    with Ranks(_hang_for_ever, 2) as ranks:
        ranks.wait_for("hanging")
        assert command(["dump", "--list", "--json"]) == 0
        boxes = json.loads(capsys.readouterr().out)["boxes"]
        assert [(box["rank"], box["state"], box["pid"]) for box in boxes] == [
            (0, "running", ranks.pids[0]),
            (1, "running", ranks.pids[1]),
        ]
        out = tmp_path / "out"
        assert command(["dump", str(folder), "--format", "pickle", "-o", str(out), "--json"]) == 0
        files = json.loads(capsys.readouterr().out)["files"]
        assert [Path(entry["path"]).name for entry in files] == ["rank_0", "rank_1"]
        assert command(["dump", str(folder), "--format", "pickle", "-o", str(out)]) == 2
        assert "exists" in capsys.readouterr().err
        assert command(["dump", "--job", job, "-o", str(tmp_path / "job")]) == 0
        monkeypatch.delenv("ALLRANKS_DIR")  # a living process tells by itself where its box is
        assert command(["dump", "--job", job, "-o", str(tmp_path / "again")]) == 0
        assert len(find_boxes(tmp_path / "job")) == len(find_boxes(tmp_path / "again")) == 2
        capsys.readouterr()
        assert command(["dump", "--pid", str(ranks.pids[1]), "-o", str(tmp_path / "one")]) == 0
        assert "rank 1, 1 calls, running" in capsys.readouterr().out
    assert len(find_boxes(tmp_path / "one")) == 1
    assert command(["dump", "--pid", "999999999"]) == 2
    assert "no black box of pid 999999999" in capsys.readouterr().err
    assert command(["dump", str(folder), "-o", str(tmp_path / "after")]) == 0  # after their death
    assert "exited without shutting down" in capsys.readouterr().out


NATIVE = """
import pickle, sys, torch, torch.distributed as dist
from allranks.recording.dump import native_dumps
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
entries = pickle.loads(native_dumps()["fr"])["entries"]
print(len(entries), bool(entries[0]["frames"]), "torch._inductor" in sys.modules, hasattr(torch, "_inductor"))
"""


def test_torchs_own_recorder_is_harvested_without_importing_its_compiler() -> None:
    """The ring of gloo is there in a CPU build; the first dump with stacks imports nothing, and leaves torch whole."""
    done = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["1", "True", "False", "True"], done.stderr


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    """Asking for NCCL's dump from outside answers at once."""
    from allranks.recording.dump import ask_through_pipe

    assert not ask_through_pipe(str(tmp_path / "pipe_"), 0)
    os.mkfifo(tmp_path / "pipe_0.pipe")
    assert not ask_through_pipe(str(tmp_path / "pipe_"), 0)
    reader = os.open(tmp_path / "pipe_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert ask_through_pipe(str(tmp_path / "pipe_"), 0)
    assert os.read(reader, 8) == b"1"
    os.close(reader)


def test_an_empty_trace_is_a_valid_dump(folder: Path) -> None:
    """A rank that made no call has no entries, not no file."""
    from allranks.blackbox.file_writer import Box

    box = Box(folder / "x.box", 32, 4096)
    box.open()
    dump = to_torch_dump(read_trace(box.path))
    assert dump["entries"] == []
    assert dump["pg_config"] == {}
