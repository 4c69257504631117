"""DiLoCo: replicas train alone for 20 steps at a time and exchange only how far they got. Streaming fragments.

python examples/diloco.py            # starts two replicas of itself on this machine
"""

from __future__ import annotations

import os
import sys
import zlib

import torch
from torch import nn

ROUNDS = int(os.environ.get("ROUNDS", "12"))


def main() -> None:
    from allranks.torchft import DiLoCo, Manager

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    fragments = [model[0], model[2]]
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
    manager = Manager(state=[inner], min_replica_size=1, use_async_quorum=False)
    truth = torch.randn(16, 1, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(zlib.crc32(manager.replica_id().encode()))  # from here on: data of its own
    said = -1
    with DiLoCo(manager, fragments, inner, outer, sync_every=20, fragment_sync_delay=2):
        while manager.current_step() < ROUNDS:
            x = torch.randn(64, 16)
            inner.zero_grad()
            loss = (model(x) - torch.sin(x @ truth)).square().mean()
            loss.backward()
            inner.step()  # every 10th starts or ends the exchange of one fragment
            if manager.current_step() != said:
                said = manager.current_step()
                print(f"exchange {said} loss {loss.item():.4f}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    if not any(os.environ.get(name) for name in ("ALLRANKS_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE")):
        command = [sys.executable, "-m", "allranks", "run", "--replicas", "2", __file__]
        os.execv(sys.executable, command)
    main()
