"""The token index: text in, a memory-mapped store of tokens out. No torch.

allranks index build data/*.jsonl -o train.index --tokenizer tokenizer.json
index = TokenIndexFile("train.index")
index.total_tokens, index.tokens[:10], index.find_position(12345)

This module builds: cut, tokenize in parallel, write in order. Interrupted, a build continues where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import allranks
from allranks.elastic.index.file import IndexHeader, IndexWriter, Position, TokenIndexFile
from allranks.elastic.index.sources import Block, InputFile, content_crc32, cut, read_source
from allranks.elastic.index.tokenize import (
    Encode,
    HasEncode,
    TokenizerSpec,
    find_tokenizer,
    make_encoder,
    wrap_object,
)
from allranks.elastic.index.workers import Setup, Tokenized, WorkerPool, tokenize
from allranks.errors import AllranksError, DataLoadingError, InputError

__all__ = ["BuildProgress", "BuildRequest", "IndexBuilder", "IndexHeader", "TokenIndexFile", "build_index"]

_LARGEST_BLOCK = 4 << 20
_SMALLEST_BLOCK = 64 << 10
_WORTH_A_PROCESS = 2 << 20  # input bytes below which child processes cost more than they give


@dataclass(frozen=True)
class BuildRequest:
    """What to build. `workers` None: one per core; 0: in this process."""

    files: tuple[str, ...]
    output: str
    tokenizer: str = "bytes"
    text_key: str = "text"
    append_eos: bool = False
    eos_id: int | None = None
    skip_bad: bool = False
    workers: int | None = None
    force: bool = False


@dataclass(frozen=True)
class BuildProgress:
    """How far a build is; `bytes_done` of `bytes_total` input bytes. `resumed_bytes` were done before."""

    bytes_done: int
    bytes_total: int
    tokens: int
    documents: int
    skipped: int
    elapsed_s: float
    resumed_bytes: int = 0


@dataclass(frozen=True)
class BuildResult:
    """`fresh` is False when the index was there already, built from the same input."""

    path: str
    header: IndexHeader
    progress: BuildProgress
    fresh: bool = True
    resumed: bool = False


def build_index(
    request: BuildRequest,
    progress: Callable[[BuildProgress], None] | None = None,
    *,
    tokenizer: HasEncode | None = None,
) -> BuildResult:
    """Builds, resumes, or finds that nothing is to be done. `tokenizer` is an object with `encode`."""
    sources = [read_source(path) for path in request.files]
    if not sources:
        raise InputError("no input files")
    if tokenizer is not None:
        spec, encode = wrap_object(tokenizer)
        return _Build(request, sources, spec, progress, encode).run()
    spec = find_tokenizer(request.tokenizer, append_eos=request.append_eos, eos_id=request.eos_id)
    return _Build(request, sources, spec, progress, None).run()


@dataclass
class _Build:
    """One run. `encode` is set when the tokenizer cannot leave this process."""

    request: BuildRequest
    sources: list[InputFile]
    spec: TokenizerSpec
    report: Callable[[BuildProgress], None] | None
    encode: Encode | None

    def run(self) -> BuildResult:
        started, report = time.monotonic(), self.report or (lambda now: None)
        output = Path(self.request.output)
        if output.exists() and not self.request.force:
            return self._there_already(output)
        writer = IndexWriter(output, self.spec.token_bytes, self._identity())
        writer.open()
        try:
            before = self._bytes_done(writer.position)
            done = before
            for block, result in self._results(writer.position):
                writer.append(
                    block.file, block.end, result.tokens, result.lengths, result.places, result.skipped
                )
                done = sum(source.size for source in self.sources[: block.file]) + block.progress
                report(_progress(writer.position, done, self._total, before, started))
            if done < self._total:  # trailing empty files
                report(_progress(writer.position, self._total, self._total, before, started))
            for source in self.sources:
                if read_source(source.path) != source:
                    raise DataLoadingError("the file changed while it was read: build again", source.path)
            header = writer.finish(self._meta(), len(self.sources))
        except OSError as error:
            raise InputError(
                f"cannot write {output}: {error.strerror or error}",
                hint="make room or choose another place; what is done is kept, the same command continues there",
            ) from error
        finally:
            writer.close()
        last = _progress(writer.position, self._total, self._total, before, started)
        return BuildResult(str(output), header, last, resumed=writer.resumed)

    @property
    def _total(self) -> int:
        return sum(source.size for source in self.sources)

    def _results(self, position: Position) -> Iterator[tuple[Block, Tokenized]]:
        left = self._total - self._bytes_done(position)
        wanted = self.request.workers if self.request.workers is not None else (os.cpu_count() or 1)
        blocks = self._blocks(position)
        key, skip = self.request.text_key, self.request.skip_bad
        small = self.request.workers is None and left < _WORTH_A_PROCESS
        if self.encode is not None or wanted == 0 or small:
            encode = self.encode or make_encoder(self.spec)
            for block in blocks:
                yield block, tokenize(block, encode, key, skip)
            return
        with WorkerPool(Setup(self.spec, key, skip), wanted) as pool:
            yield from pool.run(blocks)

    def _blocks(self, position: Position) -> Iterator[Block]:
        size = self._block_bytes
        for number in range(position.file, len(self.sources)):
            resume = position.resume if number == position.file else 0
            yield from cut(self.sources[number], number, size, resume)

    @property
    def _block_bytes(self) -> int:
        """A function of the input alone, so that a resumed build cuts as the first one did."""
        return max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, self._total // 64))

    def _bytes_done(self, position: Position) -> int:
        before = sum(source.size for source in self.sources[: position.file])
        source = self.sources[position.file]
        if source.kind == "parquet" or source.packing:
            return before  # not known in bytes of the file; a bar that starts low is no harm
        return before + min(position.resume, source.size)

    def _identity(self) -> dict[str, object]:
        """What makes two builds the same build."""
        spec = self.spec
        return {
            "files": [asdict(source) for source in self.sources],
            "tokenizer": {"name": spec.name, "digest": spec.digest, "vocab_size": spec.vocab_size},
            "eos_id": spec.eos_id,
            "text_key": self.request.text_key,
            "skip_bad": self.request.skip_bad,
            "block_bytes": self._block_bytes,
        }

    def _meta(self) -> dict[str, object]:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = [content_crc32(source.path) for source in self.sources]
        return {
            **self._identity(),
            "content_crc32": content,
            "allranks": allranks.__version__,
            "created": now,
        }

    def _there_already(self, output: Path) -> BuildResult:
        try:
            with TokenIndexFile(output) as index:
                meta, header = dict(index.meta), index.header
                content = meta.pop("content_crc32", None)
                meta = {key: value for key, value in meta.items() if key not in ("allranks", "created")}
        except AllranksError as error:
            raise InputError(
                f"{output} exists and is no usable index ({error}); overwrite it with --force"
            ) from error
        if meta != self._identity() and not self._only_touched(meta, content):
            raise InputError(f"{output} exists and was built from something else; overwrite it with --force")
        here = Position(tokens=header.total_tokens, documents=header.num_documents)
        done = _progress(here, self._total, self._total, self._total, time.monotonic())
        return BuildResult(str(output), header, done, fresh=False)

    def _only_touched(self, meta: dict[str, object], content: list[int] | None) -> bool:
        """Whether the files differ in nothing but their times: copied or touched, with the same bytes."""

        def timeless(identity: dict[str, Any]) -> dict[str, object]:
            files = [
                {k: v for k, v in file.items() if k != "modified_ns"} for file in identity.get("files", ())
            ]
            return {**identity, "files": files}

        if content is None or timeless(meta) != timeless(self._identity()):
            return False
        return content == [content_crc32(source.path) for source in self.sources]


def _progress(position: Position, done: int, total: int, before: int, started: float) -> BuildProgress:
    elapsed = time.monotonic() - started
    return BuildProgress(done, total, position.tokens, position.documents, position.skipped, elapsed, before)


class IndexBuilder:
    """The builder as an object, for tokenizers that are objects: `IndexBuilder(tok).build(files, path)`."""

    def __init__(self, tokenizer: HasEncode, entry_interval: int = 10_000, text_key: str = "text") -> None:
        self.tokenizer = tokenizer
        self.text_key = text_key
        self.entry_interval = entry_interval  # kept for callers; every document is indexed here

    def build(self, files: Sequence[str | Path], output: str | Path) -> IndexHeader:
        """Builds in this process and returns the header."""
        names = tuple(str(file) for file in files)
        request = BuildRequest(names, str(output), text_key=self.text_key, force=True)
        return build_index(request, tokenizer=self.tokenizer).header
