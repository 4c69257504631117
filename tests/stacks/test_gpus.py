"""GPUs as a sign of progress, from what nvidia-smi prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allranks.stacktraces import gpus
from allranks.stacktraces.debuggers import dump_gpu_core
from allranks.stacktraces.find import Target
from allranks.stacktraces.gpus import GpuUse, all_wait, ask

SMI = """#!/bin/sh
case "$1" in
  *compute-apps*) printf '101, GPU-a\\n102, GPU-b\\n900, GPU-c\\n' ;;
  *) printf 'GPU-a, 100, 0\\nGPU-b, %s\\nGPU-c, 55, 31\\nGPU-d, [N/A], [N/A]\\n' "$(cat "$(dirname "$0")/b")" ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver with four cards; the file `b` is the use of the second one."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "b"


def test_only_the_gpus_of_the_job_count(smi: Path) -> None:
    """The third card belongs to another job; a process without a GPU has none."""
    smi.write_text("0, 0")
    assert ask([101, 102]) == (GpuUse("GPU-a", 100, 0), GpuUse("GPU-b", 0, 0))
    assert ask([7]) == ()


def test_where_the_driver_lists_no_process_the_open_device_files_tell(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container; the second card belongs to a process whose files may not be read, or to nobody."""
    smi.write_text("0, 0")
    for minor, name in enumerate("ab"):
        card = tmp_path / "cards" / f"0000:0{minor}:00.0" / "information"
        card.parent.mkdir(parents=True)
        card.write_text(f"Model: \t NVIDIA H200\nGPU UUID: \t GPU-{name}\nDevice Minor: \t {minor}\n")
    monkeypatch.setattr(gpus, "CARDS", tmp_path / "cards")
    monkeypatch.setattr(gpus, "DEVICE", str(tmp_path / "nvidia"))
    assert ask([os.getpid()]) == ()
    with open(tmp_path / "nvidia0", "w"):
        assert ask([os.getpid(), 2**22]) == (GpuUse("GPU-a", 100, 0),)


def test_a_job_whose_gpus_move_no_data_waits(smi: Path) -> None:
    """One spins in a kernel, one idles; small work that rounds to no traffic is work; one answer proves nothing."""
    smi.write_text("0, 0")
    first = ask([101, 102])
    assert all_wait(first, first)
    assert not all_wait((), first) and not all_wait((), ())
    for busy in ("12, 0", "100, 40"):
        smi.write_text(busy)
        assert not all_wait(first, ask([101, 102]))


def test_without_a_driver_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error, no guess."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask([101]) == ()


def test_the_trigger_of_a_core_dump_goes_to_a_pipe_and_never_into_a_file(tmp_path: Path) -> None:
    """The process names the pipe; anyone who looks at it, perhaps root, must not overwrite what it points to."""
    victim = tmp_path / "passwd"
    victim.write_text("root:x:0:0")
    (tmp_path / "pipe").symlink_to(victim)
    environ = {"CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1", "CUDA_COREDUMP_PIPE": str(tmp_path / "pipe")}
    said = dump_gpu_core(Target(os.getpid(), 0, environ=environ))
    assert "is not a pipe" in said and victim.read_text() == "root:x:0:0"
