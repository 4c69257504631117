"""Elastic training from one job file: any number of ranks, the same global batches, every sample once.

    python examples/elastic_corpus.py corpus.jsonl
    allranks index build corpus.jsonl -o corpus.index
    allranks run --config job.yaml elastic_train.py job.yaml      # or torchrun; kill it and start it again

Restarted in another world it continues with the next step, the right rate and the next unseen sample.
"""

from __future__ import annotations

import json
import logging
import sys

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from allranks.checkpoint import CheckpointManager
from allranks.elastic import (
    ElasticJob,
    TrainingMetrics,
    cleanup_distributed,
    load_config,
    setup_distributed_environment,
)
from allranks.elastic.parts import make_checkpoint_config, make_limits, make_loader, make_scaling


def main(path: str) -> None:
    """Trains until max_steps; saves on the way."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = load_config(path)
    world = setup_distributed_environment()
    torch.manual_seed(config.training.seed)
    torch.set_num_threads(1)
    width = int(config.model.get("width", 64))
    model = torch.nn.Sequential(torch.nn.Embedding(257, width), torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 257))  # fmt: skip
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.training.lr)
    scaling = make_scaling(config, optimizer, world.world_size, world.rank)
    loader = make_loader(config, scaling, world.world_size, world.rank)
    metrics = TrainingMetrics()
    job = ElasticJob(
        wrapped, optimizer, scaling=scaling, loader=loader, metrics=metrics, limits=make_limits(config, world.local_world_size),
        checkpoint=CheckpointManager(make_checkpoint_config(config)),
    )  # fmt: skip
    event = job.start(world.world_size, world.rank)
    batches = iter(loader)
    for step in range(event.step, config.training.max_steps + 1):
        loss = train_step(wrapped, optimizer, scaling, loader, batches)
        metrics.update_step(step, scaling.effective_batch_size * config.data.seq_length, loss)
        job.save(step)
        if world.rank == 0 and step % config.training.log_interval == 0:
            print(
                f"step {step} loss {loss:.4f} position {loader.dataset.position} of {world.world_size} ranks",
                flush=True,
            )
    if world.rank == 0:
        with open("metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics.summary()) + "\n")
        metrics.log_summary()
    job.checkpoint.close()
    loader.close()
    cleanup_distributed()


def train_step(model, optimizer, scaling, loader, batches) -> float:  # type: ignore[no-untyped-def]
    """One optimizer step: this rank's micro-batches, each weighted by what it holds; returns this rank's loss."""
    total = 0.0
    for i in range(scaling.accumulation_steps):
        batch = next(batches)
        last = i == scaling.accumulation_steps - 1
        model.require_backward_grad_sync = last  # gradients travel once per step
        logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) * loader.weight
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    scaling.step_lr()
    return total


if __name__ == "__main__":
    main(sys.argv[1])
