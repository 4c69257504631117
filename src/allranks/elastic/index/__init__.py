"""The token index: text in, a memory-mapped store of tokens out. No torch.

allranks index build data/*.jsonl -o train.index --tokenizer tokenizer.json
index = TokenIndexFile("train.index")
index.total_tokens, index.tokens[:10], index.find_position(12345)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import allranks
from allranks.elastic.index.documents import (
    Document,
    Encoder,
    HasEncode,
    InputFile,
    find_encoder,
    read_documents,
    read_source,
    wrap_object,
)
from allranks.elastic.index.file import IndexHeader, IndexWriter, TokenIndexFile
from allranks.errors import AllranksError, DataLoadingError, InputError
from allranks.model.files import replacing

__all__ = ["BuildProgress", "BuildRequest", "IndexHeader", "TokenIndexFile", "build_index"]

#: Documents that are tokenized together: at most so many, and of so many characters.
_BATCH, _BATCH_CHARACTERS = 256, 1 << 20


@dataclass(frozen=True)
class BuildRequest:
    """What to build."""

    files: tuple[str, ...]
    output: str
    tokenizer: str = "bytes"
    text_key: str = "text"
    append_eos: bool = False
    eos_id: int | None = None
    skip_bad: bool = False
    force: bool = False


@dataclass(frozen=True)
class BuildProgress:
    """How far a build is; `bytes_done` of `bytes_total` input bytes."""

    bytes_done: int
    bytes_total: int
    tokens: int
    documents: int
    skipped: int
    elapsed_s: float


@dataclass(frozen=True)
class BuildResult:
    """`fresh` is False when the index was there already, built from the same input."""

    path: str
    header: IndexHeader
    progress: BuildProgress
    fresh: bool = True


def build_index(
    request: BuildRequest,
    progress: Callable[[BuildProgress], None] = lambda now: None,
    *,
    tokenizer: HasEncode | None = None,
) -> BuildResult:
    """Builds, or finds that nothing is to be done. `tokenizer` is an object with `encode`."""
    sources = [read_source(path) for path in request.files]
    if not sources:
        raise InputError("no input files")
    encoder = (
        wrap_object(tokenizer)
        if tokenizer is not None
        else find_encoder(request.tokenizer, append_eos=request.append_eos, eos_id=request.eos_id)
    )
    facts: dict[str, object] = {
        "files": [asdict(source) for source in sources],
        "tokenizer": {"name": encoder.name, "digest": encoder.digest, "vocab_size": encoder.vocab_size},
        "eos_id": encoder.eos_id,
        "text_key": request.text_key,
        "skip_bad": request.skip_bad,
    }
    output = Path(request.output)
    if output.exists() and not request.force:
        return _there_already(output, facts, sum(source.size for source in sources))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output) as draft:
            header, last = _write(request, draft, sources, encoder, facts, progress)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}") from error
    return BuildResult(str(output), header, last)


def _write(
    request: BuildRequest,
    draft: Path,
    sources: list[InputFile],
    encoder: Encoder,
    facts: dict[str, object],
    progress: Callable[[BuildProgress], None],
) -> tuple[IndexHeader, BuildProgress]:
    started, total = time.monotonic(), sum(source.size for source in sources)
    skipped = before = 0
    with draft.open("wb") as file:
        writer = IndexWriter(file, encoder.token_bytes)

        def reached(done: int) -> BuildProgress:
            elapsed_s = time.monotonic() - started
            return BuildProgress(done, total, writer.tokens, writer.documents, skipped, elapsed_s)

        for number, source in enumerate(sources):
            for batch in _batches(read_documents(source, request.text_key, request.skip_bad)):
                texts = [(document.text, document.place) for document in batch if document.text is not None]
                for ids, (_, place) in zip(encoder.encode([text for text, _ in texts]), texts, strict=True):
                    writer.append(ids, number, place)
                skipped += len(batch) - len(texts)
                progress(reached(before + batch[-1].bytes_done))
            before += source.size
            if read_source(source.path) != source:
                raise DataLoadingError("the file changed while it was read: build again", source.path)
        progress(reached(total))
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        made = {**facts, "allranks": allranks.__version__, "created": now}
        return writer.finish(made, len(sources)), reached(total)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text or "")
        if len(batch) == _BATCH or characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _there_already(output: Path, facts: dict[str, object], size: int) -> BuildResult:
    try:
        with TokenIndexFile(output) as index:
            same, header = {key: index.meta.get(key) for key in facts} == facts, index.header
    except AllranksError as error:
        raise InputError(
            f"{output} exists and is not a usable index ({error}); overwrite it with --force"
        ) from error
    if not same:
        raise InputError(f"{output} exists and was built from something else; overwrite it with --force")
    done = BuildProgress(size, size, header.total_tokens, header.num_documents, 0, 0.0)
    return BuildResult(str(output), header, done, fresh=False)
