"""elastic_harness.scaling.lr_scaling: where its classes were defined."""

from __future__ import annotations

from allranks.compat.scaling import *  # noqa: F403
