"""elastic_harness.data.index_builder: where its classes were defined."""

from __future__ import annotations

from allranks.compat.data import *  # noqa: F403
