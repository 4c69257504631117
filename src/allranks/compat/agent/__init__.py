"""elastic_harness.agent"""

from __future__ import annotations

from allranks.elastic.world import (
    ElasticTrainingConfig,
    WorldInfo,
    barrier,
    broadcast_object,
    cleanup_distributed,
    get_rank,
    get_world_info,
    get_world_size,
    is_main_process,
    setup_distributed_environment,
)

__all__ = [
    "ElasticTrainingConfig",
    "WorldInfo",
    "barrier",
    "broadcast_object",
    "cleanup_distributed",
    "get_rank",
    "get_world_info",
    "get_world_size",
    "is_main_process",
    "setup_distributed_environment",
]
