"""Everything that reads bytes of others, against changed ones: a clear error or a result, soon, in bounded memory.

A slice by default; 100,000 inputs per reader with --soak. A failure names the number of its input, which makes it again.
(The loaders of dumps and black boxes: tests/load/test_fuzz.py.)
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from allranks.channel.frames import JSON, BadFrame, read_object, take_frames
from allranks.checkpoint.manifest import (
    DataFile,
    Index,
    Manifest,
    Part,
    _seal,
    decode_index,
    decode_manifest,
    encode_index,
    encode_manifest,
)
from allranks.doctor.explain import explain, parse_line
from allranks.elastic.config.check import check
from allranks.errors import AllranksError
from allranks.lighthouse import messages
from allranks.lighthouse.codec import decode, encode, plain_load
from allranks.lighthouse.grpc_wire import BadMessage, decode_quorum_request, encode_quorum_request
from allranks.lighthouse.http import _parse_head
from allranks.model.cluster import Member, MemberLost, Quorum

MEMBER = Member("replica-0", "s", "node", "10.0.0.1:1", "10.0.0.1:2", 7, data='{"a": 1}')
CONFIG = (Path(__file__).parents[2] / "examples" / "job.yaml").read_bytes()
MAX_S, MAX_MB = 5.0, 300
SLICE, ALL = 300, 100_000


def read_frames(data: bytes) -> None:
    for kind, payload in take_frames(bytearray(data), 1 << 20):
        decode(kind, payload, 1 << 20)


def read_frames_without_msgspec(data: bytes) -> None:
    for _, payload in take_frames(bytearray(data), 1 << 20):
        plain_load(messages.Join, payload)
        read_object(JSON, payload)


def read_sealed(data: bytes) -> None:
    """Sealed anew: what a checksum would refuse is looked into as well."""
    sealed = _seal(data.decode("utf-8", "replace"))
    with suppress(AllranksError):
        decode_manifest(sealed, "somewhere")
    decode_index(sealed, "somewhere")


def _body(sealed: bytes) -> bytes:
    return sealed.partition(b'"body": ')[2][:-2]


def read_log(data: bytes) -> None:
    lines = data.decode("utf-8", "replace").splitlines()
    explain(parse_line("log", number, line) for number, line in enumerate(lines))


def read_config(data: bytes) -> None:
    check(data.decode("utf-8", "replace") + "\n")


PART = Part(0, "rank-00000.index", 100, "0" * 64, 4096, ("older/rank-00000.safetensors",))
MANIFEST = encode_manifest(Manifest(7, 0, 1, 1.5, "attempt", (PART,), {"loss": 0.5}, job="job"))
INDEX = encode_index(
    Index(0, "crc32", (DataFile("rank-00000.safetensors", 4096, 100, "00000000"),), (), {}, [])
)
READERS: dict[str, tuple[Callable[[bytes], object], list[bytes], tuple[type[Exception], ...]]] = {
    "frames": (
        read_frames,
        [
            encode(messages.Hello(replica="a")) + encode(messages.Join(MEMBER)),
            encode(Quorum(3, 1, (MEMBER,))) + encode(MemberLost("a", "gone"), 5),
        ],
        (BadFrame,),
    ),
    "frames without msgspec": (read_frames_without_msgspec, [encode(messages.Join(MEMBER))], (BadFrame,)),
    "gRPC": (decode_quorum_request, [encode_quorum_request(MEMBER)], (BadMessage,)),
    "HTTP": (
        _parse_head,
        [b"GET /api/status?a=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 3", b"POST /%41 HTTP/1.1\r\nA: b"],
        (ValueError,),
    ),
    "manifest": (read_sealed, [_body(MANIFEST), _body(INDEX)], (AllranksError,)),
    "config": (read_config, [CONFIG], (AllranksError,)),
    "log": (
        read_log,
        [
            b"[rank3]: RuntimeError: NCCL communicator was aborted\n[default0]:CUDA out of memory. Tried\n" * 3,
            b"2024-01-01 12:00:00,000 ERROR x.py:3 Traceback (most recent call last):\n  File \"a\", line 3\n",
        ],
        (AllranksError,),
    ),
}  # fmt: skip


def changed(number: int, seeds: list[bytes]) -> bytes:
    """The input of this number."""
    chance = random.Random(number)
    made = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(len(made) + 1)
        kind = chance.randrange(5)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del made[at : at + chance.randrange(1, 20)]
        elif kind == 2:
            made[at:at] = chance.choice(
                (b"\0", b"\xff" * 4, b"[" * 500, b'{"a":' * 300, b"\r\n", b"-1", b"9" * 30)
            )
        elif kind == 3:
            made[at:at] = made[: chance.randrange(len(made) + 1)]
        else:
            del made[at:]
    return bytes(made)


@pytest.fixture(params=sorted(READERS))
def reader(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each one of them."""
    yield request.param


def run(name: str, count: int, first: int = 0) -> None:
    """Reads so many changed inputs."""
    read, seeds, errors = READERS[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    for number in range(first, first + count):
        data = changed(number, seeds)
        began = time.process_time()  # a busy machine is not our fault
        try:
            read(data)
        except errors:
            pass
        except Exception as error:
            raise AssertionError(f"{name}, input {number}: {type(error).__name__}: {error}") from error
        took = time.process_time() - began
        assert took < MAX_S, f"{name}, input {number} took {took:.1f} s"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - before
    assert grown < MAX_MB, f"{name}: {grown} MB"


def test_changed_bytes_are_refused_or_read(reader: str) -> None:
    run(reader, SLICE)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_changed_inputs(reader: str) -> None:
    run(reader, ALL)
