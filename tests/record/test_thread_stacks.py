"""Stacks of calls that are made on other threads than the main one."""

from __future__ import annotations

import _thread
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported once here, not once in every rank
import torch.distributed as dist
import torch.distributed.fsdp  # as above

import allranks
from allranks.blackbox.header import read_header

from .boxes import ops, record_ranks, where


def _without_frames(rank: int, world: int) -> None:
    recorder = allranks.recording.current()
    assert recorder is not None and recorder.path is not None
    for done in range(1, 4):
        arguments = ([torch.ones(1)], dist.AllreduceOptions())
        _thread.start_new_thread(dist.group.WORLD.allreduce, arguments)
        deadline = time.monotonic() + 60
        while read_header(recorder.path).calls_completed < done:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_a_thread_of_cpp_has_the_stack_of_the_main_thread(folder: Path) -> None:
    """As autograd's threads on a GPU: they have no Python frames at all."""
    for trace in record_ranks(_without_frames, folder).values():
        assert ops(trace) == ["all_reduce"] * 3
        assert all("_without_frames" in where(trace, row) for row in trace.calls)
        assert all(int(row["thread"]) != trace.header.pid for row in trace.calls)


def _in_library(file: str) -> Any:
    """A function of a library, which calls torch.distributed."""
    space: dict[str, Any] = {"dist": dist, "torch": torch}
    lines = ["def outer(depth):", "    return outer(depth - 1) if depth else dist.all_reduce(torch.ones(1))"]
    exec(compile("\n".join(lines), file, "exec"), space)
    return space["outer"]


def _hooks_of_autograd(rank: int, world: int) -> None:
    recorder = allranks.recording.current()
    assert recorder is not None and recorder.path is not None
    function = _in_library("/opt/env/lib/python3/site-packages/sharded/hooks.py")
    for done, start in enumerate((_thread.start_new_thread, _python_thread, _thread.start_new_thread), 1):
        start(function, (200,))
        deadline = time.monotonic() + 60
        while read_header(recorder.path).calls_completed < done:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    function(200)


def _python_thread(function: Any, args: tuple[int]) -> None:
    threading.Thread(target=function, args=args).start()


def test_a_hook_of_a_library_on_a_thread_of_cpp_has_the_line_of_the_main_thread(folder: Path) -> None:
    """As FSDP's hooks in backward on a GPU, however deep; a thread that Python started has its own frames only."""
    for trace in record_ranks(_hooks_of_autograd, folder).values():
        frames = [[frame.name for frame in trace.stacks[int(row["stack"])]] for row in trace.calls]
        assert [names[:3] for names in frames] == [["outer"] * 3] * 4
        assert ["_hooks_of_autograd" in names for names in frames] == [True, False, True, True]
        assert len(frames[1]) == 3
