"""Dumps of an imagined training job, byte for byte as torch and our recorder would write them.

TP × DP × PP groups, eight frames per call, a ring that has wrapped, and one rank that stops entering collectives:
the ranks around it get stuck one group after the other. Used by diagnose.py.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from allranks.blackbox.header import HEADER_BYTES, MAGIC, VERSION
from allranks.blackbox.layout import HEADER, Item, packed_ranks
from allranks.model.trace import CALL, Flag, State

START_NS = 1_794_700_000_000_000_000
STEP_NS, CALL_NS = 900_000_000, 20_000_000
FIRST_STEP = 1500


@dataclass(frozen=True)
class Site:
    """A line of the training program that calls a collective."""

    kind: str  # "tp", "dp", "pp" or "world"
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: str
    frames: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class Job:
    """A job and its fault. `guilty` never enters call `missed` of its last step."""

    world: int
    tp: int
    pp: int
    entries: int
    guilty: int
    missed: int = 12
    sites: tuple[Site, ...] = ()

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp)

    def group_number(self, kind: str, rank: int) -> int:
        """Which of the groups of a kind the rank belongs to. Ranks count tp first, then dp, then pp."""
        tp, dp, pp = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
        return {"world": 0, "tp": rank // self.tp, "dp": pp * self.tp + tp, "pp": dp * self.tp + tp}[kind]

    def group(self, kind: str, rank: int) -> tuple[str, str, tuple[int, ...]]:
        """(name, description, members) of the rank's group of a kind."""
        return _group(self, kind, self.group_number(kind, rank))

    def groups(self, kind: str) -> list[tuple[int, ...]]:
        """The members of all groups of a kind."""
        sizes = {"world": self.world, "tp": self.tp, "dp": self.dp, "pp": self.pp}
        return [_group(self, kind, number)[2] for number in range(self.world // sizes[kind])]


@cache
def _group(job: Job, kind: str, number: int) -> tuple[str, str, tuple[int, ...]]:
    tp_groups, dp_groups = job.world // job.tp, job.pp * job.tp
    if kind == "world":
        return "0", "default_pg", tuple(range(job.world))
    if kind == "tp":
        return f"{1 + number}", f"tp_{number}", tuple(range(number * job.tp, (number + 1) * job.tp))
    if kind == "dp":
        pp, tp = divmod(number, job.tp)
        first = pp * job.tp * job.dp + tp
        return f"{1 + tp_groups + number}", f"dp_{number}", tuple(first + job.tp * i for i in range(job.dp))
    stride = job.tp * job.dp
    members = tuple(number + stride * i for i in range(job.pp))
    return f"{1 + tp_groups + dp_groups + number}", f"pp_{number}", members


def make_job(world: int, entries: int = 2000) -> Job:
    """A job of `world` ranks: tensor parallel 8, pipeline 4 where it fits, the rest data parallel."""
    tp = min(8, world)
    pp = 4 if world >= 64 else 1
    return Job(world, tp, pp, entries, guilty=(world * 5) // 8 + 2, sites=_sites())


def _sites() -> tuple[Site, ...]:
    """Four layers forward and backward with two tensor-parallel calls each, then gradients, norm and loss."""
    sites = []
    torch = "/opt/venv/lib/python3.12/site-packages/torch"
    tail = (
        ("_call_impl", f"{torch}/nn/modules/module.py", 1786),
        ("train_step", "/workspace/job/train.py", 212),
        ("main", "/workspace/job/train.py", 340),
        ("<module>", "/workspace/job/train.py", 371),
    )
    head = (
        ("all_reduce", f"{torch}/distributed/distributed_c10d.py", 3068),
        ("wrapper", f"{torch}/distributed/c10d_logger.py", 83),
    )
    for layer in range(4):
        for part, line in (("attention", 88), ("mlp", 131)):
            for way, shift in (("forward", 0), ("backward", 40)):
                own = (
                    (way, f"/workspace/job/{part}.py", line + shift),
                    (f"layer_{layer}", "/workspace/job/model.py", 40 + layer),
                )
                size = (4, 2048, 4096 if part == "mlp" else 1024)
                sites.append(Site("tp", "all_reduce", size, size, "BFloat16", head + own + tail))
    for bucket in range(6):
        own = (
            ("reduce_bucket", "/workspace/job/zero.py", 210 + bucket),
            ("finish", "/workspace/job/zero.py", 300),
        )
        size = (1 << 20 + bucket % 3,)
        sites.append(Site("dp", "all_reduce", size, size, "Float", head + own + tail))
    own = (
        ("tie_embeddings", "/workspace/job/pipeline.py", 77),
        ("finish", "/workspace/job/pipeline.py", 120),
    )
    sites.append(Site("pp", "all_reduce", (32000, 1024), (32000, 1024), "Float", head + own + tail))
    own = (("grad_norm", "/workspace/job/optim.py", 51), ("step", "/workspace/job/optim.py", 66))
    sites.append(Site("world", "all_reduce", (1,), (1,), "Float", head + own + tail))
    return tuple(sites)


def how_far(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """(calls entered in the last step, calls completed in the last step), per rank."""
    entered = np.full(job.world, -1)
    done = np.zeros(job.world, int)
    stuck = np.zeros(job.world, bool)
    for index, site in enumerate(job.sites):
        enters = ~stuck
        if index >= job.missed:
            enters[job.guilty] = False
        entered[enters] = index + 1
        if index == 0:
            entered[~enters] = 0
        for members in job.groups(site.kind):
            inside = np.array(members)
            if enters[inside].all():
                done[inside] = index + 1
            else:
                stuck[inside[enters[inside]]] = True
        stuck[job.guilty] |= index >= job.missed
    return entered, done


@dataclass
class TorchPickler:
    """Writes what torch::jit::Pickler writes: text and frames through the memo, lists as they are."""

    out: bytearray = field(default_factory=lambda: bytearray(b"\x80\x02"))
    memo: dict[object, int] = field(default_factory=dict)

    def _put(self, key: object) -> None:
        number = self.memo[key] = len(self.memo)
        self.out += b"q" + bytes((number,)) if number < 256 else b"r" + struct.pack("<I", number)

    def _get(self, key: object) -> bool:
        number = self.memo.get(key)
        if number is None:
            return False
        self.out += b"h" + bytes((number,)) if number < 256 else b"j" + struct.pack("<I", number)
        return True

    def text(self, text: str) -> None:
        if not self._get(text):
            data = text.encode()
            self.out += b"X" + struct.pack("<I", len(data)) + data
            self._put(text)

    def number(self, value: int | None) -> None:
        self.out += packed_number(value)

    def frame(self, frame: tuple[str, str, int]) -> None:
        if self._get(frame):
            return
        self.out += b"}("
        for key, value in zip(("name", "filename", "line"), frame, strict=True):
            self.text(key)
            self.text(value) if isinstance(value, str) else self.number(value)
        self.out += b"u"
        self._put(frame)


def packed_number(value: int | None) -> bytes:
    """A number as torch pickles it."""
    if value is None:
        return b"N"
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if 0 <= value < 65536:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


@dataclass(frozen=True)
class Row:
    """One call of one rank."""

    site: int
    record: int
    seq: int
    created_ns: int
    completed_ns: int | None


def rows_of(job: Job, rank: int, entered: int, done: int) -> list[Row]:
    """The last `entries` calls of a rank."""
    per_step = len(job.sites)
    last_step = FIRST_STEP + job.entries // per_step + 1
    total = last_step * per_step + entered
    order = {
        kind: [i for i, site in enumerate(job.sites) if site.kind == kind]
        for kind in ("tp", "dp", "pp", "world")
    }
    place = {i: (len(members), members.index(i)) for members in order.values() for i in members}
    rows = []
    jitter = rank * 1_700_003 % 3_000_000
    for record in range(total - job.entries, total):
        step, site = divmod(record, per_step)
        count, index = place[site]
        created = START_NS + step * STEP_NS + site * CALL_NS + jitter
        finished = step < last_step or site < done
        rows.append(
            Row(site, record, step * count + index + 1, created, created + 9_000_000 if finished else None)
        )
    return rows


def torch_pickle(job: Job, rank: int, entered: int, done: int) -> bytes:
    """A rank's dump in torch's format 2.10, as NCCL writes it."""
    pickler = TorchPickler()
    kinds = ("world", "tp", "dp", "pp")
    out = pickler.out
    out += b"}("
    pickler.text("version"), pickler.text("2.10"), pickler.text("pg_config")
    out += b"}("
    for kind in kinds:
        name, desc, members = job.group(kind, rank)
        pickler.text(name)
        out += b"}("
        for key, value in (("name", name), ("desc", desc), ("ranks", str(list(members)))):
            pickler.text(key), pickler.text(value)
        out += b"u"
    out += b"u"
    pickler.text("comm_lib_version"), pickler.text("2.28.9"), pickler.text("pg_status")
    out += b"}("
    for number, _ in enumerate(kinds):
        pickler.text(str(number))
        out += b"}("
        for key in ("last_enqueued_collective", "last_started_collective", "last_completed_collective"):
            pickler.text(key), pickler.number(-1)
        out += b"u"
    out += b"u"
    pickler.text("entries")
    out += b"]("
    _entries(pickler, job, rank, rows_of(job, rank, entered, done), kinds)
    out += b"eu"
    pickler._put("the dump itself")
    out += b"."
    return bytes(out)


def _entries(pickler: TorchPickler, job: Job, rank: int, rows: list[Row], kinds: tuple[str, ...]) -> None:
    """Writes the entries. Once an entry of a site has been written twice, its constant parts are known."""
    parts: dict[tuple[int, bool], list[bytes]] = {}
    seen: dict[tuple[int, bool], int] = {}
    for row in rows:
        key = (row.site, row.completed_ns is None)
        numbers = (row.record, row.seq, row.seq, row.created_ns, row.completed_ns)
        if key in parts:
            known = parts[key]
            pickler.out += b"".join(
                [known[0], packed_number(numbers[0]), known[1], packed_number(numbers[1]), known[2],
                 packed_number(numbers[2]), known[3], packed_number(numbers[3]), known[4],
                 packed_number(numbers[4]), known[5]]
            )  # fmt: skip
            continue
        found = _entry(pickler, job, rank, row, kinds, numbers)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 2:
            parts[key] = found


def _entry(
    pickler: TorchPickler,
    job: Job,
    rank: int,
    row: Row,
    kinds: tuple[str, ...],
    numbers: tuple[int | None, ...],
) -> list[bytes]:
    """Writes one entry and returns its bytes between the varying numbers."""
    site, out = job.sites[row.site], pickler.out
    name, desc, _ = job.group(site.kind, rank)
    cuts = [len(out)]

    def varying(value: int | None) -> None:
        cuts.append(len(out))
        pickler.number(value)
        cuts.append(len(out))

    def sizes(size: tuple[int, ...]) -> None:
        out.extend(b"](](")
        for extent in size:
            pickler.number(extent)
        out.extend(b"ee")

    def words(word: str) -> None:
        out.extend(b"](")
        pickler.text(word)
        out.extend(b"e")

    out += b"}("
    pickler.text("frames")
    out += b"]("
    for frame in site.frames:
        pickler.frame(frame)
    out += b"e"
    pickler.text("record_id"), varying(numbers[0])
    pickler.text("pg_id"), pickler.number(kinds.index(site.kind)), pickler.text("process_group")
    pickler.text(name), pickler.text(desc)
    out += b"\x86"
    pickler.text("thread_name"), pickler.text("python3"), pickler.text("thread_id")
    (
        pickler.text(str(139_911_602_364_736 + rank * 4096)),
        pickler.text("collective_seq_id"),
        varying(numbers[1]),
    )
    pickler.text("p2p_seq_id"), pickler.number(0), pickler.text("op_id"), varying(numbers[2])
    (
        pickler.text("profiling_name"),
        pickler.text(f"nccl:{site.op}"),
        pickler.text("time_created_ns"),
        varying(numbers[3]),
    )
    pickler.text("input_sizes"), sizes(site.inputs), pickler.text("input_dtypes"), words(site.dtype)
    pickler.text("output_sizes"), sizes(site.outputs), pickler.text("output_dtypes"), words(site.dtype)
    pickler.text("state"), pickler.text("scheduled" if row.completed_ns is None else "completed")
    pickler.text("time_discovered_started_ns"), pickler.number(None)
    pickler.text("time_discovered_completed_ns"), varying(numbers[4])
    pickler.text("retired")
    out += b"\x89" if row.completed_ns is None else b"\x88"
    pickler.text("timeout_ms"), pickler.number(600_000), pickler.text("is_p2p")
    out += b"\x89u"
    cuts.append(len(out))
    return [bytes(out[cuts[i] : cuts[i + 1]]) for i in range(0, len(cuts), 2)]


@cache
def _members_json(members: tuple[int, ...]) -> str:
    return json.dumps(packed_ranks(members), separators=(",", ":"))


def black_box(job: Job, rank: int, entered: int, done: int, rows: np.ndarray | None = None) -> bytes:
    """A rank's black box, closed by nobody: the process was frozen or killed."""
    rows = box_rows(job, entered, done) if rows is None else rows
    heap = bytearray()
    counts: dict[int, int] = {}

    def item(kind: Item, value: object) -> None:
        payload = (value if isinstance(value, str) else json.dumps(value)).encode()
        counts[kind] = counts.get(kind, 0) + 1
        heap.extend(struct.pack("<IHHI", len(payload), kind, 0, counts[kind]) + payload)
        heap.extend(bytes(-len(heap) % 8))

    item(
        Item.META,
        {"host": f"node{rank // 8}", "job": "bench", "backend": "nccl", "versions": {"torch": "2.13.0"}},
    )
    for kind in ("world", "tp", "dp", "pp"):
        name, desc, members = job.group(kind, rank)
        item(Item.GROUP, f'["{name}", "{desc}", {_members_json(members)}, "nccl"]')
    item(Item.NAME, '"all_reduce"')
    for inputs, outputs, dtype in shapes_of(job):
        item(Item.SHAPES, [[inputs], [outputs], [dtype], [dtype], [], []])
    for site in job.sites:
        item(Item.STACK, [list(frame) for frame in site.frames])
    head = np.zeros(1, HEADER)
    last = int(rows["begin"].max())
    head["magic"], head["version"], head["record_bytes"], head["capacity"] = (
        MAGIC,
        VERSION,
        CALL.itemsize,
        len(rows),
    )
    head["heap_offset"] = HEADER_BYTES + rows.nbytes
    head["heap_bytes"], head["heap_used"], head["next_id"] = len(heap), len(heap), last
    head["rank"], head["world_size"], head["pid"], head["local_rank"] = rank, job.world, 1000 + rank, rank % 8
    head["start_ns"], head["step"] = START_NS, last // len(job.sites)
    head["last_call_ns"] = head["step_ns"] = int(rows["created_ns"].max())
    head["calls_started"], head["calls_completed"] = (
        last,
        last - int((rows["state"] != State.COMPLETED).sum()),
    )
    return head.tobytes() + bytes(HEADER_BYTES - HEADER.itemsize) + rows.tobytes() + bytes(heap)


def shapes_of(job: Job) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
    """Every combination of sizes and dtype once, as the recorder keeps them."""
    return list(dict.fromkeys((site.inputs, site.outputs, site.dtype) for site in job.sites))


def box_rows(job: Job, entered: int, done: int) -> np.ndarray:
    """The ring of a rank that got so far in the last step, in slot order."""
    calls = np.zeros(job.entries, CALL)
    kinds = {"world": 1, "tp": 2, "dp": 3, "pp": 4}
    shapes = shapes_of(job)
    for i, row in enumerate(rows_of(job, 0, entered, done)):
        site = job.sites[row.site]
        numel = int(np.prod(site.inputs))
        finished = row.completed_ns is not None
        calls[i]["begin"] = calls[i]["end"] = row.record + 1
        calls[i]["created_ns"] = row.created_ns
        calls[i]["started_ns"] = row.created_ns + 1000
        calls[i]["completed_ns"] = row.completed_ns or 0
        calls[i]["seq"] = calls[i]["op_id"] = row.seq
        calls[i]["step"] = row.record // len(job.sites)
        calls[i]["in_numel"] = calls[i]["out_numel"] = numel
        calls[i]["timeout_ms"] = 600_000
        calls[i]["group"], calls[i]["op"] = kinds[site.kind], 1
        calls[i]["shapes"] = shapes.index((site.inputs, site.outputs, site.dtype)) + 1
        calls[i]["stack"] = row.site + 1
        calls[i]["peer"] = calls[i]["root"] = -1
        calls[i]["reduce_op"] = 1
        calls[i]["state"] = State.COMPLETED if finished else State.STARTED
        calls[i]["flags"] = int(Flag.RETIRED) if finished else 0
    slots = np.zeros(job.entries, CALL)
    slots[((calls["begin"] - 1) % job.entries).astype(np.int64)] = calls
    return slots


def write_pickles(job: Job, folder: Path) -> int:
    """One torch pickle per rank; returns the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    entered, done = how_far(job)
    total = 0
    for rank in range(job.world):
        data = torch_pickle(job, rank, int(entered[rank]), int(done[rank]))
        (folder / f"trace_{rank}").write_bytes(data)
        total += len(data)
    return total


def write_boxes(job: Job, folder: Path) -> int:
    """One black box per rank; returns the bytes written."""
    folder.mkdir(parents=True, exist_ok=True)
    entered, done = how_far(job)
    rings: dict[tuple[int, int], np.ndarray] = {}
    total = 0
    for rank in range(job.world):
        key = (int(entered[rank]), int(done[rank]))
        if key not in rings:
            rings[key] = box_rows(job, *key)
        rows = rings[key].copy()
        rows["created_ns"] += rank * 1_700_003 % 3_000_000
        data = black_box(job, rank, *key, rows)
        with open(folder / f"bench.a0.r{rank}.p{1000 + rank}.box", "wb") as file:
            file.write(data)
        total += len(data)
    os.sync() if total > 1 << 33 else None
    return total
