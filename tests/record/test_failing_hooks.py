"""Whatever of the recorder fails, the training ends with the same bits as without it.

Each hook between the program and torch has its faults here.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

import allranks
from allranks.drill.ranks import Ranks
from allranks.recording import (
    hook,
    recorder,
    recording_group,
    setup_calls,
    side_thread,
    stack,
    writer,
)
from allranks.recording import torch_internals as internals

fired = 0
changed: list[tuple[Any, str, Any]] = []
Fault = Callable[[], Callable[[], None] | None]
Outcome = tuple[list[float] | str, int, list[str]]


def _train_with_each(rank: int, world: int, names: list[str], folder: str, slow: bool) -> dict[str, Outcome]:
    """For each fault: what the training computed, how often the fault fired, what was said."""
    if slow:
        internals.form_of = lambda kind: (
            internals.READ_IN_PYTHON
        )  # every call takes the path of an unusual one
    outcomes = {}
    for number, name in enumerate(names):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                result: list[float] | str = _train(FAULTS.get(name), f"file://{folder}/{number}", rank, world)
            except Exception:
                result = traceback.format_exc()
        said = [str(item.message) for item in seen if "allranks" in str(item.message)]
        outcomes[name] = result, fired, said
        if isinstance(result, str):
            break
    return outcomes


def _train(fault: Fault | None, meeting: str, rank: int, world: int) -> list[float]:
    global fired
    fired = 0
    try:
        late = fault() if fault is not None else None
        recorder = allranks.record() if fault is not None else None
        allranks.step(1, label="one")
        if late is not None:
            late()
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=limit)
        result = _steps(rank)
        dist.destroy_process_group()
        if recorder is not None:
            recorder.close()
    finally:
        while changed:
            owner, name, original = changed.pop()
            setattr(owner, name, original)
    return result


def _change(owner: Any, name: str, new: Any) -> None:
    changed.append((owner, name, vars(owner)[name]))
    setattr(owner, name, new)


def _steps(rank: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 4), float(rank + step))).sum().backward()
        optimizer.step()
    value = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD) + 0.0
    scattered = functional.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, dist.group.WORLD) + 0.0
    part = dist.new_group([0, 1])
    work = dist.all_reduce(value, group=part, async_op=True)
    assert work is not None
    work.wait()
    other = torch.full((1,), float(rank))
    theirs = torch.zeros(1)
    pairs = [dist.P2POp(dist.isend, other, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
    for sent in dist.batch_isend_irecv(pairs):
        sent.wait()
    dist.destroy_process_group(part)
    weight = [float(number) for number in model.module.weight.flatten()]
    return [*weight, float(value), *scattered.tolist(), float(theirs)]


OURS = os.path.dirname(allranks.__file__)


def _raise(*_: object, **__: object) -> Any:
    global fired
    fired += 1
    raise LookupError("a bug of ours")


def _breaks(owner: Any, name: str) -> Callable[[], None]:
    """One function of ours raises from the start."""
    return lambda: _change(owner, name, _raise)


def _breaks_later(owner: Any, name: str) -> Callable[[], Callable[[], None]]:
    """The same once recording has begun."""
    return lambda: lambda: _change(owner, name, _raise)


def _refuses(owner: Any, name: str, error: Exception) -> Callable[[], None]:
    """A private name of torch that answers torch and raises for us: it is gone, or takes other arguments."""

    def install() -> None:
        original = getattr(owner, name)

        def answer(*args: object, **kwargs: object) -> object:
            global fired
            if sys._getframe(1).f_code.co_filename.startswith(OURS):
                fired += 1
                raise error
            return original(*args, **kwargs)

        _change(owner, name, answer)

    return install


def _hides(owner: Any, name: str) -> Callable[[], Callable[[], None]]:
    """A private name of torch is not there while recording starts."""

    def install() -> Callable[[], None]:
        global fired
        original = vars(owner)[name]
        delattr(owner, name)
        fired += 1
        return lambda: setattr(owner, name, original)

    return install


def _wrong_type() -> None:
    """The proxy does not have its backend where C++ looks for it: DDP's constructor raises."""

    def make_like(group: Any, proxy: Any) -> None:
        global fired
        fired += 1
        for device, backend in internals.backends(group):
            proxy._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, backend)
        proxy._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        proxy._set_group_name(group.group_name)
        proxy._set_group_desc(group.group_desc)

    _change(internals, "make_like", make_like)


def _other_signature() -> None:
    """torch calls a collective and its registry with one more argument, by name."""
    for owner, name in ((dist.ProcessGroup, "allreduce"), (internals.c10d, internals.REGISTER)):
        original = getattr(owner, name)

        def later(*args: object, original: Any = original, priority: int = 0) -> object:
            return original(*args)

        _change(owner, name, later)
        if owner is internals.c10d:
            _change(distributed_c10d, name, later)


def _calls_with_more() -> Callable[[], None]:
    _other_signature()

    def late() -> None:
        for owner, name in ((dist.ProcessGroup, "allreduce"), (distributed_c10d, internals.REGISTER)):
            wrapped = getattr(owner, name)

            def call(*args: object, wrapped: Any = wrapped) -> object:
                global fired
                fired += 1
                return wrapped(*args, priority=1)

            _change(owner, name, call)

    return late


def _refused() -> None:
    """The same, noticed by C++ alone."""
    _wrong_type()
    _change(internals, "check_like", lambda group, proxy: None)


FAULTS: dict[str, Fault] = {
    # methods of ProcessGroup, Backend and Work
    "group": _breaks(hook.Hook, "group"),
    "meet": _breaks(hook.Hook, "_add_group"),
    "sizes": _breaks(hook.Hook, "_shapes"),
    "read": _breaks(hook.Hook, "_read"),
    "collective": _breaks(hook.Hook, "_collective"),
    "replace": _breaks(hook.Hook, "_replace"),
    "sweep": _breaks(writer.CallWriter, "sweep"),
    "stack": _breaks(stack.Stacks, "at"),
    "describe": _breaks(hook, "describe_group"),
    "layout": _breaks(internals, "form_of"),
    # what C++ is handed
    "proxy": _breaks(recording_group.RecordingProxies, "_make"),
    "proxies": _breaks(recording_group.RecordingProxies, "install"),
    "wrong type": _wrong_type,
    "refused": _refused,
    "registry": _breaks(recording_group.RecordingProxies, "_forget"),
    # set-up calls
    "enter": _breaks(setup_calls, "_enter"),
    "leave": _breaks(setup_calls, "_leave"),
    "setup": _breaks(setup_calls, "install"),
    # the recorder itself
    "header": _breaks(recorder.Recorder, "_fill_header"),
    "writer": _breaks(recorder, "CallWriter"),
    "hook": _breaks(hook.Hook, "install"),
    "side thread": _breaks(side_thread.SideThread, "start"),
    "joins": _breaks(recorder.Recorder, "_on_rendezvous"),
    "met": _breaks(recorder.Recorder, "_on_group_created"),
    "step": _breaks(recorder.phases, "begin"),
    "more arguments": _calls_with_more,
    # private names of torch that changed or are gone
    **{
        f"{name} {type(error).__name__}": _refuses(dist.ProcessGroup, name, error)
        for name in (
            "_get_backend",
            "_backend_id",
            "_get_backend_name",
            "_register_backend",
            "_set_group_desc",
        )
        for error in (AttributeError("gone"), TypeError("incompatible arguments"), ZeroDivisionError("odd"))
    },
    **{
        f"no {name}": _hides(internals.c10d, name)
        for name in (internals.REGISTER, internals.UNREGISTER, internals.RESOLVE, *internals.DDP_FUNCTIONS)
    },
    "no _world": _hides(distributed_c10d, "_world"),
    "no Reducer": _hides(internals.c10d, "Reducer"),
    "no _start_coalescing": _hides(dist.ProcessGroup, internals.START_BATCH),
}
NEVER_REACHED: dict[bool, set[str]] = {False: set(), True: {"layout"}}


@pytest.mark.parametrize("slow", [False, True])
def test_a_fault_of_ours_leaves_the_training_as_it_is(slow: bool, folder: Path, tmp_path: Path) -> None:
    """And nothing is said twice."""
    env = {"ALLRANKS_DIR": str(folder)}
    names = ["alone", *FAULTS]
    with Ranks(_train_with_each, 2, (names, str(tmp_path), slow), backend=None, env=env) as ranks:
        values = ranks.values(timeout_s=600)
    silent = {"alone", *NEVER_REACHED[slow]}
    for outcomes in values:
        computed = outcomes["alone"][0]
        assert isinstance(computed, list)
        broken = {name: result for name, (result, _, _) in outcomes.items() if result != computed}
        assert broken == {} and list(outcomes) == names
        assert [name for name, (_, times, _) in outcomes.items() if not times and name not in silent] == []
        assert {name: said for name, (_, _, said) in outcomes.items() if len(said) > len(set(said))} == {}
