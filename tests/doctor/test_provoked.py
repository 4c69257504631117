"""Checks that must try the thing itself: a store that refuses, a kernel that forbids, a disk that is full."""

from __future__ import annotations

import errno
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.cli import main
from allranks.doctor import Check, DoctorOptions, evidence, machine, services
from allranks.doctor.nodes import compare

FORBID_READING = """
import ctypes, struct
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]
PROCESS_VM_READV, PERMISSION = 310, 0x00050001  # refuse with EPERM
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, PROCESS_VM_READV), (0x06, 0, 0, PERMISSION), (0x06, 0, 0, 0x7fff0000)]
code = b"".join(struct.pack("HBBI", *step) for step in steps)
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(steps), code)), 0, 0) == 0
from allranks.doctor.evidence import check_stack_tools
from allranks.doctor import DoctorOptions
print([(check.status, check.hint) for check in check_stack_tools(DoctorOptions()) if check.name == "ptrace"][0])
"""


def check_store(s3: Any, monkeypatch: pytest.MonkeyPatch, key: str, secret: str, endpoint: str = "") -> Check:
    """The one finding about the bucket, with these credentials."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    options = DoctorOptions(s3="s3://ready/run", s3_endpoint=endpoint or s3.endpoint)
    (found,) = services.check_object_store(options)
    return found


def test_wrong_credentials_and_missing_permissions_are_told_apart(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a real store: a right key, an unknown one, a wrong secret, and one that may not list or write."""
    from checkpoint.s3server import KEY, SECRET, Proxy

    right = check_store(s3, monkeypatch, KEY, SECRET)
    assert right.status == "ok", right
    assert "does not know the access key" in check_store(s3, monkeypatch, "nobody", SECRET).hint
    assert "secret key does not match" in check_store(s3, monkeypatch, KEY, "wrong").hint
    for word, permission, place in (
        ("PUT", "s3:PutObject", "ready/run*"),
        ("list-type", "s3:ListBucket", "ready"),
    ):
        with Proxy(s3.ports["s3"], lambda line, word=word: 403 if word in line else None) as proxy:  # type: ignore[misc]
            found = check_store(s3, monkeypatch, KEY, SECRET, proxy.endpoint)
        assert found.status == "problem" and found.hint.startswith(
            f"Allow {permission} on arn:aws:s3:::{place} "
        )
    assert "is the store reachable?" in check_store(s3, monkeypatch, KEY, SECRET, "http://127.0.0.1:1").hint


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the filter names the system call by its number there"
)
def test_a_kernel_that_forbids_reading_other_processes_is_found_by_trying() -> None:
    """A seccomp filter as containers have it: no variable and no file tells of it."""
    done = subprocess.run(
        [sys.executable, "-c", FORBID_READING], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.startswith("('problem'") and "SYS_PTRACE" in done.stdout, done.stdout + done.stderr


def test_a_full_folder_is_told_from_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint of a full disk is space."""

    def full(path: Path) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(machine, "_write_speed", full)
    (found,) = machine.check_folders(DoctorOptions(checkpoint_folders=(str(tmp_path),)))
    assert (found.status, found.detail) == ("problem", "full: No space left on device")
    assert f"allranks checkpoint prune {tmp_path}" in found.hint


def test_every_word_for_no_loses_evidence_and_a_missing_dump_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes "no" for no; and it does not make the folder of its dumps."""
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "No")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "dumps" / "rank_"))
    found = {check.name: check for check in evidence.check_torch_settings(DoctorOptions())}
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"].hint == "unset TORCH_NCCL_DUMP_ON_TIMEOUT"
    missing = found["TORCH_FR_DUMP_TEMP_FILE"]
    assert missing.status == "problem"
    subprocess.run(missing.hint.split(), check=True)
    assert "TORCH_FR_DUMP_TEMP_FILE" not in [c.name for c in evidence.check_torch_settings(DoctorOptions())]


def test_what_differs_between_nodes_is_named_with_the_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three nodes, one with another NCCL and another with a clock that is off: as files, one answer in each."""
    facts = {"torch": "2.13.0", "nccl": "2.27.3", "python": "3.11.7", "allranks": "1", "clock_offset_s": 0.1}
    nodes = [
        {**facts, "host": "a"},
        {**facts, "host": "b", "nccl": "2.21.5"},
        {**facts, "host": "c", "clock_offset_s": 7.5},
    ]
    found = {check.name: check for check in compare(nodes)}
    assert found["nccl across nodes"].status == "problem"
    assert found["nccl across nodes"].detail.startswith("2.27.3 on a, c; 2.21.5 on b: ncclCommInitRank fails")
    assert found["clocks across nodes"].detail == "7.4 s between a and c"
    assert found["torch across nodes"].status == "ok" and found["driver across nodes"].status == "skipped"
    for node in nodes:
        (tmp_path / f"{node['host']}.json").write_text(json.dumps({"schema": 1, "facts": node}))
    assert main(["doctor", "compare", "--json", *(str(path) for path in sorted(tmp_path.iterdir()))]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == 2
    (tmp_path / "log").write_text("no answer")
    assert main(["doctor", "compare", str(tmp_path / "log")]) == 2
    assert main(["doctor", "compare", str(tmp_path)]) == 2  # a folder
