"""Ctrl-C while something is saved or restored: the process ends soon, and nothing is lost."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, NVMeBackend
from allranks.checkpoint.stores.file_store import FileSource

from .jobs import make_job, make_state, same

#: Python ends itself by the signal, or with 1 where code ran after the traceback.
ENDED = (1, -signal.SIGINT)

COPYING = """
import os, signal, sys, time
import torch
from allranks.checkpoint import CheckpointConfig, CheckpointManager
from allranks.checkpoint.save import snapshot

real = snapshot._copy_one
snapshot._copy_one = lambda *pair: (time.sleep(0.1), real(*pair))
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
manager = CheckpointManager(CheckpointConfig(checkpoint_interval=1, memory_snapshot_interval=0, nvme_path=sys.argv[1]))
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
assert manager.step(1, model, optimizer)
assert manager.coordinator.copy._thread.is_alive()
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_a_save_that_is_being_copied_at_ctrl_c_is_finished(tmp_path: Path) -> None:
    """`step` has said that it is saved; the helper finishes it after the process has ended, and the log says so."""
    command = [sys.executable, "-c", COPYING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode in ENDED and done.stderr.rstrip().endswith("will finish it")
    deadline = time.monotonic() + 60
    manifest = tmp_path / "checkpoint_step_00000001" / "manifest.json"  # written last
    while not manifest.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert NVMeBackend(tmp_path).load("checkpoint_step_00000001").step == 1


RESTORING = """
import sys
import torch
from allranks.checkpoint import CheckpointConfig, CheckpointManager

options = {"access_key_id": "a", "secret_access_key": "b"}
config = CheckpointConfig(s3_bucket="b", s3_endpoint_url=sys.argv[1], s3_options=options)
CheckpointManager(config).restore(torch.nn.Linear(8, 8))
"""


def test_a_restore_from_a_store_that_is_silent_ends_at_ctrl_c() -> None:
    """The store takes the connection and never answers; a request may wait for three minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", RESTORING, address]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            server.settimeout(60)
            connection, _ = server.accept()
            with connection:
                assert connection.recv(100)
                os.kill(process.pid, signal.SIGINT)
                _, printed = process.communicate(timeout=60)
    assert process.returncode in ENDED and printed.rstrip().endswith("KeyboardInterrupt")


def test_a_restore_that_is_interrupted_says_what_the_model_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a notebook the process lives on; the next restore makes it whole."""
    NVMeBackend(tmp_path).save(make_state(3), "checkpoint_step_00000003")
    real, reads = FileSource.read_views, []

    def interrupted(self: FileSource, start: int, views: Sequence[memoryview]) -> None:
        reads.append(start)
        if len(reads) == 2:
            raise KeyboardInterrupt
        real(self, start, views)

    model, optimizer = make_job(seed=7)
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0)) as manager:
        monkeypatch.setattr(FileSource, "read_views", interrupted)
        with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
            manager.restore(model, optimizer)
        assert "the restore was interrupted. THE MODEL HOLDS PARTS OF STEP 3" in caplog.text
        monkeypatch.undo()
        manager.restore(model, optimizer)
    assert same(make_state(3).model_state_dict, dict(model.state_dict()))


SAVING = """
import os, signal, sys, time
import torch
from allranks.checkpoint import CheckpointConfig, CheckpointManager

options = {"access_key_id": "a", "secret_access_key": "b", "timeout_s": "30", "max_retries": "0"}
tiers = {"nvme_path": sys.argv[1], "s3_bucket": "b", "s3_endpoint_url": sys.argv[2], "s3_options": options}
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
with CheckpointManager(CheckpointConfig(checkpoint_interval=1, memory_snapshot_interval=0, **tiers)) as manager:
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert manager.step(1, model, optimizer)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def test_ctrl_c_does_not_wait_for_a_store_that_is_silent(tmp_path: Path) -> None:
    """The manager is closed by its `with`: the disk gets its checkpoint, and the log names what the helper still tries."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", SAVING, str(tmp_path), address]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=200)
    assert done.returncode in ENDED
    assert done.stderr.count("[S3] step 1 is still being saved: the helper process") == 1
    deadline = time.monotonic() + 60
    manifest = tmp_path / "checkpoint_step_00000001" / "manifest.json"  # written last
    while not manifest.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert NVMeBackend(tmp_path).load("checkpoint_step_00000001").step == 1
