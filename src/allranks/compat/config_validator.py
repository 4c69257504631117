"""elastic_harness.config_validator"""

from __future__ import annotations

from allranks.elastic.config import (
    ValidationResult,
    validate_config,
    validate_elastic_config,
    validate_s3_access,
)

__all__ = ["ValidationResult", "validate_config", "validate_elastic_config", "validate_s3_access"]
