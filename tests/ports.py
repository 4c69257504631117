"""Ports for servers that must be told one beforehand: held, not guessed."""

from __future__ import annotations

from allranks.channel.frames import HeldPort

_held: list[HeldPort] = []


def held_port() -> int:
    """A port of the loopback interface that nobody else is given while the tests run; nobody listens on it yet."""
    _held.append(HeldPort())
    return _held[-1].number
