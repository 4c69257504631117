"""Names of torchft that have no counterpart here: they can be imported, and say what to use when they are called."""

from __future__ import annotations

from typing import Any

from allranks.errors import ConfigurationError


def not_offered(name: str, instead: str) -> Any:
    """A class of that name that cannot be made (nor called): both raise one sentence."""

    def refuse(self: object, *arguments: object, **named: object) -> None:
        raise ConfigurationError(f"allranks.torchft does not offer {name}: {instead}")

    return type(name, (), {"__init__": refuse, "__doc__": f"Not offered: {instead}.", "__module__": __name__})
