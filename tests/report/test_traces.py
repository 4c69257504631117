"""Traces for Perfetto: complete, small, with the verdict in the picture."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.box_files import box_bytes

from allranks.cli import main
from allranks.diagnosis import diagnose
from allranks.report import perfetto
from allranks.report.perfetto import lanes_of
from pages.gallery import make_traces


def fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message by number; nested messages stay bytes."""
    found: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            value: Any = varint()
        else:
            length = 8 if key & 7 == 1 else varint()
            value, at = data[at : at + length], at + length
        found.setdefault(key >> 3, []).append(value)
    assert at == len(data)
    return found


def events(data: bytes) -> list[tuple[int, dict[int, list[Any]]]]:
    """(time, event) of a trace."""
    packets = [fields(packet) for packet in fields(data)[1]]
    return [(packet[8][0], fields(packet[11][0])) for packet in packets if 11 in packet]


def test_the_perfetto_trace_has_every_call_the_verdict_the_missing_call_and_arrows() -> None:
    """23 calls, each with a begin and an end; three arrows from the guilty rank to those that wait."""
    traces = make_traces(4, 6)
    data = b"".join(perfetto.render(diagnose(traces), traces))
    found = events(data)
    kinds = [event[9][0] for _, event in found]
    assert (kinds.count(1), kinds.count(2)) == (24, 24)  # the calls and the missing one
    texts = [event[23][0].decode() for _, event in found if 23 in event]
    assert any(text.startswith("rank 1 (node0) never entered all_reduce #6") for text in texts)
    (missing,) = [event for _, event in found if event.get(23) == [b"never entered all_reduce #6"]]
    heads = [event[47][0] for _, event in found if event.get(23) == [b"waits"]]
    assert sorted(heads) == sorted(missing[47]) and len(heads) == 3
    packets = [fields(packet) for packet in fields(data)[1]]
    names = [fields(fields(packet[60][0])[3][0])[6][0].decode() for packet in packets if 60 in packet and 3 in fields(packet[60][0])]  # fmt: skip
    assert names == ["rank 0 (node0)", "▶ rank 1 (node0) GUILTY", "rank 2 (node0)", "rank 3 (node0)"]


def test_perfettos_own_reader_reads_the_trace() -> None:
    """The wire format is theirs, padded numbers included."""
    theirs = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    traces = make_traces(3, 5)
    trace = theirs.Trace()
    trace.ParseFromString(b"".join(perfetto.render(diagnose(traces), traces)))
    values = {
        item.iid: item.str
        for packet in trace.packet
        for item in packet.interned_data.debug_annotation_string_values
    }
    begins = [packet.track_event for packet in trace.packet if packet.track_event.name_iid]
    assert len(begins) == 14
    assert begins[0].debug_annotations[0].int_value == 1
    assert b"/home/me/train.py:44 in train" in values[begins[0].debug_annotations[1].string_value_iid]


def test_a_call_costs_less_than_eighty_bytes() -> None:
    """256 ranks x 2,000 calls stay below 40 MB; benchmarks/trace_size.py measures that."""
    traces = make_traces(16, 1000)
    size = sum(map(len, perfetto.render(diagnose(traces), traces)))
    assert size / (16 * 1000) < 78


def test_calls_that_overlap_get_lanes_of_their_own() -> None:
    """A viewer's slices of one track must not cross."""
    starts, ends = np.array([0, 5, 6, 12]), np.array([10, 11, 7, 13])
    assert lanes_of(starts, ends).tolist() == [0, 1, 2, 0]
    assert lanes_of(np.array([0, 5]), np.array([5, 6])).tolist() == [0, 0]


def test_the_name_chooses_the_compression(tmp_path: Path) -> None:
    """A .gz is really gzipped."""
    for trace in make_traces(3, 5):
        (tmp_path / f"job.a0.r{trace.header.rank}.p{trace.header.rank}.box").write_bytes(box_bytes(trace))
    for name in ("t.pftrace", "t.pftrace.gz"):
        main(["diagnose", str(tmp_path / "job.a0.r0.p0.box"), "--perfetto", str(tmp_path / name)])
        data = (tmp_path / name).read_bytes()
        plain = gzip.decompress(data) if name.endswith(".gz") else data
        assert events(plain)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
