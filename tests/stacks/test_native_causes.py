"""What native frames, kernels and the GIL say of a rank: decisions without a process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from allranks.model.stacks import (
    Capture,
    ProcessCapture,
    RankState,
    Snapshot,
    StackFrame,
    ThreadFacts,
    ThreadStack,
)
from allranks.stacktraces import classify, read_capture

CASES = Path(__file__).parent / "cases"


def _looked_at(*native: str, kernels: tuple[str, ...] = ()) -> RankState:
    """A rank whose main thread stands in user code, with these native frames above it."""
    frames = (
        *(StackFrame(name, "libx.so", 0, native=True) for name in native),
        StackFrame("init", "/home/user/t.py", 3),
    )
    stack = ThreadStack(5, "MainThread", frames, False, False)
    facts = (ThreadFacts(5, state="S", syscall="futex", args=(1, 0x80, 0, 0)),)
    shots = tuple(Snapshot(number, None, (stack,), facts) for number in (1, 2))
    process = ProcessCapture(0, None, 5, snapshots=shots, native=(stack,), kernels=kernels)
    return classify(Capture((process,))).ranks[0]


def test_a_thread_that_stands_in_line_for_the_gil_does_not_hold_it() -> None:
    """py-spy saw it with the GIL, /proc without: it lost it between the two looks. One that sleeps with it uses no CPU."""
    frames = (StackFrame("crunch", "/home/user/t.py", 3),)

    def found(ticks: int) -> str:
        shots = tuple(
            Snapshot(
                number,
                None,
                tuple(ThreadStack(tid, f"T{tid}", frames, True, tid == 5) for tid in range(5, 9)),
                tuple(
                    ThreadFacts(tid, state="S", syscall="futex", args=(1, 0x89, 0, 7), ticks=number * ticks)
                    for tid in range(5, 9)
                ),
            )
            for number in (1, 2)
        )
        return classify(Capture((ProcessCapture(0, None, 5, snapshots=shots),))).ranks[0].cause

    assert (found(ticks=20), found(ticks=0)) == ("gil_contention", "gil_held_native")


def test_waiting_for_the_gil_and_for_an_nccl_communicator_have_their_own_words() -> None:
    """Neither is a call of unknown native code."""
    state = _looked_at("futex_wait", "take_gil", "PyGILState_Ensure")
    assert state.cause == "gil_contention" and "GIL" in state.evidence
    state = _looked_at("futex_wait", "bootstrapAllGather", "ncclCommInitRankConfig")
    assert state.cause == "rendezvous_wait" and "NCCL communicator" in state.evidence


def test_the_kernels_that_cuda_gdb_saw_are_named() -> None:
    """In the evidence of the rank, which text and JSON show."""
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert kernel in _looked_at("cudaStreamSynchronize", kernels=(kernel,)).evidence


def test_a_kernel_on_the_device_decides_the_cause() -> None:
    """A collective's kernel is a wait for others; any other kernel is the rank's own."""
    capture = read_capture(CASES / "victims" / "nogil_pause.json")
    for kernel, cause in (("ncclDevKernel_AllReduce", "collective_wait"), ("spin_kernel", "cuda_kernel")):
        process = replace(capture.processes[0], kernels=(kernel,))
        assert classify(replace(capture, processes=(process,))).ranks[0].cause == cause


def test_device_waits_are_told_from_frames() -> None:
    """torch.cuda.synchronize in Python, or the driver's call in the native frames."""
    top = StackFrame("synchronize", "/opt/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", 900)
    user = StackFrame("train", "/home/user/train.py", 12)
    native = StackFrame("cuCtxSynchronize", "/usr/lib/libcuda.so.1", 0, True, "/usr/lib/libcuda.so.1")
    by_frame = ProcessCapture(
        0, None, 1, snapshots=(Snapshot(1, None, (ThreadStack(1, "MainThread", (top, user), True, False),)),)
    )
    by_leaf = ProcessCapture(
        1, None, 2, snapshots=(Snapshot(1, None, (ThreadStack(2, "MainThread", (user,), False, False),)),),
        native=(ThreadStack(2, "MainThread", (native, user)),),
    )  # fmt: skip
    report = classify(Capture((by_frame, by_leaf)))
    assert {state.cause for state in report.ranks.values()} == {"cuda_wait"}
