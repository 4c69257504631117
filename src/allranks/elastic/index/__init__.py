"""Builds token indexes: memory-mapped files of tokens. No torch.

allranks index build data/*.jsonl -o train.index --tokenizer tokenizer.json
index = TokenIndexFile("train.index")
index.total_tokens, index.tokens[:10], index.find_position(12345)
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

import allranks
from allranks.elastic.index.file import Array, IndexHeader, IndexWriter, TokenIndexFile
from allranks.errors import AllranksError, DataLoadingError, InputError, MissingExtra, require
from allranks.model.files import replacing

__all__ = ["BuildProgress", "BuildRequest", "IndexHeader", "TokenIndexFile", "build_index"]

_BATCH, _BATCH_CHARACTERS = 256, 1 << 20  # limits for documents that are tokenized together


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
    """Progress of a build, in input bytes."""

    bytes_done: int
    bytes_total: int
    tokens: int
    documents: int
    skipped: int
    elapsed_s: float


@dataclass(frozen=True)
class BuildResult:
    """`fresh` is False if an index of the same input already existed."""

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
    """Builds an index unless one of the same input exists. `tokenizer` is an object with `encode`."""
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
        return _existing_index(output, facts, sum(source.size for source in sources))
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
                raise DataLoadingError(
                    "the file changed while it was read: build the index again", source.path
                )
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


def _existing_index(output: Path, facts: dict[str, object], size: int) -> BuildResult:
    try:
        with TokenIndexFile(output) as index:
            same, header = {key: index.meta.get(key) for key in facts} == facts, index.header
    except AllranksError as error:
        raise InputError(
            f"{output} exists, but is not a usable index ({error}); overwrite it with --force"
        ) from error
    if not same:
        raise InputError(f"{output} exists, but was built from other input; overwrite it with --force")
    done = BuildProgress(size, size, header.total_tokens, header.num_documents, 0, 0.0)
    return BuildResult(str(output), header, done, fresh=False)


@dataclass(frozen=True)
class InputFile:
    """One input file; its suffix determines its kind."""

    path: str
    kind: str  # "jsonl" | "text" | "parquet"
    packing: str  # "" | "gz" | "zst"
    size: int
    modified_ns: int


class Document(NamedTuple):
    """`text` None: an invalid record. `place`: the offset in the uncompressed text, or the row."""

    text: str | None
    place: int
    bytes_done: int  # of the file on disk


_KINDS = dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl") | dict.fromkeys((".txt", ".text"), "text")
_KINDS[".parquet"] = "parquet"
_PACKINGS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}


def read_source(path: str) -> InputFile:
    """Kind, size and modification time of an input file."""
    where = Path(path)
    try:
        stat = where.stat()
    except OSError as error:
        raise DataLoadingError(error.strerror or str(error), path) from error
    if where.is_dir():
        raise DataLoadingError("this is a folder: name its files, for example with a pattern", path)
    *before, last = ["", *(suffix.lower() for suffix in where.suffixes)]
    packing = _PACKINGS.get(last, "")
    kind = _KINDS.get(before[-1] if packing and before else last)
    if kind is None or (kind == "parquet" and packing):
        known = ", ".join(sorted(_KINDS))
        raise InputError(f"{path}: unknown file type; supported are {known}, and text types with .gz or .zst")
    return InputFile(path, kind, packing, stat.st_size, stat.st_mtime_ns)


def read_documents(source: InputFile, text_key: str, skip_bad: bool) -> Iterator[Document]:
    """Every document of a file, in order."""
    if source.kind == "parquet":
        yield from _rows(source, text_key)
        return
    # decodes the wanted field of a record only
    record = msgspec.defstruct("Record", [("text", str)], rename={"text": text_key})
    decode = msgspec.json.Decoder(record).decode
    place = 0
    for line, done in _lines(source):
        here, place = place, place + len(line)
        if here == 0 and line.startswith(codecs.BOM_UTF8):
            line, here = line[len(codecs.BOM_UTF8) :], len(codecs.BOM_UTF8)
        line = line.strip(b"\r\n") if source.kind == "text" else line.strip()
        if not line:
            continue
        try:
            text = decode(line).text if source.kind == "jsonl" else line.decode()  # type: ignore[attr-defined]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not skip_bad:
                raise _bad_record(source.path, line, text_key, here, error) from None
            text = None
        yield Document(text, here, done)


def _lines(source: InputFile) -> Iterator[tuple[bytes, int]]:
    """(line, bytes of the file read so far)."""
    problems: tuple[type[Exception], ...] = (OSError, EOFError)
    done = 0
    try:
        with open(source.path, "rb") as raw:
            stream: Any = raw
            if source.packing == "gz":
                stream = gzip.GzipFile(fileobj=raw)
            elif source.packing:
                zstandard = require("zstandard", feature="Reading .zst files", extra="data")
                problems = (*problems, zstandard.ZstdError)
                unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
                stream = io.BufferedReader(unpacker.stream_reader(raw, read_across_frames=True), 1 << 20)
            for line in stream:
                done += len(line)
                yield line, raw.tell() if source.packing else done
    except problems as error:
        what = f"cannot decompress after {done} bytes of text: {error}" if source.packing else str(error)
        raise DataLoadingError(what, source.path) from error


def _rows(source: InputFile, text_key: str) -> Iterator[Document]:
    require("pyarrow", feature="Reading Parquet", extra="data")
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(source.path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataLoadingError(f"not a Parquet file: {error}", source.path) from error
    if text_key not in file.schema_arrow.names:
        raise _wrong_key(source.path, text_key, file.schema_arrow.names)
    row, groups = 0, file.metadata.num_row_groups
    for group in range(groups):
        done = source.size * (group + 1) // groups
        for text in file.read_row_group(group, columns=[text_key]).column(0).to_pylist():
            if text is not None and not isinstance(text, str):
                what = f"column {text_key!r} holds {type(text).__name__}, not text"
                raise DataLoadingError(what, source.path)
            yield Document(text, row, done)
            row += 1


def _bad_record(path: str, line: bytes, text_key: str, place: int, error: Exception) -> DataLoadingError:
    """The error for an invalid record."""
    hint = "one JSON object per line is expected: fix the record, or skip invalid records with --skip-bad"
    what = f"the line at byte {place} is not {'UTF-8 text' if isinstance(error, UnicodeDecodeError) else 'valid JSON'}: {error}"
    if isinstance(error, msgspec.ValidationError):
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError:
            record = None
        if isinstance(record, dict) and text_key not in record:
            return _wrong_key(path, text_key, list(record))
        what = f"the record at byte {place} is not a JSON object"
        if isinstance(record, dict):
            what = (
                f"the record at byte {place} has {type(record[text_key]).__name__} in '{text_key}', not text"
            )
    return DataLoadingError(what, path, hint=hint)


def _wrong_key(path: str, text_key: str, keys: list[str]) -> DataLoadingError:
    usual = ("text", "content", "body", "document", "raw_content", *keys, "KEY")
    choice = next(key for key in usual if key in keys or key == "KEY")
    return DataLoadingError(
        f"KeyError: '{text_key}'; the record has the keys {keys}",
        path,
        hint=f'name the key that holds the text: --text-key {choice} (in a job file: data.text_key: "{choice}")',
    )


BYTES_EOS = 256
_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]", "<EOS>")


class HasEncode(Protocol):
    """A tokenizer whose `encode` returns ids, or an object with `.ids`."""

    def encode(self, text: str, /) -> Any: ...


@dataclass(frozen=True)
class Encoder:
    """`encode` converts texts to arrays of ids, with the item size of the index."""

    name: str
    digest: str
    vocab_size: int
    eos_id: int | None  # appended to each document, unless None
    ids: Callable[[Sequence[str]], Sequence[Any]]

    @property
    def token_bytes(self) -> int:
        return 2 if max(self.vocab_size - 1, self.eos_id or 0) < 1 << 16 else 4

    def encode(self, texts: Sequence[str]) -> list[Array]:
        kind = np.dtype(f"<u{self.token_bytes}")
        found = [np.asarray(ids, kind) for ids in self.ids(texts)]
        return found if self.eos_id is None else [np.append(ids, kind.type(self.eos_id)) for ids in found]


def find_encoder(name: str, *, append_eos: bool = False, eos_id: int | None = None) -> Encoder:
    """Resolves "bytes", the path of a tokenizer.json, or a Hugging Face name."""
    if name == "bytes":
        eos = eos_id if eos_id is not None else (BYTES_EOS if append_eos else None)
        return Encoder(name, "bytes", 257, eos, _bytes_of)
    definition = _definition(name)
    tokenizers = require("tokenizers", feature="A tokenizer other than 'bytes'", extra="data")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises plain Exception
        raise DataLoadingError(f"not a tokenizer definition: {error}", name) from error
    tokenizer.no_truncation()  # the model's limit must not truncate documents
    tokenizer.no_padding()
    if append_eos and eos_id is None:
        known = (tokenizer.token_to_id(word) for word in _EOS_NAMES)
        eos_id = next((number for number in known if number is not None), None)
        if eos_id is None:
            raise DataLoadingError("the tokenizer has no common end-of-text token: give --eos-id N", name)
    batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # uses all cores
    size = int(tokenizer.get_vocab_size(with_added_tokens=True))
    digest = hashlib.sha256(definition.encode()).hexdigest()[:16]
    return Encoder(name, digest, size, eos_id, lambda texts: [one.ids for one in batch(list(texts))])


def _bytes_of(texts: Sequence[str]) -> list[Array]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def wrap_object(tokenizer: HasEncode) -> Encoder:
    """An Encoder for a tokenizer object."""
    size, kind = getattr(tokenizer, "vocab_size", None), type(tokenizer).__qualname__
    if not isinstance(size, int):
        get = getattr(tokenizer, "get_vocab_size", None)
        size = int(get()) if get else 1 << 31

    def ids(texts: Sequence[str]) -> list[Sequence[int]]:
        return [getattr(one, "ids", one) for one in map(tokenizer.encode, texts)]

    return Encoder(kind, f"object:{kind}", size, None, ids)


def _definition(name: str) -> str:
    """The text of a tokenizer.json."""
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    hint = "without network access, download its tokenizer.json elsewhere and give the path: --tokenizer tokenizer.json"
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise DataLoadingError("tokenizer file not found", name)
        hub = require("huggingface_hub", feature=f"The tokenizer name {name!r}", extra="data")
        return Path(hub.hf_hub_download(name, "tokenizer.json", etag_timeout=5)).read_text(encoding="utf-8")
    except (OSError, ValueError, MissingExtra) as error:  # not found, gated, offline, or not a model name
        what = f"tokenizer {name!r} is neither a file nor a name on the Hugging Face hub: {error}"
        raise DataLoadingError(what, hint=hint) from error
