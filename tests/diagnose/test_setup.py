"""Ranks that wait for each other in init_process_group and new_group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.model.diagnosis import Diagnosis, RankNow
from allranks.model.trace import Frame, Group, Progress, Rendezvous

from .histories import START_NS, STUCK, Do, expect, run, verdict_of


def test_ranks_that_are_still_in_init_process_group_are_named_as_such() -> None:
    """Rank 2 believes in a world of four: it and rank 1 wait for the fourth, rank 0 has gone on to its first call."""
    traces = run(
        {"world": (0, 1, 2)}, {0: [Do("all_reduce")], 1: [STUCK], 2: [STUCK]}, backend="gloo"
    ).traces()
    boxes = [replace(t, kind="black box 2") for t in traces]
    inside = Progress(inside="init_process_group", inside_ns=START_NS, setups=0)
    boxes[1:] = [replace(t, progress=inside) for t in boxes[1:]]
    verdict = verdict_of(diagnose(boxes, options=DiagnoseOptions(now_ns=START_NS + 60 * 10**9)))
    assert verdict.cause == "not_started" and verdict.confidence <= 0.6
    assert verdict.sentence.endswith("; they are inside init_process_group"), verdict.sentence
    assert "WORLD_SIZE" in verdict.advice[0]


def _in_new_group(setups: tuple[int, ...], seen: Sequence[RankNow] = ()) -> Diagnosis:
    traces = run({"world": (0, 1, 2)}, {r: [Do("all_reduce")] * 5 for r in range(3)}, backend="gloo").traces()
    now = max(int(t.calls["completed_ns"].max()) for t in traces)
    boxes = [
        replace(t, kind="black box 2", progress=Progress(inside="new_group", inside_ns=now, setups=count))
        for t, count in zip(traces, setups, strict=True)
    ]
    return diagnose(boxes, stacks=seen, options=DiagnoseOptions(now_ns=now + 60 * 10**9))


def test_a_rank_that_did_not_take_part_in_a_new_group_waits_in_another_one_than_the_rest() -> None:
    """Ranks 0 and 1 made a group for themselves; the next group of all has another number on rank 2."""
    verdict = expect(_in_new_group((2, 2, 1)), "missing_rank", 2)
    assert verdict.sentence.startswith("rank 2 made 1 call of new_group fewer than ranks 0, 1"), (
        verdict.sentence
    )
    assert "also of those outside the new group" in verdict.advice[0]
    expect(_in_new_group((1, 1, 1)), "order_inversion", 0, 1, 2)


def test_a_rank_that_waits_in_its_next_call_for_one_inside_new_group_is_told_to_call_that_too() -> None:
    """Only rank 0 makes a group for its evaluation: the line where rank 1 waits for it is not the one to change."""
    traces = run(
        {"world": (0, 1)}, {0: [Do("all_reduce")] * 5, 1: [Do("all_reduce")] * 6}, backend="gloo"
    ).traces()
    now = int(traces[0].calls["completed_ns"].max())
    inside = (Progress(inside="new_group", inside_ns=now, setups=2), Progress(setups=1))
    boxes = [replace(t, kind="black box 2", progress=p) for t, p in zip(traces, inside, strict=True)]
    causes = ("rendezvous_wait", "eval.py:5 in make"), ("collective_wait", "train.py:13 in main")
    seen = [RankNow(rank, *cause) for rank, cause in enumerate(causes)]
    verdict = expect(
        diagnose(boxes, stacks=seen, options=DiagnoseOptions(now_ns=now + 60 * 10**9)), "missing_rank", 1
    )
    assert verdict.advice[0].startswith("call new_group on every rank")
    assert "rank 0 entered new_group at eval.py:5 in make and did not leave it" in verdict.evidence
    alone = expect(diagnose([], stacks=seen), "missing_rank", 1)  # stacks of a job that nobody recorded
    assert alone.sentence.startswith("rank 1 never called new_group") and alone.advice == verdict.advice
    assert (
        diagnose([], stacks=[replace(seen[0], cause="store_wait"), seen[1]]).verdict is None
    )  # a key of its own


def _making(*progress: Progress, made: dict[int, tuple[int, ...]] | None = None) -> Diagnosis:
    """Four ranks, some of them inside new_group; `made`: the members of group 1 as ranks know it."""
    traces = run(
        {"world": (0, 1, 2, 3)}, {r: [Do("all_reduce")] * 5 for r in range(4)}, backend="gloo"
    ).traces()
    now = max(int(t.calls["completed_ns"].max()) for t in traces)
    boxes = []
    for rank, (trace, mark) in enumerate(zip(traces, progress, strict=True)):
        own = (Group("1", "", made[rank], "gloo"),) if made and rank in made else ()
        mark = replace(mark, inside_ns=now)
        boxes.append(replace(trace, kind="black box 2", progress=mark, groups=(*trace.groups, *own)))
    return diagnose(boxes, options=DiagnoseOptions(now_ns=now + 60 * 10**9))


def _inside(setups: int, *members: int, alone: bool = False) -> Progress:
    return Progress(inside="new_group", setups=setups, members=members, alone=alone)


def test_a_rank_that_lists_other_members_for_one_call_of_new_group_is_named() -> None:
    """new_subgroups_by_enumeration with the hosts in another order: rank 2 takes rank 0's place and both get out."""
    made = {1: (0, 1), 2: (2, 3)}
    found = _making(_inside(1, 0, 1), Progress(setups=3), Progress(setups=3), _inside(2, 2, 3), made=made)
    verdict = expect(found, "order_inversion", 2)
    assert verdict.sentence.startswith(
        "rank 2 called new_group for ranks 2, 3, where ranks 0, 1 called it for ranks 0, 1; 2 ranks have"
    )


def test_ranks_that_wait_in_a_group_which_one_made_for_other_members_are_not_the_fault_of_the_network() -> (
    None
):
    """Everybody got out of new_group: rank 3 took rank 2's place in the group of ranks 1 and 2."""
    groups = {"world": (0, 1, 2, 3), "pair": (1, 2)}
    programs = {
        rank: [Do("all_reduce")] * 5 + [Do("all_reduce", "pair")] * (rank == 2) + [Do("all_reduce")]
        for rank in range(4)
    }
    traces = run(groups, programs, backend="gloo").traces()
    other = Group("1", "pair", (1, 3), "gloo")
    traces[3] = replace(traces[3], groups=(*traces[3].groups, other))
    boxes = [replace(trace, kind="black box 2") for trace in traces]
    met = Rendezvous("vm:1", 4)
    boxes = [replace(t, header=replace(t.header, rendezvous=met)) for t in boxes]
    now = max(int(t.calls["created_ns"].max()) for t in traces) + 60 * 10**9
    verdict = expect(diagnose(boxes, options=DiagnoseOptions(now_ns=now)), "order_inversion", 3)
    assert (
        verdict.sentence
        == "rank 3 called new_group for ranks 1, 3, where ranks 1, 2 called it for ranks 1, 2"
    )


def test_a_member_that_got_out_of_new_group_without_the_others_is_named() -> None:
    """It made the group with another backend."""
    members = _inside(1, 0, 1, 2)
    found = _making(members, Progress(setups=2), members, Progress(setups=2))
    assert expect(found, "missing_rank", 1).sentence.startswith("rank 1 left a call of new_group in which")


def test_only_members_are_missing_where_the_members_alone_make_a_group() -> None:
    """use_local_synchronization: rank 3 is not a member, and does not call new_group."""
    members = _inside(1, 0, 1, 2, alone=True)
    verdict = expect(_making(members, Progress(setups=1), members, Progress(setups=1)), "missing_rank", 1)
    assert verdict.advice == (
        "call new_group on ranks 0-2: with use_local_synchronization the members make the group",
    )


def test_the_lines_of_ranks_that_make_different_groups_come_from_their_stacks() -> None:
    """Where they have been read, the user is not asked to read them."""
    frames = (Frame("new_group", "/x/torch/distributed/distributed_c10d.py", 9), Frame("main", "train.py", 7))
    seen = [RankNow(rank, "store_wait", "train.py:7 in main", stack=frames) for rank in range(3)]
    verdict = expect(_in_new_group((1, 1, 2), seen), "order_inversion", 0, 1)
    assert "one call of new_group (train.py:7 in main)" in verdict.sentence
    assert verdict.where == "train.py:7 in main" and len(verdict.stacks) == 3
    assert not any("allranks stacks" in text for text in verdict.missing_evidence)


IN_INIT = Progress(inside="init_process_group", inside_ns=START_NS, setups=0)
HERE, THERE = "10.0.0.1:29500", "10.0.0.1:29507"
LAUNCHED = Rendezvous(HERE, 3)
LOST = (
    "exception: DistStoreError (train.py:3): wait timeout after 25000ms, keys: /default_pg/0//cpu//0/rank_1"
)


def _joining(
    *ranks: tuple[Rendezvous, Progress], launched: Rendezvous = LAUNCHED, ended: bool = False
) -> Diagnosis:
    """Black boxes of ranks that have made no call, read a minute after they entered init_process_group."""
    boxes = run({"world": tuple(range(len(ranks)))}, {r: [STUCK] for r in range(len(ranks))}).traces()
    boxes = [
        replace(
            box,
            kind="black box 2",
            groups=box.groups[:1],
            progress=progress,
            header=replace(
                box.header,
                rendezvous=met,
                launched=launched,
                world_size=met.world_size or 3,
                written_ns=START_NS + 25 * 10**9,
            ),
        )
        for box, (met, progress) in zip(boxes, ranks, strict=True)
    ]
    now_ns = 0 if ended else START_NS + 60 * 10**9
    return diagnose(boxes, options=DiagnoseOptions(now_ns=now_ns, ended=ended))


def test_a_rank_that_waits_at_another_address_is_named_with_both_addresses() -> None:
    here, there = Rendezvous(HERE, 3, "train.py:3"), Rendezvous(THERE, 3, "train.py:3")
    waiting = [(here, IN_INIT), (there, IN_INIT), (here, IN_INIT)]
    failed = [(met, replace(IN_INIT, inside="", closed=LOST)) for met, _ in waiting]
    for ranks in (waiting, failed):
        verdict = expect(_joining(*ranks), "setup_mismatch", 1)
        assert f"with address {THERE} (train.py:3), ranks 0, 2 with address {HERE}" in verdict.sentence
        assert verdict.confidence == 0.9


def test_of_two_ranks_at_two_addresses_the_one_that_left_its_environment_is_named() -> None:
    pair = [(Rendezvous(HERE, 2), IN_INIT), (Rendezvous(THERE, 2), IN_INIT)]
    expect(_joining(*pair, launched=Rendezvous(HERE, 2)), "setup_mismatch", 1)
    expect(_joining(*pair, launched=Rendezvous(THERE, 2)), "setup_mismatch", 0)
    unknown = verdict_of(_joining(*pair, launched=Rendezvous()))
    assert (unknown.ranks, unknown.confidence) == ((), 0.5)


def test_two_names_of_a_host_are_blamed_only_when_nobody_is_missing() -> None:
    """Rank 0 may well call its own host localhost."""
    own, name = Rendezvous("localhost:29500", 3), Rendezvous("node1:29500", 3)
    verdict = expect(_joining((own, IN_INIT), (name, IN_INIT), (name, IN_INIT)), "setup_mismatch", 0)
    assert verdict.confidence <= 0.6 and "unless both names mean the same host" in verdict.sentence
    expect(
        _joining((own, IN_INIT), (name, IN_INIT), (Rendezvous(), Progress(setups=0))),
        "not_started",
        2,
    )


def test_worlds_of_one_program_that_are_complete_are_no_mistake() -> None:
    """Ranks 0 and 1 train in a world of two; rank 2 waits for the second of its own, which has not come."""
    trained = Progress(setups=1, inside_ns=START_NS)
    apart = Rendezvous(HERE, 2), Rendezvous(THERE, 2)
    result = _joining((apart[0], trained), (apart[0], trained), (apart[1], IN_INIT))
    assert all(finding.cause != "setup_mismatch" for finding in result.findings)


def test_a_rank_with_another_world_size_is_named_with_both_numbers() -> None:
    three, four = Rendezvous(HERE, 3, "train.py:3"), Rendezvous(HERE, 4, "train.py:3")
    verdict = expect(_joining((three, IN_INIT), (four, IN_INIT), (three, IN_INIT)), "setup_mismatch", 1)
    assert "with world size 4 (train.py:3), ranks 0, 2 with world size 3" in verdict.sentence


def test_a_rank_that_ended_before_init_process_group_is_named_with_its_exit_code() -> None:
    here, never = Rendezvous(HERE, 3), Rendezvous()
    lost = replace(IN_INIT, inside="", closed=LOST)
    for others in (IN_INIT, lost):
        ranks = [(here, others), (never, Progress(setups=0, closed="exit")), (here, others)]
        verdict = expect(_joining(*ranks), "not_started", 1)
        assert verdict.sentence.startswith(
            "rank 1 ended with exit code 0 before it called init_process_group"
        )
        assert verdict.confidence == 0.9
    lost_all = _joining((here, lost), (never, Progress(setups=0, closed="exit")), (here, lost), ended=True)
    assert verdict_of(lost_all).confidence == 0.9
    assert verdict_of(lost_all).sentence.endswith("; 2 ranks waited in it for 25 s")
    ended = Progress(setups=0, closed="exit code 3 (sys.exit at train.py:2)")
    verdict = expect(_joining((here, lost), (never, ended), (here, IN_INIT)), "rank_died", 1)
    assert "ended with exit code 3 (sys.exit at train.py:2) before it called" in verdict.sentence
    assert verdict.where == "train.py:2"


def test_a_wrong_argument_of_one_rank_is_its_own_error() -> None:
    here = Rendezvous(HERE, 3)
    went_on = Progress(setups=0, inside_ns=START_NS)
    verdict = expect(_joining((here, IN_INIT), (here, went_on), (here, IN_INIT)), "not_started", 1)
    assert verdict.sentence.startswith(
        "rank 1 left init_process_group with an error and did not call it again"
    )
    wrong = Progress(setups=0, closed="exception: ValueError (train.py:3): Unknown c10d backend type GLOO2")
    verdict = expect(_joining((here, IN_INIT), (here, wrong), (here, IN_INIT)), "rank_died", 1)
    assert (
        "Unknown c10d backend type GLOO2 in init_process_group; 2 ranks have waited in it" in verdict.sentence
    )


def test_a_world_larger_than_the_number_of_processes_is_told_with_both_numbers() -> None:
    """world_size=4 in the script, three processes: nobody else will come."""
    met = Rendezvous(HERE, 4, "train.py:7")
    result = _joining(*[(met, IN_INIT)] * 3)
    sentence = verdict_of(result).sentence
    assert "world_size is 4 (train.py:7)" in sentence and "3 processes" in sentence, sentence


def test_what_the_environment_said_is_told_only_where_other_ranks_kept_to_it() -> None:
    """With init_method=file:// no rank meets where its environment says: that explains nothing."""
    files = [Rendezvous(path, 3) for path in ("/tmp/meet", "/tmp/meet", "/tmp/meetx")]
    verdict = expect(_joining(*((met, IN_INIT) for met in files)), "setup_mismatch", 2)
    assert not any("the environment" in text for text in verdict.evidence), verdict.evidence
    port = [Rendezvous(address, 3) for address in (HERE, HERE, THERE)]
    kept = expect(
        _joining(*((met, IN_INIT) for met in port), launched=Rendezvous(HERE, 3)), "setup_mismatch", 2
    )
    assert any("the environment of rank 2" in text for text in kept.evidence)
