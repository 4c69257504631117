"""Two ranks save to and restore from an object store; prints the steps they restored. Run by a test.

python two_ranks_s3.py BUCKET OPTIONS_AS_JSON
"""

from __future__ import annotations

import json
import sys

import torch

from allranks.checkpoint import CheckpointConfig, CheckpointManager
from allranks.drill.ranks import Ranks


def save_and_load(rank: int, world_size: int, config: CheckpointConfig) -> int:
    """One rank."""
    # replicas: no optimizer and no DDP, whose imports would take longer than all the rest
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    with CheckpointManager(config) as manager:
        manager.step(1, model)
        assert manager.wait_for_pending_saves(60)
        other = torch.nn.Linear(8, 8)
        state = manager.restore(other)
        assert state is not None
        assert torch.equal(model.weight, other.weight)
        return state.step


if __name__ == "__main__":
    settings = CheckpointConfig(
        nvme_path=None, s3_bucket=sys.argv[1], s3_prefix="run/1", s3_options=json.loads(sys.argv[2]),
        memory_snapshot_interval=0, checkpoint_interval=1,
    )  # fmt: skip
    with Ranks(save_and_load, 2, (settings,)) as ranks:
        print(ranks.values(timeout_s=90))
