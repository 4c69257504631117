"""What debuggers, /proc and the table of patterns say, read from text; tools that fail or do not end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from allranks.errors import ConfigurationError
from allranks.stacktraces import classify, read_capture
from allranks.stacktraces.debuggers import ToolRun, explain_pyspy, parse_kernels, run_tool
from allranks.stacktraces.patterns import load_patterns, parse_patterns
from allranks.stacktraces.procfs import parse_syscall

CASES = Path(__file__).parent / "cases"
GDB_GIL = """Thread 2 (Thread 0x7f55 (LWP 1002) "pt_gloo_runloop"):
#0  0x00007f8 in epoll_wait () from /lib/x86_64-linux-gnu/libc.so.6

Thread 1 (Thread 0x7f56 (LWP 1001) "python"):
#0  __lll_lock_wait (futex=0x7f, private=0) at lowlevellock.c:52
#1  0x00007f9 in __GI___pthread_mutex_lock (mutex=0x7f) at pthread_mutex_lock.c:115
#2  0x00007f8 in PyGILState_Ensure () from /usr/lib/libpython3.10.so.1.0
#3  0x00007f8 in c10::TensorImpl::decref () from /x/libtorch_python.so
"""


def test_patterns_are_checked_when_they_are_read() -> None:
    """A misspelt condition is named; the shipped ones are sound."""
    assert len(load_patterns()) > 50
    with pytest.raises(ConfigurationError, match="unknown condition"):
        parse_patterns("- {cause: sleep, when: {sycall: [read]}}")
    with pytest.raises(ConfigurationError, match="unknown keys"):
        parse_patterns("- {cause: sleep, whn: {}}")


def test_a_new_pattern_is_data() -> None:
    """A user's own pattern decides before the shipped ones."""
    own = parse_patterns(
        '- {cause: network_io, says: "waits for our storage", when: {frame: ["load_batch_slow_storage"]}}'
    )
    capture = read_capture(CASES / "hangs" / "gloo_allreduce_missing_rank")
    report = classify(capture, (*own, *load_patterns()))
    assert report.ranks[2].cause == "network_io"
    assert report.ranks[2].evidence == "waits for our storage"


def test_system_calls_are_named_on_both_machine_types() -> None:
    """The same wait has another number on aarch64."""
    assert parse_syscall("202 0x1 0x189")[0] == "futex"
    assert parse_syscall("98 0x1 0x189", "aarch64")[0] == "futex"
    assert parse_syscall("running") == ("running", ())
    assert parse_syscall("-1 0x0") == ("", ())


def test_device_kernels_are_read_from_cuda_gdb() -> None:
    """The names of the invocation column, each once."""
    text = (
        "  Kernel Parent Dev Grid Status   SMs Mask GridDim  BlockDim Invocation\n"
        "*      0      -   0    5 Active 0x00000001 (2,1,1) (544,1,1) ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)\n"
        "       1      -   0    6 Active 0x00000001 (1,1,1) (1,1,1) at::cuda::(anonymous namespace)::spin_kernel(long)\n\n"
    )
    assert parse_kernels(text) == (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "at::cuda::(anonymous namespace)::spin_kernel",
    )  # fmt: skip


def test_misleading_messages_of_py_spy_are_explained() -> None:
    """A process that ended, and one that is not Python, are distinguished from a refusal."""
    import os

    assert "ended while" in explain_pyspy("Error: Failed to get process executable name", 2**22 - 3)
    assert "not a Python process" in explain_pyspy(
        "Error: Failed to find python version from target process", os.getpid()
    )


def test_a_debugger_that_prints_nothing_and_fails_is_told(tmp_path: Path) -> None:
    """cuda-gdb exits with 1 also after useful output: only silence is a failure, with what it said on stderr."""
    for name, out in (("silent", ""), ("useful", "echo Thread 1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{out}\necho 'Error: cannot attach' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    silent = run_tool([str(tmp_path / "silent")], 10.0, ok_codes=(0, 1))
    assert silent.problem == "Error: cannot attach"
    assert run_tool([str(tmp_path / "useful")], 10.0, ok_codes=(0, 1)).problem == ""


def test_a_tool_whose_child_keeps_its_output_open_is_not_waited_for(tmp_path: Path) -> None:
    """The agent would notice no hang any more."""
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid}; exec sleep 1000' & sleep 1000"
    done: list[ToolRun] = []
    asking = threading.Thread(target=lambda: done.append(run_tool(["sh", "-c", script], 0.5)), daemon=True)
    asking.start()
    asking.join(60)
    assert pid.read_text().strip()  # the child was there
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert done and "did not finish" in done[0].problem


def test_what_gdb_printed_alone_tells_a_wait_for_the_gil(tmp_path: Path) -> None:
    """Without py-spy nobody says who owns it; the frames say what is waited for."""
    (tmp_path / "rank0.gdb.txt").write_text(GDB_GIL)
    state = classify(read_capture(tmp_path)).ranks[0]
    assert state.cause == "gil_contention" and "GIL" in state.evidence


def test_the_rank_in_the_first_line_of_py_spy_is_used(tmp_path: Path) -> None:
    """The number in the file's name is that of the process."""
    for pid, tp in ((101, 1), (102, 0)):
        text = f"Process {pid}: sglang::scheduler_TP{tp}\nPython v3.10.12 (/usr/bin/python3.10)\n\n"
        text += f'Thread {pid} (idle): "MainThread"\n    f{tp} (/m.py:{tp})\n'
        (tmp_path / f"dump_{pid}.txt").write_text(text)
    ranks = {p.rank: (p.pid, p.parallel) for p in read_capture(tmp_path).processes}
    assert ranks == {0: (102, (("tp", 0),)), 1: (101, (("tp", 1),))}
