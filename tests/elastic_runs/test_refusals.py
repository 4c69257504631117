"""What cannot work is said in one sentence with the fix, and `allranks run` ends with 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import held_port

pytestmark = pytest.mark.usefixtures("forks")


def _start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ALLRANKS_")}
    command = [sys.executable, "-m", "allranks", "run", "--no-lighthouse", "--no-watch", *words]
    return subprocess.Popen(
        [*command, "--no-python", "true"], cwd=folder, env={**environment, "ALLRANKS_DIR": str(folder / "box")},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _meeting(etcd: str, name: str, *more: str) -> list[str]:
    return [
        "--nproc-per-node=1",
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={etcd}",
        f"--rdzv-id={name}",
        *more,
    ]


def test_each_way_of_not_meeting_is_explained(tmp_path: Path, etcd: str) -> None:
    """Wrong id, dead etcd, port in use, closed rendezvous."""
    done = _start(tmp_path, *_meeting(etcd, "closed", "--nnodes=1"))
    assert (done.communicate(timeout=200)[0], done.returncode)[1] == 0
    with socket.create_server(("127.0.0.1", 0)) as unknown:
        taken = f"127.0.0.1:{unknown.getsockname()[1]}"
        dead = f"127.0.0.1:{held_port()}"
        few = "--rdzv-conf=timeout=3"
        started = {
            "wrong id": _start(tmp_path, *_meeting(etcd, "nobody-else", "--nnodes=2", few)),
            "dead etcd": _start(tmp_path, *_meeting(dead, "any", "--nnodes=1")),
            "closed": _start(tmp_path, *_meeting(etcd, "closed", "--nnodes=1")),
            "port in use": _start(
                tmp_path, "--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=p",
                f"--rdzv-endpoint={taken}", "--rdzv-conf=read_timeout=3",
            ),
        }  # fmt: skip
        said = {name: process.communicate(timeout=200)[0] for name, process in started.items()}
    codes = {name: process.returncode for name, process in started.items()}
    assert codes == dict.fromkeys(started, 2), said
    assert "'nobody-else'" in said["wrong id"] and "same --rdzv-id" in said["wrong id"]
    assert dead in said["dead etcd"] and "allranks etcd start" in said["dead etcd"]
    assert "'closed' is closed" in said["closed"] and "new --rdzv-id" in said["closed"]
    assert taken in said["port in use"] and "--rdzv-endpoint HOST:PORT" in said["port in use"]
    assert not any("Traceback" in text for text in said.values()), said
