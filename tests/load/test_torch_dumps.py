"""Torch and torchcomms dumps of all versions and libraries come out as one and the same model."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allranks.load import LoadOptions, load_paths
from allranks.load import torch_dump as dumps_module
from allranks.model.trace import Flag, RankTrace, State

from .dumps import dump, entry, torch_pickle

CASES = Path(__file__).parent / "cases"
KINDS = ("broken_dumps", "flight_recorder", "nccl")


def load_one(folder: Path, content: dict[str, Any], name: str = "trace_0") -> RankTrace:
    (folder / name).write_bytes(pickle.dumps(content, 2))
    return load_paths([str(folder)]).traces[0]


def flags(trace: RankTrace, flag: Flag) -> list[bool]:
    return ((trace.calls["flags"] & int(flag)) != 0).tolist()


@pytest.mark.parametrize(
    "case", sorted(p.relative_to(CASES).as_posix() for kind in KINDS for p in CASES.glob(f"{kind}/*"))
)
def test_every_shared_case_is_read(case: str) -> None:
    """No case is beyond us, and every trace says what it came from."""
    result = load_paths([str(CASES / case)])
    assert [trace.header.rank for trace in result.traces] == sorted(note.rank for note in result.files)
    for trace in result.traces:
        assert trace.kind.startswith(("torch pickle 2.10", "torch json 2.10"))
        assert len(trace.calls) and (np.diff(trace.calls["begin"].astype(np.int64)) > 0).all()
        assert all(trace.names[int(op)] for op in trace.calls["op"])


def test_json_and_pickle_of_one_job_tell_the_same() -> None:
    """Only the stacks are missing in torch's JSON."""
    pickles = load_paths([str(CASES / "flight_recorder/missing_rank")]).traces
    jsons = load_paths([str(CASES / "flight_recorder/missing_rank_json")]).traces
    for one, two in zip(pickles, jsons, strict=True):
        assert one.groups == two.groups
        assert one.last_completed == two.last_completed
        for name in ("seq", "created_ns", "in_numel", "state", "flags", "timeout_ms", "begin"):
            assert (one.calls[name] == two.calls[name]).all(), name
        assert not two.calls["stack"].any() and one.calls["stack"].all()


def test_a_group_local_peer_becomes_a_global_rank(tmp_path: Path) -> None:
    """ "send 0->1" in the group of ranks 4 and 7 goes to rank 7."""
    sends = [entry(0, op="nccl:send 0->1", is_p2p=True, p2p_seq_id=1, process_group=("9", "pp"))]
    receives = [entry(1, op="nccl:recv 0<-1", is_p2p=False, p2p_seq_id=2, process_group=("9", "pp"))]
    config = {"9": {"name": "9", "desc": "pp", "ranks": "[4, 7]"}}
    trace = load_one(tmp_path, dump(sends + receives, pg_config=config), "trace_4")
    assert trace.calls["peer"].tolist() == [7, 7]
    assert flags(trace, Flag.P2P) == [True, True]


def test_batched_sends_are_parts_and_their_end_has_the_state() -> None:
    """NCCL leaves every part "scheduled"; only the coalesced entry tells."""
    trace = next(t for t in load_paths([str(CASES / "nccl/pipeline_healthy")]).traces if t.header.rank == 1)
    ops = [trace.names[int(op)] for op in trace.calls["op"]]
    assert flags(trace, Flag.COALESCED_PART) == [op in ("send", "recv") for op in ops]
    assert flags(trace, Flag.COALESCED_END) == [op == "coalesced" for op in ops]
    assert set(trace.calls["peer"][np.array(ops) == "recv"].tolist()) == {0}
    assert trace.calls["p2p_seq"][np.array(ops) == "all_reduce"].tolist() == [0, 0, 0, 0]
    assert State.TIMED_OUT not in trace.calls["state"]


def test_parts_of_an_uneven_all_gather_are_marked(tmp_path: Path) -> None:
    """N broadcasts and one ALLGATHER_coalesced share a sequence number; the call before them does not."""
    entries = [entry(0, 1), entry(1, 2, "nccl:_broadcast_oop", state="scheduled", retired=False),
               entry(2, 2, "nccl:_broadcast_oop", state="scheduled", retired=False),
               entry(3, 2, "nccl:ALLGATHER_coalesced", input_sizes=[], output_sizes=[])]  # fmt: skip
    trace = load_one(tmp_path, dump(entries))
    assert flags(trace, Flag.COALESCED_PART) == [False, True, True, False]
    assert flags(trace, Flag.COALESCED_END) == [False, False, False, True]


def test_gloo_says_that_its_states_are_unknown() -> None:
    """gloo never leaves "scheduled"; that is not a call in flight."""
    for trace in load_paths([str(CASES / "flight_recorder/missing_rank")]).traces:
        assert all(flags(trace, Flag.STATE_UNKNOWN))
        assert (trace.calls["state"] == State.SCHEDULED).all()
        assert trace.header.world_size == 3 and trace.groups[1].ranks == (0, 1, 2)


def test_gloo_with_subgroups_has_groups_of_unknown_members() -> None:
    """Once a subgroup exists gloo writes '[]': unknown, not empty."""
    for trace in load_paths([str(CASES / "flight_recorder/subgroup_hang")]).traces:
        assert {group.name for group in trace.groups[1:]} in ({"0", "1"}, {"0", "2"})
        assert all(group.ranks == () for group in trace.groups)


def test_nccl_put_away_but_not_completed_is_timed_out(tmp_path: Path) -> None:
    """The watchdog retires a call that it gave up."""
    trace = load_one(tmp_path, dump([entry(0), entry(1, 2, state="started", retired=True)]))
    assert trace.calls["state"].tolist() == [State.COMPLETED, State.TIMED_OUT]


def test_torchcomms_sequences_are_counted_per_group(tmp_path: Path) -> None:
    """torchcomms counts over all communicators; ranks with different ones would never meet."""
    config = {name: {"name": name, "desc": "ncclx", "ranks": "[0,1]"} for name in ("a", "b")}
    entries = [
        entry(i, i + 1, "ncclx:all_reduce", process_group=[group, "ncclx"]) for i, group in enumerate("abab")
    ]
    trace = load_one(tmp_path, dump(entries, pg_config=config))
    assert trace.kind == "torchcomms pickle 2.10"
    assert trace.calls["seq"].tolist() == [1, 1, 2, 2]


def test_one_counter_over_all_groups_is_recognised_by_its_numbers(tmp_path: Path) -> None:
    """Even where names and descriptions are torch's."""
    config = {name: {"name": name, "desc": "x", "ranks": "[0, 1]"} for name in "ab"}
    entries = [entry(i, i + 1, process_group=(group, "x")) for i, group in enumerate("aabab")]
    trace = load_one(tmp_path, dump(entries, pg_config=config))
    assert trace.calls["seq"].tolist() == [1, 2, 1, 3, 2]


def test_sends_without_a_partner_do_not_count_as_collectives(tmp_path: Path) -> None:
    """torchcomms counts them together; a rank that does not send would be one behind."""
    entries = [entry(0, 1, "ncclx:all_reduce"), entry(1, 2, "ncclx:send"), entry(2, 3, "ncclx:all_reduce")]
    trace = load_one(tmp_path, dump(entries))
    assert trace.calls["seq"][[0, 2]].tolist() == [1, 2]
    assert flags(trace, Flag.P2P) == [False, True, False] and trace.calls["p2p_seq"].tolist() == [0, 1, 0]


def test_a_wrapped_torchcomms_ring_of_several_groups_has_no_numbers(tmp_path: Path) -> None:
    """Counting from the middle would accuse the innocent."""
    ranks = {"a": "[0,1]", "b": "[0,1]", "c": "[0,2]"}  # calls of c, which 1 never made, were counted too
    config = {name: {"name": name, "desc": "ncclx", "ranks": those} for name, those in ranks.items()}
    entries = [
        entry(i, i + 1, "ncclx:all_reduce", process_group=[group, "ncclx"])
        for i, group in enumerate("abab", 50)
    ]
    trace = load_one(tmp_path, dump(entries, pg_config=config))
    assert trace.calls["seq"].tolist() == [-1] * 4
    assert any("wrapped" in note for note in trace.notes)


@pytest.mark.parametrize(("version", "known"), [("2.3", False), ("2.4", True), ("2.10", True)])
def test_all_to_all_sizes_count_from_version_2_4(tmp_path: Path, version: str, known: bool) -> None:
    """Earlier dumps hold sizes that mean nothing."""
    trace = load_one(tmp_path, dump([entry(0, op="nccl:all_to_all")], version=version))
    assert int(trace.calls["in_numel"][0]) == (16 if known else -1)
    assert trace.kind == f"torch pickle {version}"


@pytest.mark.parametrize("version", ["2.3", "2.5", "2.6", "2.9", "2.17", "3.0", ""])
def test_old_new_and_missing_versions_are_read(tmp_path: Path, version: str) -> None:
    """Keys that a version lacks are unknown, not fatal; keys that we do not know are ignored."""
    old = entry(0, weather="fine")
    for key in ("thread_id", "thread_name", "op_id", "timeout_ms", "frames"):
        old.pop(key)
    trace = load_one(tmp_path, dump([old], version=version, nccl_version="2.20"))
    assert len(trace.calls) == 1 and trace.calls["in_numel"][0] == 16
    assert bool(trace.notes) is (version in ("3.0", ""))


def test_a_dump_without_entries_is_a_trace_without_calls(tmp_path: Path) -> None:
    """includeCollectives=False, and JSON of a rank that recorded nothing."""
    content = dump([])
    del content["entries"]
    (tmp_path / "trace_0.json").write_text(json.dumps(content))
    trace = load_paths([str(tmp_path)]).traces[0]
    assert len(trace.calls) == 0 and trace.groups[1].ranks == (0, 1)


def test_groups_that_share_a_name_stay_apart(tmp_path: Path) -> None:
    """Rank 0 and rank 2 both have a group "1", with different members."""
    for rank, members in ((0, "[0, 1]"), (2, "[2, 3]")):
        config = {"1": {"name": "1", "desc": "tp", "ranks": members}}
        content = dump([entry(0, process_group=("1", "tp"))], pg_config=config)
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(content, 2))
    one, two = load_paths([str(tmp_path)]).traces
    assert one.groups[1] != two.groups[1]


def test_values_of_wrong_types_become_unknown(tmp_path: Path) -> None:
    """Whatever stands where a number, a list or a text should be, the rest of the entry counts."""
    odd: list[dict[str, Any]] = [
        entry(0, input_sizes="many", output_sizes=[3, [4]], input_dtypes=7, frames="none"),
        entry(1, 2, time_created_ns=1 << 90, timeout_ms=None, thread_id=5, frames=[1, {"name": 3}]),
        entry(2, "7", state=["x"], retired="yes", process_group=None, duration_ms=float("nan")),  # type: ignore[arg-type]
        {"profiling_name": None},
        {"no": "operation"},
    ]
    trace = load_one(tmp_path, dump(odd))
    assert len(trace.calls) == 4
    assert trace.notes == ("1 entry could not be read",)
    assert sorted(trace.calls["seq"].tolist()) == [-1, 1, 2, 7]


def _long_history(seed: int, count: int = 700) -> list[dict[str, Any]]:
    """A ring with several groups, sites and shapes, numbers of every width, and a few oddities."""
    chance = random.Random(seed)
    shared = [{"name": f"f{i}", "filename": "train.py", "line": 10 + i * 40} for i in range(12)]
    entries = []
    for i in range(count):
        group = chance.choice(["0", "1", "2"])
        done = chance.random() < 0.9
        changes: dict[str, Any] = {
            "frames": [shared[(i + k) % 12] for k in range(chance.choice([3, 8]))] if chance.random() < 0.95 else [],
            "process_group": (group, f"desc_{group}"), "pg_id": int(group), "state": "completed" if done else "scheduled",
            "input_sizes": [[chance.choice([4, 300, 70000])] * chance.choice([1, 2])],
            "time_discovered_completed_ns": 1_700_000_000_000_000_000 + i * 7 if done else None, "retired": done,
        }  # fmt: skip
        if chance.random() < 0.3:
            changes["duration_ms"] = chance.random() * 10
        record = chance.choice([100, 60_000, 70_000]) + i if seed % 2 else i
        entries.append(entry(record, chance.choice([1, 255, 65_000, 200_000]) + i, **changes))
    return entries


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("write", [torch_pickle, pickle.dumps], ids=["torch", "python"])
def test_the_fast_way_and_the_plain_way_agree(
    tmp_path: Path, seed: int, write: Callable[[object], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading by repeating bytes is only a faster way to the same rows."""
    config = {name: {"name": name, "desc": f"desc_{name}", "ranks": "[0, 1]"} for name in "012"}
    content = dump(_long_history(seed), pg_config=config)
    (tmp_path / "trace_0").write_bytes(write(content))
    fast = load_paths([str(tmp_path)]).traces[0]
    monkeypatch.setattr(dumps_module, "MIN_BYTES", 1 << 60)
    plain = load_paths([str(tmp_path)]).traces[0]
    assert_same(fast, plain)


def assert_same(one: RankTrace, two: RankTrace) -> None:
    tables = {"op": "names", "label": "names", "shapes": "shapes", "stack": "stacks", "group": "groups"}
    assert len(one.calls) == len(two.calls)
    for name in one.calls.dtype.names or ():
        left, right = one.calls[name].tolist(), two.calls[name].tolist()
        if name in tables:
            left = [getattr(one, tables[name])[i] for i in left]
            right = [getattr(two, tables[name])[i] for i in right]
        assert left == right, name
    assert (one.header, one.last_completed, one.notes, one.kind) == (
        two.header,
        two.last_completed,
        two.notes,
        two.kind,
    )


def test_the_fast_way_is_taken_for_regular_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A regular file, as torch writes it, never reaches the plain reader whole."""
    content = torch_pickle(dump([entry(i, i + 1) for i in range(2000)]))
    (tmp_path / "trace_0").write_bytes(content)
    sizes = []
    whole = dumps_module.read_pickle
    monkeypatch.setattr(dumps_module, "read_pickle", lambda data: sizes.append(len(data)) or whole(data))
    assert len(load_paths([str(tmp_path)]).traces[0].calls) == 2000
    assert len(sizes) == 1 and sizes[0] < len(content) / 5


def test_the_rank_shows_in_its_own_sends_when_the_name_has_none(tmp_path: Path) -> None:
    """TORCH_FR_DUMP_DYNAMIC_FILE_NAME leaves the rank out of the name."""
    content = dump([entry(0, op="nccl:send 1->0", is_p2p=True, p2p_seq_id=1)], ranks="[4, 7]")
    (tmp_path / "latest").write_bytes(pickle.dumps(content, 2))
    assert load_paths([str(tmp_path)]).traces[0].header.rank == 7


def test_selected_ranks_leave_the_others_out() -> None:
    """They are named as skipped."""
    result = load_paths([str(CASES / "nccl/cascade")], LoadOptions(ranks=frozenset({1, 3})))
    assert [trace.header.rank for trace in result.traces] == [1, 3]
    assert sorted(note.rank for note in result.files if note.status == "skipped") == [0, 2]
