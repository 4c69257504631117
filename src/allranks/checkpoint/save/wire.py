"""The messages between a rank and its helper process: length-framed JSON over a socket pair. Torch-free.

rank → helper: `arena` (with the memory's descriptor), `drop`, `layout`, `save`. helper → rank: `saved`, `failed`.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from typing import Any

from allranks.checkpoint.layout import Shard
from allranks.checkpoint.save.writer import Saved, SaveJob
from allranks.checkpoint.stores.store import Attempt, StoreSpec

_LENGTH = 4
MAX_BYTES = 1 << 30


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Sends one message, with descriptors if any; raises OSError when the other side is gone."""
    body = json.dumps(message).encode()
    frame = len(body).to_bytes(_LENGTH, "big") + body
    if fds:
        sent = socket.send_fds(sock, [frame], list(fds))
        frame = frame[sent:]
    sock.sendall(frame)


class Inbox:
    """Puts messages together from what the socket gives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self.fds: list[int] = []

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other side has closed."""
        while True:
            message = self._take()
            if message is not None:
                return message
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 8)
            except ConnectionResetError:  # died with our replies unread; said once, what it sent comes after
                continue
            self.fds += fds
            if not data:
                return None
            self._buffer += data

    def _take(self) -> dict[str, Any] | None:
        if len(self._buffer) < _LENGTH:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if length > MAX_BYTES:
            raise ValueError(f"message of {length} bytes")
        end = _LENGTH + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH:end])
        del self._buffer[:end]
        message: dict[str, Any] = json.loads(body)
        return message


def job_to_json(job: SaveJob) -> dict[str, Any]:
    """A job as JSON; the skeletons in it are not copied."""
    return {**vars(job), "store": asdict(job.store), "attempt": asdict(job.attempt)}


def job_from_json(raw: dict[str, Any]) -> SaveJob:
    """The job again."""
    return SaveJob(
        **{**raw, "store": StoreSpec(**raw["store"]), "attempt": Attempt(**raw["attempt"]), "ranks": tuple(raw["ranks"])}
    )  # fmt: skip


def shards_from_json(raw: list[list[Any]]) -> list[Shard]:
    """The shards again; as JSON a shard is a list."""
    return [
        Shard(name, dtype, tuple(shape), tuple(offsets), tuple(sizes), length, view)
        for name, dtype, shape, offsets, sizes, length, view in raw
    ]


def saved_from_json(raw: dict[str, Any]) -> Saved:
    """A result again."""
    return Saved(**{**raw, "removed": tuple(raw["removed"]), "left": tuple(raw["left"])})
