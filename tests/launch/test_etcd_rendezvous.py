"""The etcd helper and the etcd v3 rendezvous, with Debian's real etcd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import held_port

from allranks.cli import main
from allranks.errors import EtcdError, InputError
from allranks.etcd import Etcd, parse_endpoints
from allranks.launch import etcd_server
from proc import parent_of

pytestmark = [
    pytest.mark.usefixtures("forks"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed (Debian: etcd-server)"),
]


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    """A private etcd on a free port."""
    server = etcd_server.start(tmp_path / "etcd", port=0)
    gateway = Etcd((server.client,))
    yield gateway
    gateway.close()
    assert etcd_server.stop(tmp_path / "etcd")


def test_compare_and_put_has_one_winner(etcd: Etcd) -> None:
    """The second writer with an old revision loses and nothing is overwritten."""
    assert etcd.compare_and_put("/a", b"first", 0)
    assert not etcd.compare_and_put("/a", b"second", 0)
    found = etcd.get("/a")
    assert found is not None and found.value == b"first"
    assert etcd.compare_and_put("/a", b"third", found.revision)
    assert etcd.get_prefix("/")["/a"].value == b"third"
    assert etcd.delete("/a")
    assert etcd.get("/a") is None


def test_a_dead_endpoint_is_passed_over(etcd: Etcd) -> None:
    """With two endpoints, one of them closed, calls go to the other."""
    both = Etcd((f"http://127.0.0.1:{held_port()}", etcd.endpoints[0]))
    both.put("/b", b"1")
    assert both.get("/b") is not None
    both.close()


def test_a_dead_etcd_is_an_error_that_says_what_to_do() -> None:
    """Nothing listens there."""
    with pytest.raises(EtcdError, match="no etcd answers") as caught:
        Etcd(parse_endpoints(f"127.0.0.1:{held_port()}")).status()
    assert "allranks etcd start" in caught.value.hint


def test_start_status_stop_as_a_user_types_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole life, with exit codes; a second start finds the first."""
    folder = ["--folder", str(tmp_path / "e"), "--json"]
    assert main(["etcd", "status", *folder]) == 1
    assert main(["etcd", "start", "--port", "0", *folder]) == 0
    started = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert started["healthy"]
    assert main(["etcd", "start", "--port", "0", *folder]) == 0
    assert json.loads(capsys.readouterr().out)["pid"] == started["pid"]
    assert main(["etcd", "stop", *folder]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "stopped": True}
    assert main(["etcd", "status", *folder]) == 1


def test_a_port_in_use_is_said_with_a_hint(tmp_path: Path, etcd: Etcd) -> None:
    """Two servers cannot share a port."""
    port = int(etcd.endpoints[0].rsplit(":", 1)[1])
    with pytest.raises(InputError, match="cannot be used") as caught:
        etcd_server.start(tmp_path / "other", port=port)
    assert "--port" in caught.value.hint


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
path = sys.argv[1]
with open(f"{path}/{os.environ['RANK']}.{os.getpid()}", "w") as out:
    out.write(f"{int(total)} {os.environ['WORLD_SIZE']}")
if not os.path.exists(f"{path}/go"):
    # the first life of the second node is killed from outside; the first waits for that
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)
dist.destroy_process_group()
"""


def test_torchrun_meets_on_etcd_v3_and_survives_the_loss_of_a_node(tmp_path: Path, etcd: Etcd) -> None:
    """Two agents with `--nnodes 1:2`; one agent is killed with its rank; the other continues in a world of one."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    seen = tmp_path / "seen"
    seen.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--rdzv-backend", "etcd-v3", "--rdzv-endpoint", etcd.endpoints[0].removeprefix("http://"),
        "--rdzv-id", "meet", "--max-restarts", "5", "--rdzv-conf",
        "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3", str(script), str(seen),
    ]  # fmt: skip
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for _ in range(2)
    ]
    try:
        _wait(lambda: len([p for p in seen.iterdir() if p.read_text() == "2 2"]) >= 2, 90)
        (seen / "go").touch()
        os.killpg(nodes[1].pid, signal.SIGKILL)  # the agent; its rank is in another session
        for path in seen.glob("1.*"):
            os.kill(int(path.suffix[1:]), signal.SIGKILL)
        for path in seen.glob("0.*"):
            if nodes[0].poll() is None and parent_of(int(path.suffix[1:])) != nodes[0].pid:
                os.kill(int(path.suffix[1:]), signal.SIGKILL)
        assert nodes[0].wait(timeout=300) == 0
        assert any(p.read_text() == "1 1" for p in seen.iterdir()), [p.read_text() for p in seen.iterdir()]
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
            node.wait(timeout=40)


def _wait(condition: object, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def test_the_module_may_be_imported_before_torchs_rendezvous() -> None:
    """torch's registry loads our entry point while our own module is still being imported."""
    code = (
        "import allranks.launch.etcd_rendezvous\n"
        "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry\n"
        "print('etcd-v3' in registry._registry)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("True\n", "")
