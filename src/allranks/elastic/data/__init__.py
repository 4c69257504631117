"""Resumable training data: which samples a step has is a pure function of seed, step and world history.

dataset = ResumableDataset(TokenIndexFile("train.index"), seq_length=1024, seed=1)
loader = ElasticDataLoader(dataset, batch_size=8, num_workers=2)
for batch in loader: ...
state = loader.state_dict()               # exact, prefetched batches not counted
loader.on_topology_change(world_size=3, rank=0)
"""

from __future__ import annotations

from allranks.elastic.data.dataset import DatasetState, ResumableDataset
from allranks.elastic.data.loader import ElasticDataLoader
from allranks.elastic.data.order import Mixture, Order, Permutation, Segment, WorldHistory

__all__ = [
    "DatasetState",
    "ElasticDataLoader",
    "Mixture",
    "Order",
    "Permutation",
    "ResumableDataset",
    "Segment",
    "WorldHistory",
]
