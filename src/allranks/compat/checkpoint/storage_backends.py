"""elastic_harness.checkpoint.storage_backends: where its classes were defined."""

from __future__ import annotations

from allranks.compat.checkpoint import *  # noqa: F403
