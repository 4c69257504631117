"""Tokenizes blocks, in this process or in child processes, and gives the results back in order.

Children speak length-prefixed msgpack over pipes, with a bounded number of blocks under way. A child ends when its
standard input does, so a builder killed with -9 leaves no orphan behind.
"""

from __future__ import annotations

import os
import selectors
import signal
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO

import msgspec

from allranks.elastic.index.sources import Block, read_documents
from allranks.elastic.index.tokenize import Encode, TokenizerSpec, make_encoder
from allranks.errors import AllranksError, DataLoadingError


class Setup(msgspec.Struct, frozen=True):
    """What a worker gets once."""

    spec: TokenizerSpec
    text_key: str
    skip_bad: bool


class Tokenized(msgspec.Struct):
    """A block's tokens; `lengths` and `places` are little-endian int64, one per document."""

    tokens: bytes = b""
    lengths: bytes = b""
    places: bytes = b""
    skipped: int = 0
    error: str = ""
    hint: str = ""


def tokenize(block: Block, encode: Encode, text_key: str, skip_bad: bool) -> Tokenized:
    """One block, from disk to ids."""
    documents = read_documents(block, text_key, skip_bad)
    ids = encode(documents.texts)
    return Tokenized(
        b"".join(one.tobytes() for one in ids),
        array("q", map(len, ids)).tobytes(),
        array("q", documents.places).tobytes(),
        documents.skipped,
    )


def send(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(struct.pack("<Q", len(payload)))
    pipe.write(payload)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """One frame; None at the end of the stream."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    size = struct.unpack("<Q", head)[0]
    payload = pipe.read(size)
    return payload if len(payload) == size else None


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the builder's business
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    first = receive(inbox)
    if first is None:
        return 0
    setup = msgspec.msgpack.decode(first, type=Setup)
    encode = make_encoder(setup.spec)
    decoder, encoder = msgspec.msgpack.Decoder(Block), msgspec.msgpack.Encoder()
    while (frame := receive(inbox)) is not None:
        try:
            result = tokenize(decoder.decode(frame), encode, setup.text_key, setup.skip_bad)
        except AllranksError as error:
            result = Tokenized(error=str(error), hint=error.hint)
        try:
            send(outbox, encoder.encode(result))
        except BrokenPipeError:
            return 0  # the builder is gone
    return 0


_WORKER = "import sys; from allranks.elastic.index.workers import main; sys.exit(main())"
_OOM = "Signal 9 is often the OOM killer: use fewer --workers. "


@dataclass
class WorkerPool:
    """Child processes, each with one block at a time. `start` and `close` own them."""

    setup: Setup
    count: int
    _children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> WorkerPool:
        for _ in range(self.count):
            self._children.append(self._spawn())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        send(_pipe(child.stdin), msgspec.msgpack.encode(self.setup))
        return child

    def run(self, blocks: Iterable[Block]) -> Iterator[tuple[Block, Tokenized]]:
        """Results in the order of the blocks; at most two blocks per worker are under way or waiting."""
        todo = enumerate(blocks)
        idle = list(self._children)
        at_work: dict[int, tuple[int, Block]] = {}
        done: dict[int, tuple[Block, Tokenized]] = {}
        next_out, exhausted = 0, False
        with selectors.DefaultSelector() as waiting:
            for child in self._children:
                waiting.register(_pipe(child.stdout), selectors.EVENT_READ, child)
            while True:
                while idle and not exhausted and len(at_work) + len(done) < 2 * self.count:
                    task = next(todo, None)
                    if task is None:
                        exhausted = True
                        break
                    child = idle.pop()
                    at_work[child.pid] = task
                    try:
                        send(_pipe(child.stdin), msgspec.msgpack.encode(task[1]))
                    except BrokenPipeError:
                        raise self._died(child, task[1]) from None
                while next_out in done:
                    yield done.pop(next_out)
                    next_out += 1
                if not at_work:
                    if exhausted and not done:
                        return
                    continue
                for key, _ in waiting.select(timeout=60.0):
                    child = key.data
                    if child.pid not in at_work:
                        raise self._died(child, None)
                    number, block = at_work.pop(child.pid)
                    done[number] = block, self._take(child, block)
                    idle.append(child)

    def _take(self, child: subprocess.Popen[bytes], block: Block) -> Tokenized:
        frame = receive(_pipe(child.stdout))
        if frame is None:
            raise self._died(child, block)
        result = msgspec.msgpack.decode(frame, type=Tokenized)
        if result.error:
            error = DataLoadingError(result.error, hint=result.hint)
            error.file_path = block.path
            raise error
        return result

    def _died(self, child: subprocess.Popen[bytes], block: Block | None) -> DataLoadingError:
        """`block`: what it was at; None when it had nothing to do."""
        code = child.wait(timeout=10)
        how = f"killed by signal {-code}" if code < 0 else f"exit {code}"
        return DataLoadingError(
            f"a worker died ({how})" + (f" at byte {block.start}" if block else ""),
            block.path if block else "",
            hint=f"{_OOM if code == -9 else ''}The same command continues where this one stopped.",
        )

    def close(self) -> None:
        """Ends every child: first by the end of its input, at the limit by force."""
        for child in self._children:
            _pipe(child.stdout).close()
            try:
                _pipe(child.stdin).close()
            except BrokenPipeError:
                pass
        for child in self._children:
            try:
                child.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(timeout=10)
        self._children.clear()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
