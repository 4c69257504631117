"""The job's one YAML file: read, checked as a whole, typed.

config = load_config("job.yaml")          # raises ConfigurationError with every problem in it
result = validate_config("job.yaml")      # or a dict, or an OmegaConf container; never raises for content
result.valid, result.errors, result.warnings
"""

from __future__ import annotations

from typing import Any

from allranks.elastic.config.check import (
    check,
    load_config,
    read_config,
    validate_config,
    validate_elastic_config,
)
from allranks.elastic.config.s3 import validate_s3_access
from allranks.elastic.config.yaml_tree import ConfigProblem, ValidationResult

__all__ = [
    "ConfigProblem",
    "JobConfig",
    "ValidationResult",
    "check",
    "json_schema",
    "load_config",
    "read_config",
    "validate_config",
    "validate_elastic_config",
    "validate_s3_access",
]


def __getattr__(name: str) -> Any:
    # pydantic is an extra: only these two names need it at import.
    if name in {"JobConfig", "json_schema"}:
        from allranks.elastic.config.check import schema_module

        return getattr(schema_module(), name)
    raise AttributeError(f"module 'allranks.elastic.config' has no attribute {name!r}")
