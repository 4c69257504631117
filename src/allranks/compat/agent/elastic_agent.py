"""elastic_harness.agent.elastic_agent: where its classes were defined."""

from __future__ import annotations

from allranks.compat.agent import *  # noqa: F403
