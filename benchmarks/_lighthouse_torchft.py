"""torchft's own lighthouse (Rust) in its own virtual environment, and a crowd of gRPC clients for it.

The clients speak raw bytes: the three messages are small enough to write by hand, and nothing is decoded, as
in the crowd of our own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

VERSION = "0.2.0"
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


def find_server() -> Path | None:
    """`torchft_lighthouse`, installed on first use; None when that is not possible here."""
    cache = Path(os.environ.get("ALLRANKS_BENCH_CACHE") or Path.home() / ".cache" / "allranks-bench")
    folder = cache / f"torchft-{VERSION}"
    script = folder / "bin" / "torchft_lighthouse"
    if script.exists():
        return script
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", str(folder)], check=True, timeout=120, capture_output=True
        )
        subprocess.run(
            [str(folder / "bin" / "pip"), "install", "--quiet", f"torchft=={VERSION}", "torch==2.13.0"],
            check=True, timeout=1200, capture_output=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return script if script.exists() else None


def start(script: Path, port: int, min_replicas: int) -> subprocess.Popen[bytes]:
    """Starts it; it listens when `wait_ready` returns."""
    return subprocess.Popen(
        [str(script), "--min_replicas", str(min_replicas), "--bind", f"127.0.0.1:{port}",
         "--join_timeout_ms", "600000", "--quorum_tick_ms", "100", "--heartbeat_timeout_ms", "5000"],
        env={**os.environ, "RUST_LOG": "error"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _text(field: int, value: str) -> bytes:
    data = value.encode()
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def heartbeat(name: str) -> bytes:
    """LighthouseHeartbeatRequest."""
    return _text(1, name)


def quorum_request(name: str, step: int) -> bytes:
    """LighthouseQuorumRequest."""
    member = _text(1, name) + _text(2, "http://10.0.0.1:12345") + _text(3, "10.0.0.1:12346")
    member += b"\x20" + _varint(step) + b"\x28" + _varint(1)
    return b"\x0a" + _varint(len(member)) + member


class GrpcCrowd:
    """`size` channels, each with its own connection."""

    def __init__(self, port: int, size: int) -> None:
        self.port, self.size = port, size
        self.names = [f"replica-{i:05d}" for i in range(size)]

    async def open(self) -> None:
        """Connects all."""
        import grpc

        self.channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=_OPTIONS) for _ in self.names
        ]
        self._beat = [c.unary_unary("/torchft.LighthouseService/Heartbeat") for c in self.channels]
        self._quorum = [c.unary_unary("/torchft.LighthouseService/Quorum") for c in self.channels]
        for start_at in range(0, self.size, 100):
            await asyncio.gather(
                *(self._beat[i](heartbeat(self.names[i]), timeout=60, wait_for_ready=True)
                  for i in range(start_at, min(start_at + 100, self.size)))
            )  # fmt: skip

    async def beat(self, index: int) -> None:
        """One heartbeat."""
        await self._beat[index](heartbeat(self.names[index]), timeout=30)

    async def quorum(self, step: int) -> float:
        """Everybody asks; seconds until the last has its answer."""
        began = time.perf_counter()
        await asyncio.gather(
            *(
                call(quorum_request(name, step), timeout=300)
                for call, name in zip(self._quorum, self.names, strict=True)
            )
        )
        return time.perf_counter() - began

    async def one_quorum(self, index: int, step: int) -> float:
        """One asks, beating all the while as torchft's manager does; seconds until it has its answer."""

        async def keep_beating() -> None:
            while True:
                await self.beat(index)
                await asyncio.sleep(0.1)

        beating, began = asyncio.create_task(keep_beating()), time.perf_counter()
        try:
            await self._quorum[index](quorum_request(self.names[index], step), timeout=60)
            return time.perf_counter() - began
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def close(self) -> None:
        """Closes all."""
        await asyncio.gather(*(channel.close() for channel in self.channels))
