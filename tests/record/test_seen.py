"""What the recorder sees: every way in which a program of torch.distributed communicates."""

from __future__ import annotations

import importlib
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # imported once here, not once in every rank
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.fsdp  # as above

import allranks
from allranks.blackbox.reader import read_trace
from allranks.drill.ranks import Ranks
from allranks.model.trace import REDUCE_OPS, Flag, State
from allranks.recording.torch_internals import describe_group

from .boxes import last, ops, record_ranks, traces, where

WORLD = 2
try:
    DIST2: Any = importlib.import_module("torch.distributed._dist2")
except ImportError:  # torch 2.15 has it no more
    DIST2 = None


def _all_ops(rank: int, world: int) -> None:
    t, parts = torch.ones(4), [torch.ones(2) for _ in range(world)]
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    dist.broadcast(t, src=1)
    dist.reduce(t, dst=1)
    dist.all_gather([torch.empty(4) for _ in range(world)], t)
    dist.all_gather_into_tensor(torch.empty(4 * world), t)
    dist.gather(t, [torch.empty(4) for _ in range(world)] if rank == 0 else None, dst=0)
    dist.scatter(torch.empty(2), parts if rank == 0 else None, src=0)
    dist.reduce_scatter(torch.empty(2), parts)
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * world))
    dist.all_to_all_single(
        torch.empty(3 if rank == 0 else 1),
        torch.ones(2),
        [2, 1] if rank == 0 else [0, 1],
        [1, 1] if rank else [2, 0],
    )
    dist.barrier()
    dist.monitored_barrier()


def test_every_collective_is_recorded_with_its_particulars(folder: Path) -> None:
    """One row per call, in order, with root, operator, sizes and splits."""
    found = record_ranks(_all_ops, folder)
    assert ops(found[0]) == [
        "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
        "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "barrier", "monitored_barrier",
    ]  # fmt: skip
    assert ops(found[1]) == ops(found[0])
    for trace in found.values():
        assert list(trace.calls["seq"]) == list(range(1, 13))
        assert set(trace.calls["state"]) == {State.COMPLETED}
        assert (trace.calls["completed_ns"] >= trace.calls["created_ns"]).all()
        assert trace.progress.calls_completed == trace.progress.calls_started == 12
    trace = found[0]
    assert REDUCE_OPS[int(last(trace, "all_reduce")["reduce_op"])] == "max"
    assert int(last(trace, "broadcast")["root"]) == 1
    assert int(last(trace, "gather")["root"]) == 0
    splits = trace.shapes[int(last(trace, "all_to_all_single")["shapes"])]
    assert splits.input_splits == (2, 0)
    assert splits.output_splits == (2, 1)
    gathered = trace.shapes[int(last(trace, "all_gather_into_tensor")["shapes"])]
    assert gathered.inputs == ((4,),)
    assert gathered.outputs == ((8,),)
    assert gathered.output_dtypes == ("Float",)
    assert trace.groups[1].ranks == (0, 1)
    assert "_all_ops" in where(trace, last(trace, "barrier"))[0]


def _repeats(rank: int, world: int) -> None:
    group = dist.new_group([2, 1])
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=17)
    for _ in range(3):
        dist.all_reduce(torch.ones(2, 3), op=dist.ReduceOp.MIN)
        dist.broadcast(torch.ones(4, dtype=torch.int64), src=2)
        dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2))
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * world), op=dist.ReduceOp.MAX)
        dist.group.WORLD.allreduce([torch.ones(5)], options).wait()
        dist.reduce(torch.ones(3), dst=1)
        dist.all_gather([torch.empty(2) for _ in range(world)], torch.ones(2))
        dist.gather(torch.ones(4), [torch.empty(4) for _ in range(world)] if rank == 1 else None, dst=1)
        dist.scatter(torch.empty(2), [torch.ones(2) for _ in range(world)] if rank == 2 else None, src=2)
        dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(world)])
        dist.all_to_all_single(torch.empty(world), torch.ones(world), [1] * world, [1] * world)
        dist.barrier()
        if rank:
            dist.broadcast(torch.ones(6), src=2, group=group)
            (dist.send if rank == 1 else dist.recv)(torch.ones(7), 3 - rank, group=group, tag=5)


def test_a_call_made_again_is_recorded_as_the_first_one_was(folder: Path) -> None:
    """The first call of a kind is read in Python, the next ones in C: operator, root, sizes, timeout, stack agree."""
    for rank, trace in record_ranks(_repeats, folder, world=3).items():
        columns = [
            "op",
            "group",
            "reduce_op",
            "root",
            "shapes",
            "in_numel",
            "out_numel",
            "timeout_ms",
            "stack",
            "peer",
            "tag",
            "flags",
        ]
        rounds = np.split(trace.calls[columns], 3)
        assert (rounds[0] == rounds[1]).all() and (rounds[0] == rounds[2]).all()
        assert set(trace.calls["state"]) == {State.COMPLETED}
        first = rounds[0]
        assert [REDUCE_OPS[int(row["reduce_op"])] for row in first[:4]] == ["min", "", "", "max"]
        assert [int(row["root"]) for row in first] == [-1, 2, -1, -1, -1, 1, -1, 1, 2, -1, -1, -1] + [
            2,
            -1,
        ] * (rank > 0)
        assert not rank or (int(first[-1]["peer"]), int(first[-1]["tag"])) == (3 - rank, 5)
        assert int(first[4]["timeout_ms"]) == 17_000
        assert all("_repeats" in where(trace, row) for row in trace.calls)
        assert list(trace.calls["seq"][trace.calls["group"] == trace.calls["group"][0]]) == list(range(1, 37))


def _two_backends(rank: int, world: int) -> None:
    dist.init_process_group("cpu:gloo,cuda:gloo", rank=rank, world_size=world)
    recorder = allranks.record()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
        dist.all_gather_into_tensor(torch.empty(2 * world), torch.ones(2))
    assert recorder.path is not None
    states = read_trace(recorder.path).calls["state"]
    assert set(states) == {State.COMPLETED}  # at once: a CPU tensor's wait() means the end


def test_in_a_group_with_two_backends_calls_on_cpu_tensors_end_with_their_wait(folder: Path) -> None:
    """Also when they are recorded in C, as all but the first are."""
    with Ranks(_two_backends, 2, backend=None) as ranks:
        ranks.values()
    for trace in traces(folder).values():
        assert ops(trace) == ["all_reduce", "all_gather_into_tensor"] * 3
        assert (trace.calls["started_ns"] > 0).all()


def _p2p(rank: int, world: int) -> None:
    dist.new_group([1, 0])
    group = dist.new_group([2, 1])
    if rank == 1:
        dist.send(torch.ones(3), dst=2, group=group)
        dist.isend(torch.ones(1), dst=2).wait()
    elif rank == 2:
        dist.recv(torch.empty(3), src=1, group=group)
        dist.recv(torch.empty(1))
    both = [
        dist.P2POp(dist.isend, torch.ones(2), (rank + 1) % world),
        dist.P2POp(dist.irecv, torch.empty(2), (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def test_send_and_recv_know_their_partner_by_global_rank(folder: Path) -> None:
    """Also in a subgroup, where torch counts from 0; a recv from anybody has no partner."""
    found = record_ranks(_p2p, folder, world=3)
    sent, received = found[1].calls[0], found[2].calls[0]
    assert int(sent["peer"]) == 2
    assert int(received["peer"]) == 1
    assert found[1].groups[int(sent["group"])].ranks == (1, 2)
    assert int(sent["flags"]) & Flag.P2P
    assert int(found[2].calls[1]["peer"]) == -1
    assert ops(found[0]) == ["send", "recv"]
    assert [int(row["p2p_seq"]) for row in found[0].calls] == [1, 2]
    assert all(int(row["seq"]) == 0 for row in found[0].calls)
    assert all(set(trace.calls["state"]) == {State.COMPLETED} for trace in found.values())


def _ddp(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    for step in range(3):
        allranks.step(step)
        model(torch.ones(2, 8)).sum().backward()


def test_ddp_is_recorded_though_its_reducer_is_cpp(folder: Path) -> None:
    """Buckets reduced by C++ have their step and the line that called backward()."""
    found = record_ranks(_ddp, folder)
    for trace in found.values():
        buckets = [row for row in trace.calls if trace.names[int(row["op"])] == "all_reduce"]
        assert [int(row["step"]) for row in buckets] == [0, 1, 2]
        assert all(int(row["state"]) == State.COMPLETED for row in buckets)
        assert "_ddp" in where(trace, buckets[0])
        assert "broadcast" in ops(trace)  # parameters sent from rank 0


class _FromAnotherThread(torch.autograd.Function):
    """A backward that communicates, as tensor parallel layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def _in_backward(rank: int, world: int) -> None:

    x = torch.ones(3, requires_grad=True)
    _FromAnotherThread.apply(x).sum().backward()
    side = threading.Thread(target=dist.all_reduce, args=(torch.ones(7),))
    side.start()
    side.join()


def test_calls_of_other_threads_carry_their_thread(folder: Path) -> None:
    """Calls from backward() and from a second thread are recorded with the thread that made them."""
    found = record_ranks(_in_backward, folder)
    for trace in found.values():
        assert ops(trace) == ["all_reduce", "all_reduce"]
        main, side = (int(row["thread"]) for row in trace.calls)
        assert main == trace.header.pid
        assert side != main


def _functional(rank: int, world: int) -> None:
    group = dist.group.WORLD
    functional.all_reduce(torch.ones(3), "sum", group) + 1
    functional.all_gather_tensor(torch.ones(2), 0, group) + 1
    functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, group) + 1
    functional.all_to_all_single(torch.ones(4), [2, 2], [2, 2], group) + 1
    functional.broadcast(torch.ones(4), 1, group) + 1


def test_functional_collectives_are_recorded_to_their_end(folder: Path) -> None:
    """C++ looks their group up by name; the proxy registered there records them."""
    found = record_ranks(_functional, folder)
    for trace in found.values():
        assert ops(trace) == [
            "all_reduce", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
            "all_to_all_single", "broadcast",
        ]  # fmt: skip
        assert set(trace.calls["state"]) == {State.COMPLETED}
        assert "_functional" in where(trace, trace.calls[0])


def _mesh_and_fsdp(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    dist.all_reduce(torch.ones(1), group=mesh["dp"].get_group())
    assert type(mesh.get_group()) is dist.ProcessGroup  # never our proxy
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()


def test_device_meshes_and_fsdp2_are_recorded(folder: Path) -> None:
    """Sharded parameters are gathered and gradients scattered; the user's line is on the stack."""
    found = record_ranks(_mesh_and_fsdp, folder)
    for trace in found.values():
        seen = ops(trace)
        assert seen[0] == "all_reduce"
        assert "all_gather_into_tensor" in seen
        assert "reduce_scatter_tensor" in seen
        assert any("_mesh_and_fsdp" in where(trace, row) for row in trace.calls[1:])


def _coalesced(rank: int, world: int) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(2))
    values: list[Any] = [None] * world
    dist.all_gather_object(values, {"rank": rank})
    dist.broadcast_object_list(values, src=0)
    dist.gather_object(rank, values if rank == 0 else None, dst=0)
    dist.scatter_object_list([None], values if rank == 0 else None, src=0)
    if rank == 0:
        dist.send_object_list(values, dst=1)
    else:
        dist.recv_object_list(values, src=0)


def test_coalesced_and_object_collectives_are_recorded_once(folder: Path) -> None:
    """A coalesced group is one call with several tensors; objects show as the tensors that carry them."""
    found = record_ranks(_coalesced, folder)
    trace = found[0]
    seen = [
        op.replace("all_gather_into_tensor", "all_gather") for op in ops(trace)
    ]  # torch 2.15 gathers into one tensor
    assert seen == [
        "allreduce_coalesced", "all_gather", "all_gather", "broadcast", "broadcast", "all_gather", "gather", "broadcast",
        "scatter", "scatter", "send", "send",
    ]  # fmt: skip
    assert ops(found[1])[-2:] == ["recv", "recv"]
    assert set(trace.calls["state"]) == {State.COMPLETED}
    assert trace.shapes[int(trace.calls[0]["shapes"])].inputs == ((1,), (2,))
    assert trace.shapes[int(trace.calls[2]["shapes"])].input_dtypes == ("Byte",)


class _SlowGroup(dist.ProcessGroup):
    """A process group in Python, as fault tolerant libraries have them, over a bare backend."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend.rank(), backend.size())
        self.backend = backend

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self.backend.allreduce(tensors, opts)


def _other_doors(rank: int, world: int) -> None:
    import os
    from datetime import timedelta

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, world, timedelta(seconds=30))
    backend.allreduce(torch.ones(5)).wait()  # a bare backend
    _SlowGroup(backend).allreduce([torch.ones(6)], dist.AllreduceOptions()).wait()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store of the default group is reused
    if DIST2 is not None:
        group = DIST2.new_group("gloo", timedelta(seconds=30), "cpu")
        group.broadcast(torch.ones(7), 0).wait()


def test_bare_backends_python_groups_and_dist2_are_recorded_once_each(folder: Path) -> None:
    """Groups that never pass through init_process_group are seen, and none of them twice."""
    found = record_ranks(_other_doors, folder)
    for trace in found.values():
        assert ops(trace) == ["all_reduce", "all_reduce"] + ["broadcast"] * (DIST2 is not None)
        assert [int(row["in_numel"]) for row in trace.calls] == [5, 6, 7][: len(trace.calls)]
        assert set(trace.calls["state"]) == {State.COMPLETED}


def _split(rank: int, world: int) -> None:
    part = dist.group.WORLD.split_group([1, 2], group_name="part")
    if part is not None:
        part.allreduce(torch.ones(3)).wait()
        last = part.split_group([1], group_name="last")
        if last is not None:
            last.allreduce(torch.ones(4)).wait()
    dist.barrier()


def test_members_that_we_know_ourselves_are_believed() -> None:
    """Of a group that was split off torch tells only the size."""

    class Part:
        group_name, group_desc = "part", ""

        def size(self) -> int:
            return 2

    assert describe_group(Part(), 3)[2] == ()  # two of three: anybody
    assert describe_group(Part(), 3, (1, 2))[2] == (1, 2)


@pytest.mark.soak  # gloo's own split sometimes fails to connect on a busy machine
def test_a_group_that_was_split_off_knows_its_members(folder: Path) -> None:
    """By their global ranks, also a part of a part; torch itself forgets them."""
    found = record_ranks(_split, folder, world=3)
    members = {
        rank: [trace.groups[int(row["group"])].ranks for row in trace.calls] for rank, trace in found.items()
    }
    world = (0, 1, 2)
    assert members == {0: [world], 1: [(1, 2), world], 2: [(1, 2), (2,), world]}


def test_recording_started_after_the_group_was_made_still_sees_cpp(folder: Path) -> None:
    """`record()` may come after init_process_group; groups that exist are registered again."""
    found = record_ranks(_functional, folder)  # Ranks makes the group before the recorder starts
    assert "all_gather_into_tensor_coalesced" in ops(found[0])


def _stop(rank: int, world: int) -> None:
    before = dict(vars(dist.ProcessGroup))
    recorder = allranks.recording.current()
    assert recorder is not None
    dist.all_reduce(torch.ones(1))
    recorder.close()
    assert vars(dist.ProcessGroup)["allreduce"] is not before["allreduce"]
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == world
    assert (functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD) + 0).item() == world
    dist.barrier()


def test_closing_gives_torch_back_as_it_was(folder: Path) -> None:
    """After close() nothing is recorded and every collective works."""
    found = record_ranks(_stop, folder)
    assert ops(found[0]) == ["all_reduce"]
    assert found[0].progress.closed == "closed"


def _compiled(rank: int, world: int) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def double_and_sum(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    assert double_and_sum(torch.ones(3))[0].item() == 2 * world + 1


def test_compiled_code_is_recorded_and_the_recorder_is_not_compiled(folder: Path) -> None:
    """dynamo looks at every frame that starts under compiled code, also at those that C++ starts for us."""
    found = record_ranks(_compiled, folder)
    assert ops(found[0]) == ["all_reduce"]
    assert any("double_and_sum" in name for name in where(found[0], found[0].calls[0]))


@pytest.mark.parametrize("depth", [0, 4])
def test_the_depth_of_stacks_is_settable(folder: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """0 records none."""
    monkeypatch.setenv("ALLRANKS_STACK_DEPTH", str(depth))
    found = record_ranks(_all_ops, folder)
    lengths = {len(found[0].stacks[int(row["stack"])]) for row in found[0].calls}
    assert max(lengths) <= depth
    assert (lengths == {0}) == (depth == 0)
