"""Everything that reads bytes of others, against changed ones: a clear error or a result, soon, in bounded memory.

    python -m tests.soak.fuzz [--inputs 100000] [--only NAME] [--first NUMBER] [--keep benchmarks/results/fuzz.json]

Prints a table, and keeps its rows. A failure names the number of its input, which makes it again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from tests.box_files import box_bytes
from tests.load.test_blackbox import make_trace

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
from allranks.cli.doctor import _with_config
from allranks.doctor import DoctorOptions
from allranks.doctor.explain import explain, parse_line
from allranks.doctor.nodes import compare, read_answers
from allranks.drill.plan import read_plan
from allranks.elastic.config import check
from allranks.errors import AllranksError
from allranks.incidents.evidence import read_observed
from allranks.incidents.folder import read_incidents
from allranks.incidents.peers import pack_part, unpack_part
from allranks.lighthouse import messages
from allranks.lighthouse.grpc_wire import BadMessage, decode_quorum_request, encode_quorum_request
from allranks.lighthouse.http import _parse_head
from allranks.lighthouse.messages import decode, encode, plain_load
from allranks.load.loading import Reader
from allranks.load.sources import DumpSource, LoadOptions, Unreadable, is_tar, tar_members, zip_members
from allranks.model.cluster import Member, MemberLost, Quorum
from allranks.model.debug_options import read_debug_options
from allranks.model.stacks import Capture, ProcessCapture, Snapshot
from allranks.stacktraces.bundle import encode as encode_bundle
from allranks.stacktraces.bundle import read_capture
from allranks.stacktraces.debuggers import (
    parse_faulthandler,
    parse_gdb,
    parse_json,
    parse_kernels,
    parse_pystack,
    parse_text,
)
from allranks.stacktraces.raw_files import read_raw

MEMBER = Member("replica-0", "s", "node", "10.0.0.1:1", "10.0.0.1:2", 7, data='{"a": 1}')
CONFIG = (Path(__file__).parents[2] / "examples" / "job.yaml").read_bytes()
SECTIONS = re.findall(rb"(?m)^[a-z_]+:.*\n(?:[ #].*\n|\n)*", CONFIG)  # each by itself is read faster
MAX_S, MAX_MB = 5.0, 300
ADDRESSES = 8 << 30  # a reader that takes more fails there, before it takes the machine
HEADER = "| reader | inputs | refused | slowest | memory |\n|---|---:|---:|---:|---:|"


def read_frames(data: bytes) -> None:
    for kind, payload in take_frames(bytearray(data), 1 << 20):
        decode(kind, payload, 1 << 20)


def read_frames_without_msgspec(data: bytes) -> None:
    for _, payload in take_frames(bytearray(data), 1 << 20):
        plain_load(messages.Join, payload)
        read_object(JSON, payload)


def sealed(decode: Callable[[bytes, str], object]) -> Callable[[bytes], object]:
    """Sealed anew: what a checksum would refuse is looked into as well."""
    return lambda data: decode(_seal(data.decode("utf-8", "replace")), "somewhere")


def _body(sealed: bytes) -> bytes:
    return sealed.partition(b'"body": ')[2][:-2]


def read_log(data: bytes) -> None:
    lines = data.decode("utf-8", "replace").splitlines()
    explain(parse_line("log", number, line) for number, line in enumerate(lines))


def read_config(data: bytes) -> None:
    check(data.decode("utf-8", "replace") + "\n")


def read_stacks(data: bytes) -> None:
    """Whatever a tool printed."""
    for parse in (parse_text, parse_pystack, parse_faulthandler, parse_gdb, parse_kernels):
        parse(data.decode("utf-8", "replace"))


def read_pyspy_json(data: bytes) -> None:
    parse_json(data.decode("utf-8", "replace"))


def read_dump(data: bytes) -> None:
    """As `diagnose` reads a file: torch's pickles, JSON, black boxes, packed or not."""
    Reader(LoadOptions(max_file_bytes=8 << 20, max_box_bytes=8 << 20)).read_bytes("trace_0", data)


def read_tar(data: bytes) -> None:
    """As `diagnose` reads an archive; with its checksums made anew, too."""
    sealed = bytearray(data)
    for at in range(0, len(sealed) - 511, 512):
        if is_tar(sealed[at : at + 512]):
            sealed[at + 148 : at + 156] = b" " * 8
            sealed[at + 148 : at + 156] = b"%06o\0 " % sum(sealed[at : at + 512])
    for archive in (data, bytes(sealed)):
        for _ in tar_members(DumpSource("x.tar", "somewhere"), archive, 8 << 20):
            pass


def _tar() -> bytes:
    """With long names, a hole, links, and headers of both formats."""
    packed = io.BytesIO()
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(fileobj=packed, mode="w", format=kind) as archive:
            for number, more in enumerate(
                ({}, {"GNU.sparse.size": "5000", "GNU.sparse.map": "0,700"}, {"mtime": "1.5"})
            ):
                member = tarfile.TarInfo("folder/" * 20 + f"trace_{number}")
                member.size, member.pax_headers = 700, more
                archive.addfile(member, io.BytesIO(b"x" * 700))
            link = tarfile.TarInfo("link")
            link.type, link.linkname = tarfile.SYMTYPE, "trace_0"
            archive.addfile(link)
        packed.seek(-1024, io.SEEK_END)  # the next one follows where this one ends
    return packed.getvalue()


def read_zip(data: bytes) -> None:
    """As `diagnose` reads it."""
    for _ in zip_members(DumpSource("x.zip", "somewhere"), data, 8 << 20):
        pass


def _zip() -> bytes:
    """One member as it is, one packed."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            archive.writestr(f"folder/trace_{kind}", b"x" * 700, kind)
    return packed.getvalue()


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk would write each input out


def from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """For readers of a file of this name in a folder."""

    def write_and_read(data: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="allranks-fuzz-", dir=MEMORY) as folder:
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            read(path)

    return write_and_read


def read_evidence(data: bytes) -> None:
    """What another node sent for an incident."""
    with tempfile.TemporaryDirectory(prefix="allranks-fuzz-", dir=MEMORY) as folder:
        unpack_part(data, Path(folder), limit=1 << 20)


def read_doctor_answers(data: bytes) -> None:
    """Of several nodes, and what differs between them."""
    compare(read_answers(data.decode("utf-8", "replace").splitlines(), "stdin"))


def _evidence() -> bytes:
    with tempfile.TemporaryDirectory(prefix="allranks-fuzz-", dir=MEMORY) as made:
        folder = Path(made)
        for name, data in (("boxes/rank-0.box", bytes(range(256))), ("stacks/rank0.txt", PYSPY)):
            (folder / name).parent.mkdir()
            (folder / name).write_bytes(data)
        return pack_part(folder, ["rank 3: no answer"])


PART = Part(0, "rank-00000.index", 100, "0" * 64, 4096)
MANIFEST = encode_manifest(Manifest(7, 0, 1, 1.5, "attempt", (PART,), {"loss": 0.5}, job="job"))
INDEX = encode_index(
    Index(0, "crc32", (DataFile("rank-00000.safetensors", 4096, 100, "00000000"),), (), {}, {})
)
FRAMES = [{"name": "train", "filename": "train.py", "line": 10}]
DUMP = {
    "version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "pg_status": {},
    "entries": [
        {"frames": FRAMES, "record_id": i, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": i,
         "p2p_seq_id": 0, "op_id": i, "profiling_name": "nccl:all_reduce", "time_created_ns": 1_700_000_000_000_000_000 + i,
         "input_sizes": [[4, 4]], "input_dtypes": ["Float"], "output_sizes": [[4, 4]], "output_dtypes": ["Float"],
         "state": "scheduled", "is_p2p": False, "timeout_ms": 600000}
        for i in range(8)
    ],
}  # fmt: skip
PYSPY = b"""Process 7: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle+gil): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2501)
    main (train.py:90)
"""
FAULTHANDLER = b"""Thread 0x00007f1 (most recent call first):
  File "train.py", line 10 in step
  File "train.py", line 90 in main
"""
GDB = b"""Thread 1 (Thread 0x7f (LWP 7) "python"):
#0  0x00007f in futex_wait () from /lib/libc.so.6
#1  main () at main.c:3
"""
PYSPY_JSON = json.dumps(
    [{"thread_id": 7, "thread_name": "MainThread", "active": True, "owns_gil": True, "os_thread_id": 7,
      "frames": [{"name": "main", "filename": "train.py", "short_filename": "train.py", "line": 90}]}]
).encode()  # fmt: skip
BUNDLE = json.dumps(
    encode_bundle(
        Capture(
            (
                ProcessCapture(
                    rank=1, pid=7, host="a", snapshots=(Snapshot(0, 1.5, parse_text(PYSPY.decode())),)
                ),
            )
        )
    )
).encode()
INCIDENT = json.dumps(
    {"schema": 1, "incident": "20260101-000000", "kind": "hang", "opened": 1.5, "job": "j", "reason": "r",
     "verdict": {"ranks": [1], "sentence": "s"}}
).encode()  # fmt: skip
OBSERVED = b'{"reason": "silent", "quiet_s": 9.5, "marked": [0, 1], "told": {"cause": "rank_died", "ranks": [1], "sentence": "s"}}'
DOCTOR = b"\n".join(
    json.dumps({"facts": {"host": host, "torch": "2.9", "gpus": 8, "clock_offset_s": 0.1}}).encode()
    for host in "ab"
)
DEBUG = b"debug:\n  output_dir: logs/{job_id}\n  patterns: ['NCCL']\n  triggers: {at_seconds: [1, 60], rank_lost: true}\n"
DRILL = b"seed: 5\nfaults:\n  - {kind: kill, rank: 1, at_step: 12}\n  - {kind: hang, rank: 0, at_step: [1, 9], for_s: 2}\n"


@dataclass(frozen=True)
class Target:
    """A reader, good inputs of it, and the errors by which it may refuse."""

    read: Callable[[bytes], object]
    seeds: list[bytes]
    errors: tuple[type[Exception], ...] = (AllranksError,)


TARGETS = {
    "frames": Target(
        read_frames,
        [
            encode(messages.Hello(replica="a")) + encode(messages.Join(MEMBER)),
            encode(Quorum(3, 1, (MEMBER,))) + encode(MemberLost("a", "gone"), 5),
        ],
        (BadFrame,),
    ),
    "frames without msgspec": Target(read_frames_without_msgspec, [encode(messages.Join(MEMBER))], (BadFrame,)),
    "gRPC": Target(decode_quorum_request, [encode_quorum_request(MEMBER)], (BadMessage,)),
    "HTTP": Target(
        _parse_head,
        [b"GET /api/status?a=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 3", b"POST /%41 HTTP/1.1\r\nA: b"],
        (ValueError,),
    ),
    "manifest": Target(sealed(decode_manifest), [_body(MANIFEST)]),
    "index of a checkpoint": Target(sealed(decode_index), [_body(INDEX)]),
    "config": Target(read_config, [CONFIG, *SECTIONS]),
    "drill plan": Target(from_file("plan.yaml", read_plan), [DRILL]),
    "log": Target(
        read_log,
        [
            b"[rank3]: RuntimeError: NCCL communicator was aborted\n[default0]:CUDA out of memory. Tried\n" * 3,
            b"2024-01-01 12:00:00,000 ERROR x.py:3 Traceback (most recent call last):\n  File \"a\", line 3\n",
        ],
    ),
    "dump: pickle": Target(read_dump, [pickle.dumps(DUMP, 2), pickle.dumps(DUMP, 4)], (Unreadable,)),
    "dump: JSON": Target(read_dump, [json.dumps(DUMP).encode()], (Unreadable,)),
    "dump: gzip": Target(read_dump, [gzip.compress(json.dumps(DUMP).encode())], (Unreadable,)),
    "dump: tar": Target(read_tar, [_tar()]),
    "dump: zip": Target(read_zip, [_zip()]),
    "black box": Target(read_dump, [box_bytes(make_trace(count=9, first=3)), box_bytes(make_trace(count=2))], (Unreadable,)),
    "stacks as text": Target(read_stacks, [PYSPY, FAULTHANDLER, GDB]),
    "stacks of py-spy": Target(read_pyspy_json, [PYSPY_JSON], (ValueError, RecursionError)),
    "stacks bundle": Target(from_file("bundle.json", read_capture), [BUNDLE]),
    "debug section": Target(from_file("debug.yaml", read_debug_options), [DEBUG]),
    "doctor: job file": Target(from_file("job.yaml", lambda path: _with_config(DoctorOptions(), path)), SECTIONS),
    "doctor: answers of nodes": Target(read_doctor_answers, [DOCTOR, DOCTOR.splitlines()[0]]),
    "folder of stack files": Target(
        from_file("raw/rank0.pyspy.txt", lambda path: read_raw(path.parent)), [PYSPY, FAULTHANDLER, GDB]
    ),
    "evidence of a node": Target(read_evidence, [_evidence()]),
    "what an agent saw": Target(from_file("seen/observed.json", lambda path: read_observed(path.parent)), [OBSERVED]),
    "incident": Target(from_file("1/incident.json", lambda path: read_incidents(path.parents[1])), [INCIDENT]),
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


@dataclass
class Fuzzed:
    """What a target did with its inputs."""

    refused: int = 0
    slowest_s: float = 0.0
    grown_mb: int = 0
    failed: str = ""


def fuzz(name: str, count: int, first: int = 0) -> Fuzzed:
    """Reads so many changed inputs; ends with the first one that is neither read nor refused as it should be."""
    target, found = TARGETS[name], Fuzzed()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    for number in range(first, first + count):
        data = changed(number, target.seeds)
        began = time.process_time()  # a busy machine is not our fault
        try:
            target.read(data)
        except target.errors:
            found.refused += 1
        except Exception as error:
            found.failed = f"input {number}: {type(error).__name__}: {error}"
            break
        took = time.process_time() - began
        found.slowest_s = max(found.slowest_s, took)
        if took > MAX_S:
            found.failed = f"input {number} took {took:.1f} s"
            break
    found.grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - before
    if found.grown_mb > MAX_MB:
        found.failed = found.failed or f"memory grew by {found.grown_mb} MB"
    return found


def main() -> int:
    """Exit 0 when every target read or refused all its inputs, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="of each target (100000)")
    parser.add_argument("--only", action="append", choices=TARGETS, help="this target (repeatable)")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--keep", type=Path, help="a file of results, whose other rows stay")
    args = parser.parse_args()
    print(HEADER, flush=True)
    failed = 0
    for name in args.only or TARGETS:
        limit = (resource.RLIMIT_AS, (ADDRESSES, ADDRESSES))
        with multiprocessing.get_context("fork").Pool(1, resource.setrlimit, limit) as pool:
            found = pool.apply(fuzz, (name, args.inputs, args.first))
        row = f"{args.inputs:,} | {found.refused:,} | {found.slowest_s * 1000:.0f} ms | +{found.grown_mb} MB"
        row = f"| {name} | {row} |" + (f" FAILED: {found.failed}" if found.failed else "")
        print(row, flush=True)
        failed += bool(found.failed)
        if args.keep:
            before = json.loads(args.keep.read_text()) if args.keep.exists() else {}
            args.keep.write_text(json.dumps(with_row(before, name, found, args.inputs), indent=1) + "\n")
    return 1 if failed else 0


def with_row(kept: dict[str, Any], name: str, found: Fuzzed, inputs: int) -> dict[str, Any]:
    """The kept results with this reader's row; those of others stay, in the order of TARGETS."""
    row = {
        "inputs": inputs,
        "refused": found.refused,
        "slowest_ms": round(found.slowest_s * 1000),
        "memory_mb": found.grown_mb,
        "failed": found.failed,
    }
    rows = {**kept.get("numbers", {}), name: row}
    known = {each: rows[each] for each in TARGETS if each in rows}
    return {
        "command": "python -m tests.soak.fuzz",
        "date": str(date.today()),
        "name": "fuzz",
        "numbers": known,
    }


if __name__ == "__main__":
    sys.exit(main())
