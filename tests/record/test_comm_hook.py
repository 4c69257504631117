"""The communicator hook: torchcomms' API, over a small communicator with hooks that talks gloo."""

from __future__ import annotations

import enum
import itertools
import json
import pickle
import re
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.blackbox.reader import find_boxes, read_trace
from allranks.drill.ranks import Ranks
from allranks.recording import FlightRecorderHook

REQUIRED = {
    "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "profiling_name",
    "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state", "retired",
    "timeout_ms", "is_p2p",
}  # fmt: skip


class Handle:
    """What a communicator returns for a registered hook."""

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        self._hooks.remove(self._hook)


class Comm:
    """A communicator as torchcomms has them, as far as hooks are concerned."""

    ids = itertools.count(1)

    def __init__(self, group: Any, name: str) -> None:
        self.group, self.name = group, name
        self.pre: list[Callable[[Any], None]] = []
        self.post: list[Callable[[Any], None]] = []
        self.abort_hooks: list[Callable[[], None]] = []

    def get_rank(self) -> int:
        return int(self.group.rank())

    def get_size(self) -> int:
        return int(self.group.size())

    def get_name(self) -> str:
        return self.name

    def get_backend(self) -> str:
        return "gloo"

    def register_pre_hook(self, hook: Any) -> Handle:
        self.pre.append(hook)
        return Handle(self.pre, hook)

    def register_post_hook(self, hook: Any) -> Handle:
        self.post.append(hook)
        return Handle(self.post, hook)

    def register_abort_hook(self, hook: Any) -> Handle:
        self.abort_hooks.append(hook)
        return Handle(self.abort_hooks, hook)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", async_op: bool = False) -> Any:
        return self._call(
            "all_reduce",
            lambda: dist.all_reduce(tensor, group=self.group, async_op=True),
            async_op,
            input_tensor=tensor,
            output_tensor=tensor,
            op=op,
        )

    def send(self, tensor: torch.Tensor, dst: int) -> Any:
        return self._call(
            "send",
            lambda: dist.isend(tensor, group_dst=dst, group=self.group),
            False,
            input_tensor=tensor,
            peer=dst,
        )

    def recv(self, tensor: torch.Tensor, src: int) -> Any:
        return self._call(
            "recv",
            lambda: dist.irecv(tensor, group_src=src, group=self.group),
            False,
            output_tensor=tensor,
            peer=src,
        )

    def split(self, ranks: list[int], name: str) -> Comm:
        child = Comm(dist.new_group(ranks), name)
        self._call("split", lambda: None, False, new_comm=child)
        return child

    def finalize(self) -> None:
        self._call("finalize", lambda: None, False)

    def abort(self) -> None:
        for hook in self.abort_hooks:
            hook()

    def _call(self, name: str, do: Callable[[], Any], async_op: bool, **facts: Any) -> Any:
        number = next(self.ids)
        child = facts.pop("new_comm", None)
        for hook in list(self.pre):
            hook(
                types.SimpleNamespace(
                    name=f"OpName.{name.upper()}",
                    op_id=number,
                    async_op=async_op,
                    timeout=timedelta(seconds=9),
                    **facts,
                )
            )
        work = do()
        if work is not None and not async_op:
            work.wait()
        for hook in list(self.post):
            hook(
                types.SimpleNamespace(
                    name=f"OpName.{name.upper()}",
                    op_id=number,
                    work=None if not async_op else work,
                    new_comm=child,
                )
            )
        return work


def _entries(hook: FlightRecorderHook, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(hook.dump_json(**options))["entries"]
    return found


def _in_ranks(function: Any, env: dict[str, str] | None = None) -> list[Any]:
    with Ranks(function, 2, env=env or {}) as ranks:
        return ranks.values()


def _fields(rank: int, world: int) -> None:
    hook = FlightRecorderHook(max_entries=100, isolated=True)
    assert hook.is_enabled()
    comm = Comm(dist.group.WORLD, "main")
    hook.register_with_comm(comm)
    empty = json.loads(hook.dump_json())
    assert empty["version"] == "2.10"
    assert empty["entries"] == []
    assert set(empty) >= {"pg_config", "pg_status"}
    comm.all_reduce(torch.ones(3, 4))
    comm.all_reduce(torch.ones(5, 6, dtype=torch.int64))
    (comm.send if rank == 0 else comm.recv)(torch.ones(2), 1 - rank)
    comm.finalize()
    dump = json.loads(hook.dump_json())
    assert re.fullmatch(r"\[\d+(,\d+)*\]", dump["pg_config"]["main"]["ranks"])
    entries = dump["entries"]
    assert len(entries) == len(hook) == hook.size() == 3  # finalize is not recorded
    for entry in entries:
        assert set(entry) >= REQUIRED
        assert len(entry["process_group"]) == 2
        assert entry["profiling_name"].startswith("gloo:")
        assert entry["timeout_ms"] == 9000
        assert entry["retired"] is True
        assert entry["duration_ms"] > 0
    assert [entry["input_sizes"] for entry in entries[:2]] == [[[3, 4]], [[5, 6]]]
    assert [entry["input_dtypes"] for entry in entries[:2]] == [["Float"], ["Long"]]
    assert [entry["record_id"] for entry in entries] == sorted({entry["record_id"] for entry in entries})
    times = [entry["time_created_ns"] for entry in entries]
    assert times == sorted(times)
    assert entries[2]["is_p2p"] is True
    assert entries[2]["profiling_name"].endswith("0->1" if rank == 0 else "1<-0")
    assert _entries(hook, include_completed=False) == []
    hook.close()


def test_entries_have_the_fields_that_torchcomms_promises(folder: Path) -> None:
    """Sizes, dtypes, order, durations, partners; nothing for finalize."""
    _in_ranks(_fields)
    boxes = find_boxes(folder)
    assert len(boxes) == 2
    assert all(len(read_trace(box).calls) == 3 for box in boxes)  # and they are in a black box


def _resets(rank: int, world: int) -> None:
    hook = FlightRecorderHook(max_entries=20, isolated=True)
    comm = Comm(dist.group.WORLD, "main")
    hook.register_with_comm(comm)
    for count in (50, 7, 0, 20):  # a full ring, a part of it, nothing, exactly one ring
        for _ in range(count):
            comm.all_reduce(torch.ones(1))
        assert len(_entries(hook)) == min(count, 20)
        assert hook.size() == count
        hook.reset()
        assert _entries(hook) == []
        assert hook.size() == 0
    hook.unregister()
    comm.all_reduce(torch.ones(1))
    assert hook.size() == 0
    hook.close()


def test_reset_leaves_exactly_the_new_entries(folder: Path) -> None:
    """Over full and partly filled rings, several times; unregister ends recording."""
    _in_ranks(_resets)


def _asynchronous(rank: int, world: int) -> None:
    hook = FlightRecorderHook(max_entries=20, isolated=True)
    comm = Comm(dist.group.WORLD, "main")
    hook.register_with_comm(comm)
    if rank == 0:
        work = comm.all_reduce(torch.ones(1), async_op=True)
        (entry,) = _entries(hook, include_completed=False)
        assert entry["retired"] is False
        assert entry["state"] != "completed"
        dist.barrier(group=dist.new_group([0, 1]))
        work.wait()
    else:
        dist.barrier(group=dist.new_group([0, 1]))
        comm.all_reduce(torch.ones(1))
    deadline = time.monotonic() + 30
    while _entries(hook, include_completed=False):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [entry["state"] for entry in _entries(hook)] == ["completed"]
    hook.close()


def test_an_asynchronous_call_is_active_until_its_work_is_over(folder: Path) -> None:
    """Which torchcomms' own hook cannot tell on CPU."""
    _in_ranks(_asynchronous)


def _splits_and_aborts(rank: int, world: int) -> None:
    hook = FlightRecorderHook(isolated=True)
    comm = Comm(dist.group.WORLD, "main")
    hook.register_with_comm(comm)
    child = comm.split([0, 1], "child")
    grandchild = child.split([0, 1], "grandchild")
    comm.all_reduce(torch.ones(1))
    grandchild.all_reduce(torch.ones(2))
    entries = _entries(hook)
    named = [
        (entry["process_group"][0], entry["collective_seq_id"])
        for entry in entries
        if "all_reduce" in entry["profiling_name"]
    ]
    assert named == [("main", 2), ("grandchild", 1)]  # numbers count per communicator
    comm.abort()
    hook.close()


def test_splits_are_followed_and_an_abort_writes_a_dump(folder: Path, tmp_path: Path) -> None:
    """Where TORCHCOMM_FR_DUMP_TEMP_FILE says, as a pickle with stacks."""
    _in_ranks(_splits_and_aborts, env={"TORCHCOMM_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")})
    for rank in range(2):
        dump = pickle.loads((tmp_path / f"trace_{rank}").read_bytes())
        assert dump["version"] == "2.10"
        assert [frame["name"] for frame in dump["entries"][-1]["frames"]][-1] != ""
        assert set(dump["pg_config"]) == {"main", "child", "grandchild"}


def _shared(rank: int, world: int) -> list[str]:
    recorder = allranks.record()
    hook = FlightRecorderHook()
    comm = Comm(dist.group.WORLD, "main")
    hook.register_with_comm(comm)
    dist.barrier()
    comm.all_reduce(torch.ones(1))
    path = hook.dump_file(rank, include_completed=False)
    assert pickle.loads(path.read_bytes())["entries"] == []
    assert recorder.path is not None
    trace = read_trace(recorder.path)
    assert {trace.groups[int(row["group"])].name for row in trace.calls} == {"0", "main"}
    return [entry["profiling_name"] for entry in _entries(hook)]


def test_a_shared_hook_writes_into_the_recorders_box_and_dumps_only_its_own(
    folder: Path, tmp_path: Path
) -> None:
    """One file per rank holds everything; the hook's dump holds its communicators only."""
    values = _in_ranks(_shared, env={"TORCHCOMM_FR_DUMP_TEMP_FILE": str(tmp_path / "trace_")})
    assert values == [["gloo:all_reduce"], ["gloo:all_reduce"]]


def test_the_whole_name_is_taken_when_asked_for(tmp_path: Path) -> None:
    """TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME=1: no rank is added."""
    from allranks.recording.comm_hook import dump_path

    name = str(tmp_path / "exactly")
    assert dump_path(3, {"TORCHCOMM_FR_DUMP_TEMP_FILE": name}) == Path(f"{name}3")
    for yes in ("1", "true", "Yes"):
        variables = {"TORCHCOMM_FR_DUMP_TEMP_FILE": name, "TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME": yes}
        assert dump_path(3, variables) == Path(name)
    assert dump_path(3, {"XDG_CACHE_HOME": "/c"}) == Path("/c/torch/comm_lib_trace_rank_3")


class Calls:
    """A communicator of one rank that calls its hooks as a given release of torchcomms does."""

    def __init__(self, signature: str) -> None:
        self.signature = signature
        self.hooks: dict[str, Any] = {}

    get_rank = staticmethod(lambda: 0)
    get_size = staticmethod(lambda: 1)
    get_name = staticmethod(lambda: "main")
    get_backend = staticmethod(lambda: "gloo")

    def register_pre_hook(self, hook: Any) -> None:
        self.hooks["pre"] = hook

    def register_post_hook(self, hook: Any) -> None:
        self.hooks["post"] = hook

    def register_abort_hook(self, hook: Any) -> None:
        self.hooks["abort"] = hook

    def all_reduce(self, tensor: torch.Tensor, op_id: int) -> None:
        facts: dict[str, Any] = {"input_tensor": tensor, "output_tensor": tensor}
        after: dict[str, Any] = {"work": None}
        if self.signature == "args":
            named = {"name": "OpName.ALL_REDUCE", "op_id": op_id}
            self.hooks["pre"](types.SimpleNamespace(**named, **facts))
            self.hooks["post"](types.SimpleNamespace(**named, **after))
        elif self.signature == "name, op_id, args":
            name = enum.Enum("OpName", "BROADCAST ALL_REDUCE").ALL_REDUCE  # type: ignore[attr-defined]
            self.hooks["pre"](name, op_id, types.SimpleNamespace(**facts))
            self.hooks["post"](op_id, types.SimpleNamespace(**after))
        else:
            self.hooks["pre"]()
            self.hooks["post"](1, 2, 3, 4)


@pytest.mark.parametrize("signature", ["args", "name, op_id, args"])
def test_hooks_of_every_released_torchcomms_are_understood(folder: Path, signature: str) -> None:
    """0.1 and 0.2 give one object; 0.3 gives name, id and facts."""
    hook = FlightRecorderHook(max_entries=20, isolated=True)
    comm = Calls(signature)
    hook.register_with_comm(comm)
    comm.all_reduce(torch.ones(3), 7)
    (entry,) = _entries(hook)
    assert (entry["profiling_name"], entry["input_sizes"], entry["retired"]) == (
        "gloo:all_reduce",
        [[3]],
        True,
    )
    hook.close()


def _call_as_0_3(comm: Calls, op_id: int, name: str, **facts: Any) -> None:
    """torchcomms 0.3: tensors in `input`, `output` or `tensor`, and a post hook that is given no work."""
    op = enum.Enum("OpName", "ALL_GATHER_SINGLE ALL_GATHER ALL_REDUCE")[name]
    comm.hooks["pre"](op, op_id, types.SimpleNamespace(**facts))
    comm.hooks["post"](op_id, types.SimpleNamespace())


def test_an_asynchronous_call_of_torchcomms_0_3_is_under_way_until_a_later_one_is_over(folder: Path) -> None:
    """And the sizes are there, of a tensor as of a list."""
    hook = FlightRecorderHook(max_entries=20, isolated=True)
    comm = Calls("name, op_id, args")
    hook.register_with_comm(comm)
    one, two = torch.ones(3), torch.ones(6)
    _call_as_0_3(comm, 1, "ALL_GATHER_SINGLE", input=one, output=two, async_op=True)
    assert [(e["input_sizes"], e["output_sizes"], e["state"]) for e in _entries(hook)] == [
        ([[3]], [[6]], "scheduled")
    ]
    _call_as_0_3(comm, 2, "ALL_GATHER", input=one, output=[one, one], async_op=False)
    _call_as_0_3(comm, 3, "ALL_REDUCE", tensor=two, async_op=True)
    found = [(e["output_sizes"], e["state"]) for e in _entries(hook)]
    assert found == [([[6]], "completed"), ([[2, 3]], "completed"), ([[6]], "scheduled")]
    hook.close()


def test_a_hook_called_in_an_unknown_way_never_raises_into_the_call(folder: Path) -> None:
    """A later release may call it as it likes: the user's collective continues."""
    hook = FlightRecorderHook(max_entries=20, isolated=True)
    comm = Calls("something else")
    hook.register_with_comm(comm)
    comm.all_reduce(torch.ones(3), 7)
    comm.hooks["abort"]("why", 3)
    hook.close()
