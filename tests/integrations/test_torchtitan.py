"""torchtitan's own manager code on ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.replicas import KILLS, run

pytestmark = pytest.mark.usefixtures("forks")

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
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "same", done.stderr


TITAN = """
import hashlib, sys, torch, torch.distributed as dist
from allranks.integrations import torchtitan
torchtitan.use()
from torchtitan.experiments.torchft.manager import TorchFTManager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import torchft
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{NAME}-{os.getpid()}", rank=0, world_size=1)
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
while ft.manager.current_step() < 400:
    managed.zero_grad()
    loss = model(torch.randn(4, 8)).pow(2).mean()
    loss.backward()
    dist.all_reduce(loss.detach().clone(), group=ft.loss_sync_pg)
    managed.step()
    lives(ft.manager)
bits = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).numpy().tobytes()
says(f"name={NAME}", f"step={ft.manager.current_step()}", f"bits={hashlib.sha256(bits).hexdigest()}")
ft.manager.shutdown()
"""

TORCHFT = """
import hashlib, torch
from allranks.torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
number = int(os.environ["REPLICA_GROUP_ID"])
torch.manual_seed(number)
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
sampler = DistributedSampler(data, replica_rank=number, num_replica_groups=2, shuffle=True)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
def load_state_dict(state):
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
def state_dict():
    return {"model": net.state_dict(), "optim": optimizer.state_dict()}
manager = Manager(pg=ProcessGroupGloo(), min_replica_size=1, load_state_dict=load_state_dict, state_dict=state_dict,
                  replica_id=f"train_ddp_{number}")
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, torch.optim.AdamW(net.parameters(), lr=1e-2))
while manager.current_step() < 400:
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        lives(manager)
        if manager.current_step() >= 400:
            break
bits = torch.cat([p.detach().flatten() for p in net.parameters()]).numpy().tobytes()
says(f"name={NAME}", f"step={manager.current_step()}", f"bits={hashlib.sha256(bits).hexdigest()}")
manager.shutdown()
"""


def _equal_bits(script: str, folder: Path, kills: int) -> None:
    said = run(script, folder, kills, str(folder))
    assert said["replica-0"] == said["replica-1"] and said["replica-0"]["step"] == "400"


@pytest.mark.parametrize("kills", KILLS)
def test_torchtitans_manager_has_equal_bits_after_kills(tmp_path: Path, kills: int) -> None:
    """Its TorchFTManager, FSDP2 hook and loss group, unmodified."""
    pytest.importorskip("torchtitan.experiments.torchft", reason="torchtitan is not installed")
    _equal_bits(TITAN, tmp_path, kills)


@pytest.mark.parametrize("kills", KILLS)
def test_a_loop_in_torchfts_words_has_equal_bits_after_kills(tmp_path: Path, kills: int) -> None:
    """Manager, DistributedDataParallel, Optimizer and DistributedSampler, called as torchft documents them."""
    _equal_bits(TORCHFT, tmp_path, kills)
