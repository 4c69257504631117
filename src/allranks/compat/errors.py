"""elastic_harness.errors"""

from __future__ import annotations

from allranks.errors import AllranksError as ElasticTrainingError
from allranks.errors import (
    CheckpointError,
    CheckpointLoadError,
    CheckpointSaveError,
    CheckpointValidationError,
    ConfigurationError,
    DataLoadingError,
    DistributedSetupError,
    MemoryLimitExceeded,
    TopologyChangeError,
)

__all__ = [
    "CheckpointError",
    "CheckpointLoadError",
    "CheckpointSaveError",
    "CheckpointValidationError",
    "ConfigurationError",
    "DataLoadingError",
    "DistributedSetupError",
    "ElasticTrainingError",
    "MemoryLimitExceeded",
    "TopologyChangeError",
]
