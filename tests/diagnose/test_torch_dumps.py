"""Inputs on which torchfrtrace crashes, is silent or accuses innocents, written as torch writes them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from .torch_dumps import BASE_NS, Entry, answer, diagnose_folder, entry, number, reduces, write


def test_rings_that_wrapped_at_different_places_accuse_nobody(tmp_path: Path) -> None:
    """Record ids do not overlap, sequence numbers do."""
    ranks = {
        0: number(reduces(51, 70), 400),
        1: number(reduces(41, 70), 50),
        2: number(reduces(60, 70), 9000),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) is None


def test_a_rank_whose_ring_lost_a_group_altogether_is_not_accused(tmp_path: Path) -> None:
    """It may have entered long ago; only those that show their end can lack."""
    sub = {"group": ("1", "sub")}
    ranks = {
        0: number([*reduces(1, 5), *reduces(1, 3, "scheduled", **sub)], 100),
        1: number([*reduces(1, 5), *reduces(1, 3, "scheduled", **sub)], 100),
        2: number(reduces(1, 5), 100),
    }
    groups = {"0": ("default_pg", [0, 1, 2]), "1": ("sub", [0, 1, 2])}
    result = diagnose_folder(write(tmp_path, ranks, groups))
    assert result.status == "unclear"


def test_a_reset_recorder_accuses_nobody(tmp_path: Path) -> None:
    """Record ids begin again at 0 on one rank only."""
    ranks = {0: number(reduces(30, 40), 0), 1: number(reduces(10, 40), 9)}
    assert answer(diagnose_folder(write(tmp_path, ranks))) is None


def test_a_group_that_began_anew_is_compared_in_its_present_life(tmp_path: Path) -> None:
    """After a new quorum the numbers begin at 1 again."""
    ranks = {
        0: number([*reduces(40, 90), *reduces(1, 6)], 39),
        1: number([*reduces(60, 90), *reduces(1, 6)], 59),
        2: number(reduces(1, 6)),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) is None


VALID = {
    "all_to_all_single uneven": [("all_to_all_single", [[8]], [[12]]), ("all_to_all_single", [[12]], [[8]])],
    "all_to_all list uneven": [
        ("all_to_all", [[1], [3]], [[1], [2]]),
        ("all_to_all", [[2], [5]], [[3], [5]]),
    ],
    "all_gather_v uneven": [("all_gather_v", [[3]], [[3], [5]]), ("all_gather_v", [[5]], [[3], [5]])],
    "all_gather list": [("all_gather", [[4]], [[4], [4]]), ("all_gather", [[4]], [[4], [4]])],
    "reduce_scatter uneven": [("reduce_scatter", [[3], [5]], [[3]]), ("reduce_scatter", [[3], [5]], [[5]])],
    "gather": [("gather", [[4]], [[4], [4]]), ("gather", [[4]], [])],
    "scatter": [("scatter", [[4], [4]], [[4]]), ("scatter", [], [[4]])],
    "other shape, same elements": [("all_reduce", [[4, 4]], [[4, 4]]), ("all_reduce", [[16]], [[16]])],
}


@pytest.mark.parametrize("name", sorted(VALID))
def test_valid_uneven_calls_accuse_nobody(name: str, tmp_path: Path) -> None:
    """What all give adds up to what each takes."""
    ranks = {
        rank: number([entry(seq=1), entry(op, seq=2, sizes=given, out=taken), entry(seq=3)])
        for rank, (op, given, taken) in enumerate(VALID[name])
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) is None


def test_an_uneven_exchange_that_does_not_add_up_is_a_size_mismatch(tmp_path: Path) -> None:
    """What 0 gives 1 is not what 1 takes of 0."""
    ranks = {
        0: number([entry("all_to_all", seq=1, sizes=[[1], [3]], out=[[1], [2]], state="started")]),
        1: number([entry("all_to_all", seq=1, sizes=[[2], [5]], out=[[4], [5]], state="started")]),
    }
    told = answer(diagnose_folder(write(tmp_path, ranks)))
    assert told is not None and told[0] == "size_mismatch"


def test_a_gather_into_one_tensor_must_be_even(tmp_path: Path) -> None:
    """_all_gather_base with another input on one rank."""
    ranks = {
        rank: number([entry("_all_gather_base", seq=1, sizes=[[5 if rank == 2 else 4]], out=[[16]])])
        for rank in range(4)
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("size_mismatch", (2,))


def test_scalars_of_different_dtype_do_not_slip_through(tmp_path: Path) -> None:
    """0-dimensional tensors have one element, too."""
    ranks = {
        rank: number([entry(seq=1, sizes=[[]], dtype="Double" if rank == 1 else "Float")])
        for rank in range(3)
    }
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("dtype_mismatch", (1,))


def test_a_collective_that_ended_on_some_ranks_first_is_a_live_job(tmp_path: Path) -> None:
    """State skew is not a mismatch."""
    ranks = {0: number(reduces(1, 5)), 1: number(reduces(1, 5, "started"))}
    assert answer(diagnose_folder(write(tmp_path, ranks))) is None


def test_an_old_mismatch_is_told_once_and_the_healthy_rest_not_at_all(tmp_path: Path) -> None:
    """200 collectives went well since."""
    ranks = {
        rank: number([entry(seq=1, sizes=[[8 if rank == 1 else 4]]), *reduces(2, 200)]) for rank in range(3)
    }
    result = diagnose_folder(write(tmp_path, ranks))
    assert answer(result) == ("size_mismatch", (1,))
    assert len(result.findings) == 1


def test_an_old_mismatch_does_not_hide_a_hang(tmp_path: Path) -> None:
    """The job hangs for another reason, 200 collectives later."""
    ranks = {
        rank: number([entry(seq=1, sizes=[[8 if rank == 1 else 4]]), *reduces(2, 200)]) for rank in range(3)
    }
    for rank in (0, 1):
        ranks[rank] = number([*ranks[rank], entry(seq=201, state="started")])
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("missing_rank", (2,))


def test_all_joined_and_none_done_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    """torchfrtrace prints nothing."""
    ranks = {rank: number(reduces(1, 5, "started")) for rank in range(4)}
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("none_finished", ())


@pytest.mark.parametrize("guilty", [0, 1, 3])
def test_an_extra_identical_call_blames_its_maker_whoever_it_is(guilty: int, tmp_path: Path) -> None:
    """The others lack in the last call, which they never owed."""
    lines = [10, 11, 12, 13, 14]
    ranks = {}
    for rank in range(4):
        mine = [10, 11, 12, 99, 13, 14] if rank == guilty else lines
        ranks[rank] = number([entry(seq=i + 1, line=line) for i, line in enumerate(mine)])
    ranks[guilty][-1] |= {"state": "started", "retired": False, "time_discovered_completed_ns": None}
    result = diagnose_folder(write(tmp_path, ranks))
    assert answer(result) == ("extra_collective", (guilty,))
    assert result.verdict is not None and result.verdict.sequence == 4


def test_the_first_file_may_be_the_culprit(tmp_path: Path) -> None:
    """The reference is the majority, not the first file of the folder."""
    ranks = {rank: number(reduces(1, 5, "started")) for rank in range(4)}
    ranks[0][-1] |= {"profiling_name": "nccl:broadcast"}
    assert answer(diagnose_folder(write(tmp_path, ranks))) == ("type_mismatch", (0,))


def test_many_symptoms_do_not_hide_the_root(tmp_path: Path) -> None:
    """20 tensor-parallel groups hang on their way; one rank is the reason."""
    groups: dict[str, tuple[str, list[int]]] = {"0": ("default_pg", list(range(40)))}
    ranks = {}
    for rank in range(40):
        name = f"tp{rank // 2}"
        groups[name] = ("tp", [rank // 2 * 2, rank // 2 * 2 + 1])
        tp = {"group": (name, "tp")}
        ranks[rank] = [entry(seq=1, **tp), entry(seq=1), entry(seq=2, **tp), entry(seq=2, state="started")]
    ranks[17] = ranks[17][:2]
    ranks[16] = [*ranks[16][:2], ranks[16][2] | {"state": "started", "retired": False}]
    result = diagnose_folder(
        write(tmp_path, {rank: number(entries) for rank, entries in ranks.items()}, groups)
    )
    assert answer(result) == ("missing_rank", (17,))
    assert result.verdict is not None and result.verdict.group == "tp8"


def test_an_inversion_between_two_groups_shows_the_circle(tmp_path: Path) -> None:
    """Each rank has started the group that the other has not entered."""
    groups = {"0": ("default_pg", [0, 1]), "a": ("a", [0, 1]), "b": ("b", [0, 1])}
    a, b = ("a", "a"), ("b", "b")
    ranks = {
        0: number([entry(seq=1, group=a), entry(seq=1, group=b), entry(seq=2, group=a, state="started")]),
        1: number([entry(seq=1, group=a), entry(seq=1, group=b), entry(seq=2, group=b, state="started")]),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks, groups))) == ("order_inversion", (0, 1))


def test_versions_and_descriptions_may_differ_between_ranks(tmp_path: Path) -> None:
    """A rolling upgrade, or a description set on one rank only."""
    ranks = {0: number(reduces(1, 5)), 1: number(reduces(1, 5))}
    for one in ranks[1]:
        one["process_group"] = ("0", "undefined")
    assert answer(diagnose_folder(write(tmp_path, ranks, version={0: "2.10", 1: "2.5"}))) is None


def test_groups_of_one_description_are_told_apart_by_their_members(tmp_path: Path) -> None:
    """The groups of a mesh dimension: "group 7" told nobody which. With equal members, too, the name is left."""
    groups = {
        "6": ("mesh_dp", [0, 2]),
        "7": ("mesh_dp", [1, 3]),
        "8": ("pair", [0, 1]),
        "9": ("pair", [0, 1]),
    }
    ranks = {
        r: number([entry(seq=s, group=(n, "mesh_dp")) for s in (1, 2)]) for n in "67" for r in groups[n][1]
    }
    ranks[1] += number([entry(seq=3, group=("7", "mesh_dp"), state="started")], first=2)
    result = diagnose_folder(write(tmp_path, ranks, groups))
    assert answer(result) == ("missing_rank", (3,))
    assert result.verdict is not None and "of group mesh_dp[1,3]" in result.verdict.sentence
    assert [group.label for group in result.groups] == ["mesh_dp[0,2]", "mesh_dp[1,3]", "8", "9"]
    chosen = {name.replace("6", "dp0").replace("7", "dp1"): members for name, members in groups.items()}
    for row in itertools.chain(*ranks.values()):
        row["process_group"] = ("dp0" if row["process_group"][0] == "6" else "dp1", "mesh_dp")
    verdict = diagnose_folder(write(tmp_path / "chosen", ranks, chosen)).verdict
    assert verdict is not None and "of group dp1 " in verdict.sentence


def test_unknown_libraries_and_operations_are_compared_by_name(tmp_path: Path) -> None:
    """ucc, sparse gloo, operations of tomorrow."""
    for i, (lib, op) in enumerate(
        (("ucc", "all_reduce"), ("gloo", "sparse_all_reduce"), ("nccl9", "hyper_reduce"))
    ):
        ranks = {rank: number([entry(op, seq=s, lib=lib) for s in (1, 2)]) for rank in range(3)}
        assert answer(diagnose_folder(write(tmp_path / str(i), ranks))) is None
        ranks[2][-1] |= {"profiling_name": f"{lib}:other_thing"}
        assert answer(diagnose_folder(write(tmp_path / str(i), ranks))) == ("type_mismatch", (2,))


def test_a_hang_is_found_though_another_rank_left_no_file(tmp_path: Path) -> None:
    """Positive evidence beats the missing file."""
    ranks = {rank: number(reduces(1, 30, "started")) for rank in (0, 1)}
    ranks[2] = number(reduces(1, 29))
    groups = {"0": ("default_pg", [0, 1, 2, 3])}
    assert answer(diagnose_folder(write(tmp_path, ranks, groups))) == ("missing_rank", (2,))


def test_the_same_rank_missing_in_a_group_without_its_file_died(tmp_path: Path) -> None:
    """The hang at 30 is reached, whatever the oldest entries look like."""
    ranks = {rank: number(reduces(1, 30, "started")) for rank in (0, 1, 2)}
    groups = {"0": ("default_pg", [0, 1, 2, 3])}
    result = diagnose_folder(write(tmp_path, ranks, groups))
    assert answer(result) == ("rank_died", (3,))
    assert result.verdict is not None and result.verdict.sequence == 30


def test_torchcomms_numbers_over_all_communicators_accuse_nobody(tmp_path: Path) -> None:
    """Ranks with different communicators count differently."""

    def comm(name: str, seq: int, **more: object) -> Entry:
        return entry(seq=seq, group=(name, "ncclx"), lib="ncclx", **more)  # type: ignore[arg-type]

    groups = {"world": ("ncclx", [0, 1, 2]), "pair": ("ncclx", [0, 1])}
    ranks = {
        0: number(
            [
                comm("world", 1),
                comm("pair", 2),
                comm("pair", 3),
                comm("world", 4),
                entry("send", seq=5, group=("world", "ncclx"), lib="ncclx"),
                comm("world", 6),
            ]
        ),
        1: number(
            [
                comm("world", 1),
                comm("pair", 2),
                comm("pair", 3),
                comm("world", 4),
                entry("recv", seq=5, group=("world", "ncclx"), lib="ncclx"),
                comm("world", 6),
            ]
        ),
        2: number([comm("world", 1), comm("world", 2), comm("world", 3)]),
    }
    assert answer(diagnose_folder(write(tmp_path, ranks, groups))) is None


@pytest.mark.parametrize("per_communicator", [True, False])
def test_a_hang_of_two_communicators_is_found_though_the_ring_has_wrapped(
    tmp_path: Path, per_communicator: bool
) -> None:
    """Numbers per communicator, as our hook counts, or over all of them, which all ranks have in common."""
    groups = {"dp": ("ncclx", [0, 1, 2]), "tp": ("ncclx", [0, 1, 2])}

    def calls(count: int, last: str) -> list[Entry]:
        found = []
        for index in range(40, 40 + count):
            name, own = ("dp", "tp")[index % 2], 20 + index // 2
            state = last if index == 39 + count else "completed"
            found.append(
                entry(seq=own if per_communicator else index, group=(name, "ncclx"), lib="ncclx", state=state)
            )
        return number(found, first=40)

    ranks = {0: calls(9, "started"), 1: calls(8, "completed"), 2: calls(9, "started")}
    verdict = diagnose_folder(write(tmp_path, ranks, groups)).verdict
    assert verdict is not None and (verdict.cause, verdict.ranks, verdict.group) == (
        "missing_rank",
        (1,),
        "dp",
    )


def test_the_only_communicator_is_called_by_its_name(tmp_path: Path) -> None:
    """torchcomms writes the library's name where torch writes the description of a group."""
    groups = {"main_comm": ("gloo", [0, 1])}

    def calls(count: int) -> list[Entry]:
        made = [
            entry(seq=seq, group=("main_comm", "gloo"), lib="gloo", state="completed")
            for seq in range(1, count)
        ]
        return number([*made, entry(seq=count, group=("main_comm", "gloo"), lib="gloo", state="started")])

    verdict = diagnose_folder(write(tmp_path, {0: calls(6), 1: calls(4)}, groups)).verdict
    assert verdict is not None and verdict.group == "main_comm"


@pytest.mark.parametrize("waited_s", [0.2, 31.0])
@pytest.mark.parametrize("rank", [0, 3])
def test_one_dump_alone_tells_where_its_rank_waits_and_asks_for_the_others(
    rank: int, waited_s: float, tmp_path: Path
) -> None:
    """Without pg_config nobody knows who else is in the group: nobody is blamed, and nothing is called right."""
    nobody: dict[str, tuple[str, list[int]]] = {"0": ("default_pg", [])}
    folder = write(tmp_path, {rank: number(reduces(1, 5, "scheduled", line=44))}, nobody)
    created_s = (BASE_NS + 4000) / 1e9
    os.utime(folder / f"trace_{rank}", (created_s + waited_s, created_s + waited_s))
    result = diagnose_folder(folder)
    verdict = result.verdict
    assert result.status == "unclear" and verdict is not None and verdict.ranks == ()
    assert verdict.sentence.startswith(
        f"rank {rank} waits in all_reduce #5 of group default_pg at train.py:44"
    )
    waited = "for at most 31 s" if waited_s > 1 else "for at most 200 ms"  # the file may be a copy
    assert waited in verdict.sentence
    assert verdict.where == "train.py:44 in f" and "the other ranks" in verdict.missing_evidence[0]


def test_one_dump_alone_of_a_call_that_timed_out_says_so(tmp_path: Path) -> None:
    """The dump that NCCL's watchdog writes at a timeout: the call was put away, not finished."""
    nobody: dict[str, tuple[str, list[int]]] = {"0": ("default_pg", [])}
    verdict = diagnose_folder(
        write(tmp_path, {0: number(reduces(1, 5, "started", retired=True))}, nobody)
    ).verdict
    assert verdict is not None and verdict.ranks == () and "failed or timed out on rank 0" in verdict.sentence


def test_one_dump_alone_whose_calls_have_all_ended_is_called_right(tmp_path: Path) -> None:
    nobody: dict[str, tuple[str, list[int]]] = {"0": ("default_pg", [])}
    assert diagnose_folder(write(tmp_path, {0: number(reduces(1, 5))}, nobody)).status == "ok"
