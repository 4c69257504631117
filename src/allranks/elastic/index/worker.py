"""Tokenizes blocks: in this process, or in child processes that speak length-prefixed msgpack over pipes.

A child ends when its standard input does, so a builder killed with -9 leaves no orphan behind.
"""

from __future__ import annotations

import signal
import struct
import sys
from array import array
from typing import BinaryIO

import msgspec

from allranks.elastic.index.sources import Block, read_documents
from allranks.elastic.index.tokenize import Encode, TokenizerSpec, make_encoder
from allranks.errors import AllranksError


class Setup(msgspec.Struct, frozen=True):
    """What a worker is told once."""

    name: str
    definition: str
    vocab_size: int
    eos_id: int | None
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


def send(pipe: BinaryIO, payload: bytes) -> None:
    """One frame."""
    pipe.write(struct.pack("<Q", len(payload)))
    pipe.write(payload)
    pipe.flush()


def receive(pipe: BinaryIO) -> bytes | None:
    """One frame; None at the end of the stream."""
    head = pipe.read(8)
    if len(head) < 8:
        return None
    size = struct.unpack("<Q", head)[0]
    payload = pipe.read(size)
    return payload if len(payload) == size else None


def main() -> int:
    """The life of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the builder's business
    inbox, outbox = sys.stdin.buffer, sys.stdout.buffer
    first = receive(inbox)
    if first is None:
        return 0
    setup = msgspec.msgpack.decode(first, type=Setup)
    encode = make_encoder(TokenizerSpec(setup.name, setup.definition, setup.vocab_size, setup.eos_id))
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
