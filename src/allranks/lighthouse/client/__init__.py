"""The lighthouse's client side: the connection of a rank or an agent, and its liveness proxy. No torch, no gRPC."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """`Client` and `ClientOptions`: this package was a module in 0.1.0."""
    if name not in ("Client", "ClientOptions"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    from allranks.lighthouse.client import client

    warnings.warn(f"{__name__}.{name} is now {client.__name__}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(client, name)
