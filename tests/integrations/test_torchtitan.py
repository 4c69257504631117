"""torchtitan's own manager code on ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse

NAMES = """
from allranks.integrations import torchtitan
torchtitan.use()
torchtitan.use()
import importlib.util
assert importlib.util.find_spec("torchft") is not None
import torchft
import torchft.process_group, allranks.torchft
from torchft.local_sgd import DiLoCo
from torchft.checkpointing.http_transport import HTTPTransport
assert torchft.Manager is allranks.torchft.Manager
assert torchft.process_group.ManagedProcessGroup is allranks.torchft.process_group.ManagedProcessGroup
print("same")
"""


def test_torchft_means_ours_after_use() -> None:
    """Modules and their modules; twice is once."""
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "same", done.stderr


TRAIN = """
import os, sys, torch, torch.distributed as dist
from allranks.integrations import torchtitan
torchtitan.use()
from torchtitan.experiments.torchft.manager import TorchFTManager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import torchft
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
number = int(os.environ["REPLICA_GROUP_ID"])
ft = TorchFTManager(TorchFTManager.Config(enable=True, process_group="gloo", replica_id=number, group_size=2))
torch.manual_seed(number)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
ft.maybe_set_all_reduce_hook([model])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ft.manager.set_state_dict_fns(
    lambda state: (model.load_state_dict(state["m"]), optimizer.load_state_dict(state["o"])),
    lambda: {"m": model.state_dict(), "o": optimizer.state_dict()})
managed = torchft.Optimizer(ft.manager, optimizer)
while ft.manager.current_step() < 10:
    managed.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    dist.all_reduce(loss.detach().clone(), group=ft.loss_sync_pg)
    managed.step()
print("SAYS", ft.manager.num_participants(), repr(sum(p.full_tensor().double().sum().item() for p in model.parameters())))
ft.manager.shutdown()
"""


@pytest.mark.timeout(200)
def test_torchtitans_manager_trains_two_replicas_with_equal_bits(tmp_path: Path) -> None:
    """Its TorchFTManager, FSDP2 hook and loss group, unmodified."""
    pytest.importorskip("torchtitan.experiments.torchft", reason="torchtitan is not installed")
    with Lighthouse(Options(min_replicas=2), ServerOptions()) as lighthouse:
        running = [
            subprocess.Popen(
                [sys.executable, "-c", TRAIN, str(tmp_path / str(number))], text=True,
                env={**os.environ, "REPLICA_GROUP_ID": str(number), "RANK": "0", "WORLD_SIZE": "1",
                     "TORCHFT_LIGHTHOUSE": f"http://{lighthouse.address}", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for number in range(2)
        ]  # fmt: skip
        ended = [process.communicate(timeout=180) for process in running]
    said = [[line for line in out.splitlines() if line.startswith("SAYS")] for out, _ in ended]
    assert said[0] == said[1] and said[0][0].startswith("SAYS 2 "), ended
