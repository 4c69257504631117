"""Text → token ids, by a tokenizer.json, a Hugging Face name, plain bytes, or any object with `encode`."""

from __future__ import annotations

import hashlib
import os
import socket
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from allranks.errors import DataLoadingError, MissingExtra, require

BYTES_EOS = 256
_BATCH = 64  # documents per call of the library: bounds the memory of its results
_EOS_NAMES = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "<|im_end|>", "[SEP]", "<EOS>")


@dataclass(frozen=True)
class TokenizerSpec:
    """What a worker needs to make the same tokenizer: `definition` is a tokenizer.json's text, "" for bytes."""

    name: str
    definition: str
    vocab_size: int
    eos_id: int | None = None  # appended to each document; None: nothing is

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.definition.encode()).hexdigest()[:16] if self.definition else "bytes"

    @property
    def token_bytes(self) -> int:
        """Bytes per stored token."""
        largest = max(self.vocab_size - 1, self.eos_id or 0)
        return 2 if largest < 1 << 16 else 4


def find_tokenizer(name: str, *, append_eos: bool = False, eos_id: int | None = None) -> TokenizerSpec:
    """Resolves "bytes", a path or a Hugging Face name; every failure names the fix."""
    if name == "bytes":
        eos = eos_id if eos_id is not None else (BYTES_EOS if append_eos else None)
        return TokenizerSpec("bytes", "", 257, eos)
    definition = _definition(name)
    tokenizers = require("tokenizers", feature="A tokenizer other than 'bytes'", extra="data")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises plain Exception
        raise DataLoadingError(f"not a tokenizer definition: {error}", name) from error
    if append_eos and eos_id is None:
        known = (tokenizer.token_to_id(word) for word in _EOS_NAMES)
        eos_id = next((number for number in known if number is not None), None)
        if eos_id is None:
            raise DataLoadingError(
                "the tokenizer has no end-of-text token that we know: give --eos-id N", name
            )
    return TokenizerSpec(name, definition, int(tokenizer.get_vocab_size(with_added_tokens=True)), eos_id)


def _definition(name: str) -> str:
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataLoadingError(f"cannot read the tokenizer: {error}", str(path)) from error
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataLoadingError("tokenizer file not found", name)
    return _from_hub(name)


def _from_hub(name: str) -> str:
    """From the local cache of the hub's library, else from the hub when it can be reached."""
    hint = "download its tokenizer.json where a network exists and give the path: --tokenizer tokenizer.json"
    try:
        hub = require("huggingface_hub", feature=f"The tokenizer name {name!r}", extra="data")
        try:
            return Path(hub.hf_hub_download(name, "tokenizer.json", local_files_only=True)).read_text()
        except (OSError, ValueError) as error:  # not in the cache
            _reachable(name, error, hint)
        return Path(hub.hf_hub_download(name, "tokenizer.json")).read_text()
    except DataLoadingError:
        raise
    except (OSError, ValueError, MissingExtra) as error:  # not found, gated, offline, no name of a model
        raise DataLoadingError(
            f"tokenizer {name!r} is neither a file nor a name on the Hugging Face hub: {error}", hint=hint
        ) from error


def _reachable(name: str, cause: Exception, hint: str) -> None:
    """Fails within seconds on a machine without a network, instead of after half a minute of retries."""
    where = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((where.hostname or "", where.port or 443), timeout=5.0).close()
    except OSError as error:
        raise DataLoadingError(
            f"tokenizer {name!r} is not a file, and the Hugging Face hub ({where.hostname}) "
            f"cannot be reached: {error}",
            hint=hint,
        ) from cause


class HasEncode(Protocol):
    """Any tokenizer that gives ids, or something with `.ids`."""

    def encode(self, text: str, /) -> Any: ...


Encode: TypeAlias = "Callable[[Sequence[str]], list[array[int]]]"


def make_encoder(spec: TokenizerSpec) -> Encode:
    """texts -> one array of ids each, of the width that the index stores."""
    code = "H" if spec.token_bytes == 2 else "I"
    tail = array(code, [spec.eos_id]) if spec.eos_id is not None else array(code)
    if not spec.definition:
        return lambda texts: [_bytes_of(text, code) + tail for text in texts]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one process per core is our parallelism
    tokenizer = require("tokenizers", feature="Tokenizing", extra="data").Tokenizer.from_str(spec.definition)
    tokenizer.no_truncation()  # a limit of the model must not lose text
    tokenizer.no_padding()
    batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def encode(texts: Sequence[str]) -> list[array[int]]:
        found: list[array[int]] = []
        for start in range(0, len(texts), _BATCH):
            found += [array(code, one.ids) + tail for one in batch(list(texts[start : start + _BATCH]))]
        return found

    return encode


def _bytes_of(text: str, code: str) -> array[int]:
    """One token per byte of UTF-8."""
    wide = np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2" if code == "H" else "<u4")
    return array(code, wide.tobytes())


def wrap_object(tokenizer: HasEncode, vocab_size: int | None = None) -> tuple[TokenizerSpec, Encode]:
    """Any object with `encode(text)` that returns ids or something with `.ids`; used in this process only."""
    size = vocab_size or getattr(tokenizer, "vocab_size", None)
    if not isinstance(size, int):
        get = getattr(tokenizer, "get_vocab_size", None)
        size = int(get()) if get else 1 << 31
    spec = TokenizerSpec(type(tokenizer).__name__, f"object:{type(tokenizer).__qualname__}", size)
    code = "H" if spec.token_bytes == 2 else "I"

    def encode(texts: Sequence[str]) -> list[array[int]]:
        found = [tokenizer.encode(text) for text in texts]
        return [array(code, getattr(one, "ids", one)) for one in found]

    return spec, encode
