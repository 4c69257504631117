"""Runs blocks through workers and gives their results back in order, with a bounded number under way."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from allranks.elastic.index.sources import Block
from allranks.elastic.index.tokenize import Encode
from allranks.elastic.index.worker import Setup, Tokenized, receive, send, tokenize
from allranks.errors import DataLoadingError

_WORKER = "import sys; from allranks.elastic.index.worker import main; sys.exit(main())"
_OOM = "Signal 9 is often the OOM killer: use fewer --workers. "


def run_here(
    blocks: Iterable[Block], encode: Encode, text_key: str, skip_bad: bool
) -> Iterator[tuple[Block, Tokenized]]:
    """Without child processes: for small inputs, and for tokenizers that exist only as objects."""
    for block in blocks:
        yield block, tokenize(block, encode, text_key, skip_bad)


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
                    self._give(child, task[1])
                while next_out in done:
                    yield done.pop(next_out)
                    next_out += 1
                if not at_work:
                    if exhausted and not done:
                        return
                    continue
                for key, _ in waiting.select(timeout=60.0):
                    child = key.data
                    number, block = at_work.pop(child.pid)
                    done[number] = block, self._take(child, block)
                    idle.append(child)

    def _give(self, child: subprocess.Popen[bytes], block: Block) -> None:
        try:
            send(_pipe(child.stdin), msgspec.msgpack.encode(block))
        except BrokenPipeError:
            raise self._died(child, block) from None

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

    def _died(self, child: subprocess.Popen[bytes], block: Block) -> DataLoadingError:
        code = child.wait(timeout=10)
        how = f"killed by signal {-code}" if code < 0 else f"exit {code}"
        return DataLoadingError(
            f"a worker died ({how}) at byte {block.start}",
            block.path,
            hint=f"{_OOM if code == -9 else ''}The same command goes on where this one stopped.",
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


def _pipe(pipe: IO[bytes] | None) -> Any:
    assert pipe is not None
    return pipe
