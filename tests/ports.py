"""Ports for servers that must be told one beforehand, or start again at the same: held, not guessed."""

from __future__ import annotations

import socket


class HeldPort:
    """A port that nobody else gets while this object lives. A server that sets SO_REUSEADDR, as all do, can bind it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))  # never listens: a listening socket would be in the server's way
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Gives it back."""
        self._socket.close()
