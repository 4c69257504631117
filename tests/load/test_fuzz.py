"""Every loader against broken and hostile bytes: no crash, no hang, no code, bounded memory.

Inputs are real files with bytes flipped, cut, repeated and spliced, and structures built at random. The default run
takes a slice; `--soak` takes more than a hundred thousand inputs. A failing input is found again by its seed.
"""

from __future__ import annotations

import gzip
import json
import pickle
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.box_files import box_bytes

from allranks.blackbox.layout import HEADER
from allranks.blackbox.reader import BytesFile, read_box
from allranks.blackbox.tables import Tables
from allranks.errors import InputError
from allranks.load.loading import Reader
from allranks.load.sources import LoadOptions, Unreadable
from allranks.load.unpickle import read_pickle
from allranks.model.trace import RankTrace

from .dumps import dump, entry, torch_pickle
from .test_blackbox import make_trace

CASES = Path(__file__).parent / "cases"
#: Limits that a small input must not come near: 64 MiB and 20 s are far beyond what an honest one takes.
MAX_BYTES, MAX_SECONDS = 64 << 20, 20.0
OPTIONS = LoadOptions(max_file_bytes=8 << 20, max_box_bytes=8 << 20)
#: Opcodes that matter, so that random bytes reach deep into the machine.
OPCODES = b"\x80\x02}](ueast0123cioRbPQNKMJLIGFUTXBCqrhj.\x81\x82\x83\x84\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x92\x93\x94\x95"


def _big_dump(write: Callable[[object], bytes]) -> bytes:
    """Large enough for the fast way."""
    frames = [{"name": f"f{i}", "filename": "a.py", "line": i} for i in range(5)]
    entries = [entry(i, i + 1, frames=frames, process_group=(str(i % 2), "x")) for i in range(150)]
    return write(dump(entries))


SEEDS: dict[str, list[bytes]] = {
    "pickle": [p.read_bytes() for p in sorted(CASES.glob("*/*/trace_[01]")) if p.read_bytes()[:1] == b"\x80"],
    "large pickle": [_big_dump(torch_pickle), _big_dump(pickle.dumps)],
    "json": [p.read_bytes() for p in sorted(CASES.glob("flight_recorder/missing_rank_json/*"))],
    "box": [box_bytes(make_trace(count=9, first=3)), box_bytes(make_trace(count=2))],
    "gzip": [gzip.compress(json.dumps(dump([entry(i) for i in range(4)])).encode())],
}


def mutate(chance: random.Random, data: bytes) -> bytes:
    """One to eight random changes."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        if not made:
            break
        at = chance.randrange(len(made))
        kind = chance.randrange(7)
        if kind == 0:
            made[at] = chance.randrange(256)
        elif kind == 1:
            made[at] = chance.choice(OPCODES)
        elif kind == 2:
            del made[at : at + chance.choice((1, 2, 4, 60))]
        elif kind == 3:
            made[at:at] = bytes(chance.choice(OPCODES) for _ in range(chance.choice((1, 3, 9))))
        elif kind == 4:
            made[at : at + 4] = chance.choice((b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0"))
        elif kind == 5:
            other = chance.randrange(len(made))
            made[at:at] = made[other : other + chance.choice((8, 100, 400))]
        else:
            del made[at:]
    return bytes(made)


def read_one(data: bytes) -> None:
    """Reads the bytes as a file's and checks what must hold of any result."""
    try:
        raw = Reader(OPTIONS).read_bytes("trace_0", data)
    except Unreadable:
        return
    check(raw)


def check(raw: RankTrace) -> None:
    """A trace can be walked without stepping out of its tables."""
    calls = raw.calls
    assert len(calls) == 0 or int(calls["group"].max()) < len(raw.groups)
    assert (np.diff(calls["begin"].astype(np.int64)) >= 0).all()
    raw.last_event_ns()


class _Ran(BaseException):
    """Something from the input was called."""


_watch: set[str] = set()
_CALLS = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "pickle.find_class",
)


def _hook(event: str, args: tuple[Any, ...]) -> None:
    """Raises when a watched event happens while files are read. An audit hook cannot be taken away again."""
    if _watch and event in _CALLS:
        raise _Ran(event, args)


sys.addaudithook(_hook)


def fuzz(kind: str, count: int, seed: int) -> None:
    """Reads `count` mutated inputs under a memory meter and a watch for code that runs."""
    seeds = SEEDS[kind]
    _watch.add(kind)
    tracemalloc.start()
    began = time.process_time()
    try:
        for number in range(count):
            chance = random.Random(f"{kind} {seed} {number}")
            read_one(mutate(chance, chance.choice(seeds)))
            if number % 200 == 0:
                peak = tracemalloc.get_traced_memory()[1]
                assert peak < MAX_BYTES, f"{kind} {seed} {number}: {peak} bytes"
                tracemalloc.reset_peak()
    finally:
        _watch.clear()
        tracemalloc.stop()
    assert time.process_time() - began < MAX_SECONDS + count * 0.2  # of CPU: others may use the machine


@pytest.mark.parametrize("kind", sorted(SEEDS))
def test_mutated_files_are_read_or_refused(kind: str) -> None:
    """A slice of the soak run."""
    fuzz(kind, 400 if kind != "large pickle" else 120, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", sorted(SEEDS))
def test_a_hundred_thousand_mutated_files_are_read_or_refused(kind: str, seed: int) -> None:
    """Five kinds of file, four seeds each: 104,000 inputs."""
    fuzz(kind, 6000 if kind != "large pickle" else 2000, seed=100 + seed)


def test_what_black_boxes_share_changes_nothing() -> None:
    """Read one after the other, with what earlier ones taught, they are what each is by itself."""
    together, read = Reader(OPTIONS), 0
    for number in range(400):
        chance = random.Random(f"shared {number}")
        data = chance.choice(SEEDS["box"])
        data = mutate(chance, data) if number % 3 else data
        answers = [_told(reader, data) for reader in (together, Reader(OPTIONS))]
        assert answers[0] == answers[1], number
        read += not isinstance(answers[0], str)
    assert read > 100


def _told(reader: Reader, data: bytes) -> object:
    """What a box says, in words instead of numbers; the note when it cannot be read."""
    try:
        raw = reader.read_bytes("x.box", data)
    except Unreadable as error:
        return str(error)
    tables, calls = reader.tables, raw.calls
    words = [
        [table[number] for number in calls[column].tolist()]
        for column, table in (("op", tables.names), ("label", tables.names), ("shapes", tables.shapes),
                              ("stack", tables.stacks), ("group", raw.groups))
    ]  # fmt: skip
    return raw.header, raw.progress, raw.groups, raw.notes, words


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    """With and without the first bytes of each format."""
    for start in (
        b"",
        b"\x80\x02",
        b"\x80\x04\x95",
        b"ALLRANKS\x01\0\0\0\x90\0\0\0",
        b"{",
        b"\x1f\x8b\x08\0",
        b"\x28\xb5\x2f\xfd",
    ):
        read_one(start + data)


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from([bytes((c,)) for c in OPCODES] + [b"X\x01\0\0\0a", b"K\x05", b"q\x01", b"h\x01"]),
        max_size=60,
    )
)
def test_random_opcodes_never_leave_plain_data(pieces: list[bytes]) -> None:
    """Whatever the opcodes say, only plain values and refusals come out."""
    value = read_pickle(b"\x80\x02" + b"".join(pieces)).value
    assert type(value).__name__ in (
        "dict", "list", "tuple", "str", "bytes", "int", "float", "bool", "NoneType", "_Refused", "object"
    )  # fmt: skip


_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_KEYS = sorted(entry(0))


@settings(max_examples=200)
@given(st.lists(st.dictionaries(st.sampled_from(_KEYS), _plain, max_size=6), max_size=5), _plain, _plain)
def test_any_values_under_the_right_keys_are_survived(
    changes: list[dict[str, Any]], config: Any, status: Any
) -> None:
    """As pickle and as JSON."""
    content = dump(
        [entry(i, **change) for i, change in enumerate(changes)], pg_config=config, pg_status=status
    )
    read_one(pickle.dumps(content, 2))
    read_one(json.dumps(content).encode())


@settings(max_examples=200)
@given(
    st.sampled_from([name for name in HEADER.names or () if name not in ("magic", "closed")]),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.integers(0, 3000),
    st.binary(max_size=40),
)
def test_any_header_and_any_row_is_survived(field: str, value: int, at: int, noise: bytes) -> None:
    """One field of the header and some bytes behind it are whatever they are."""
    data = bytearray(box_bytes(make_trace(count=9)))
    head = np.frombuffer(data, HEADER, 1)
    with np.errstate(all="ignore"):
        head[field] = np.array(value, np.int64).astype(head.dtype[field])
    del head
    data[4096 + at : 4096 + at + len(noise)] = noise
    try:
        check(read_box(BytesFile(bytes(data)), Tables(), 1 << 20))
    except InputError:
        pass
