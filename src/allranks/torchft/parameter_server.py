"""torchft.parameter_server."""

from __future__ import annotations

from allranks.torchft.not_offered import not_offered

__all__ = ["ParameterServer"]

ParameterServer = not_offered(
    "ParameterServer", "configure a ProcessGroupGloo of two ranks yourself for each session"
)
