"""elastic_harness.data.resumable_dataset: where its classes were defined."""

from __future__ import annotations

from allranks.compat.data import *  # noqa: F403
