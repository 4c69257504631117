"""The plan of a quorum and the rules of a step, as pure functions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from allranks.manager.plan import (
    FRESH,
    NOWHERE,
    Claim,
    Conflict,
    Lineage,
    ReplicaClaim,
    by_age,
    decide,
    describe_conflict,
    find_conflicts,
    find_mismatch,
)
from allranks.manager.training import Phase, may_ask


def replica(*claims: Claim, **options: object) -> ReplicaClaim:
    return ReplicaClaim(ranks=claims, **options)  # type: ignore[arg-type]


def test_fresh_replicas_take_the_weights_of_the_first() -> None:
    """Nobody has trained: all but one heal, and all take part in the first step."""
    plan = decide([replica(Claim()), replica(Claim()), replica(Claim())], number=1)
    assert (plan.top, plan.sources, plan.healing) == (FRESH, (0,), (1, 2))
    assert plan.participants == (0, 1, 2)


def test_one_that_computes_already_gives_its_fresh_weights_to_one_that_just_started() -> None:
    """Nobody has committed a step yet, but throwing the first one back would cost it its attempt."""
    plan = decide([replica(Claim()), replica(Claim(seen=1))])
    assert (plan.sources, plan.healing) == ((1,), (0,))


def test_without_init_sync_fresh_replicas_stay_as_they_are() -> None:
    """init_sync=False: everybody promises to have started equal."""
    plan = decide([replica(Claim(), init_sync=False)] * 2)
    assert plan.healing == ()


def test_replicas_restored_from_the_same_checkpoint_need_no_healing() -> None:
    """Everybody restarts at step 100 of the same run: nothing is sent."""
    plan = decide([replica(Claim(term=7, step=100, seen=7))] * 3)
    assert (plan.healing, plan.participants) == ((), (0, 1, 2))


def test_one_that_comes_late_heals_from_all_that_are_ahead() -> None:
    """The two at step 40 serve it; it heals before it computes, so its gradients count."""
    old = replica(Claim(term=3, step=40, seen=3))
    plan = decide([old, replica(Claim()), old], number=4)
    assert (plan.sources, plan.healing, plan.participants) == ((0, 2), (1,), (0, 1, 2))
    assert plan.late == ()


def test_one_that_would_heal_beside_its_first_step_counts_later() -> None:
    """The others need not wait for it to compute."""
    plan = decide([replica(Claim(term=3, step=40, seen=3)), replica(Claim(), beside=True)], number=4)
    assert (plan.healing, plan.participants, plan.late) == ((1,), (0, 1), (1,))


@pytest.mark.parametrize("options", [{"min_replicas": 2}, {"min_replicas": 1, "fixed": True}])
def test_it_heals_first_where_its_gradients_are_needed_or_places_are_fixed(
    options: dict[str, object],
) -> None:
    """Two are wanted and only one holds the state: its zeros would be one too few."""
    ahead = replica(Claim(term=3, step=40, seen=3), beside=True, **options)
    assert decide([ahead, replica(Claim(), beside=True, **options)], number=4).late == ()


def test_at_the_very_start_nobody_is_late() -> None:
    """All begin together: the first step counts for all."""
    assert decide([replica(Claim(), beside=True)] * 3, number=1).late == ()


def test_members_beyond_a_fixed_number_are_spares() -> None:
    """Two count, the third stands by."""
    plan = decide([replica(Claim(term=3, step=40, seen=3), min_replicas=2, fixed=True)] * 3)
    assert plan.participants == (0, 1)


def test_the_newest_state_is_the_one_with_most_steps() -> None:
    """Its holder was silent while others started over: it wins until they have committed as much; then they do."""
    held = replica(Claim(term=5, step=12, seen=5, lineage=((0, 0), (5, 12))))
    plan = decide([held, replica(Claim(term=6, step=10, seen=6, lineage=((0, 0), (6, 10))))])
    assert (plan.top, plan.sources, plan.healing, plan.lineage) == ((5, 12), (0,), (1,), ((0, 0), (5, 12)))
    plan = decide([held, replica(Claim(term=6, step=12, seen=6, lineage=((0, 0), (6, 12))))])
    assert (plan.top, plan.sources, plan.healing, plan.lineage) == ((6, 12), (1,), (0,), ((0, 0), (6, 12)))


@pytest.mark.parametrize(
    "lineage", [((6, 4), (7, 30)), ((0, 0), (2, 4), (6, 20), (7, 30)), ((0, 0), (5, 4), (7, 30))]
)
def test_states_that_trained_separately_are_in_conflict_and_both_numbers_are_named(lineage: Lineage) -> None:
    """One holds steps that the other does not: since a checkpoint, since an earlier group, since a step of its own group."""
    members = [
        replica(Claim(term=5, step=12, seen=5, lineage=((0, 0), (2, 4), (5, 12)))),
        replica(Claim(term=7, step=30, seen=7, lineage=lineage)),
    ]
    plan = decide(members)
    found = find_conflicts(members, plan)
    assert found == [Conflict(replica=0, step=12, since=4)]
    said = describe_conflict(found[0], plan, ["a", "b"])
    assert said.startswith("a drops its 8 steps after step 4 (it holds step 12): b holds step 30")


@pytest.mark.parametrize(
    "behind",
    [
        Claim(term=4, step=12, seen=5, lineage=((0, 0), (4, 12))),  # it slept while the others continued
        Claim(term=4, step=12, seen=4),  # restored from a checkpoint, in no group yet
        Claim(term=4, step=12, seen=5, lineage=((0, 0), (3, 12)), torn=True),
        Claim(),
    ],
)
def test_a_state_that_others_continued_or_that_is_stored_is_not_in_conflict(behind: Claim) -> None:
    """Healing drops no step of it, or none that is not in a checkpoint."""
    members = [replica(Claim(term=5, step=40, seen=5, lineage=((0, 0), (4, 20), (5, 40)))), replica(behind)]
    assert find_conflicts(members, decide(members)) == []


def test_a_fetched_state_that_is_not_loaded_yet_counts_if_all_ranks_of_the_replica_have_it() -> None:
    """Its source died a moment later: there is no other copy."""
    own = Claim(term=3, step=8, seen=4, lineage=((0, 0), (3, 8)))
    has = replace(own, arrived=(4, 20), arrived_lineage=((0, 0), (4, 20)))
    assert decide([replica(has, replace(has, torn=True))]).top == (4, 20)
    assert decide([replica(has, own)]).top == (3, 8)
    assert decide([replica(replace(has, torn=True), own)]).top == NOWHERE
    assert decide([replica(has, has), replica(Claim(), Claim())]).sources == (0,)


def test_a_vote_that_one_saw_pass_is_carried_out_by_those_who_did_not() -> None:
    """One is at step 11 already; the other voted and never heard: it rolls forward, nobody heals."""
    plan = decide(
        [replica(Claim(term=5, step=11, seen=5)), replica(Claim(term=4, step=10, seen=5, pending=5))]
    )
    assert (plan.top, plan.healing, plan.rolls_forward) == ((5, 11), (), frozenset({(1, 0)}))


def test_a_vote_that_all_gave_and_nobody_saw_stands() -> None:
    """All survivors hold the reduced gradients: the step is committed by all of them."""
    pending = replica(Claim(term=5, step=10, seen=5, pending=5))
    plan = decide([pending, pending])
    assert plan.top == (5, 11)
    assert plan.rolls_forward == {(0, 0), (1, 0)}


def test_a_vote_is_dropped_when_one_that_goes_on_never_voted() -> None:
    """It does not hold the reduced gradients: nobody commits the step."""
    pending = replica(Claim(term=5, step=10, seen=5, pending=5))
    plan = decide([pending, replica(Claim(term=5, step=10, seen=5))])
    assert (plan.top, plan.rolls_forward, plan.healing) == ((5, 10), frozenset(), ())


def test_a_torn_state_is_never_a_source() -> None:
    """Healing was cut short in the middle: it must heal again, however high its step."""
    plan = decide(
        [replica(Claim(term=9, step=99, seen=9, torn=True)), replica(Claim(term=8, step=5, seen=8))]
    )
    assert (plan.sources, plan.healing) == ((1,), (0,))
    assert decide([replica(Claim(torn=True))]).top == NOWHERE


def test_a_replica_whose_ranks_disagree_heals_as_a_whole() -> None:
    """One rank of two is a step behind without a vote: both take their shards from another replica."""
    whole = replica(Claim(term=3, step=8, seen=3), Claim(term=3, step=8, seen=3))
    split = replica(Claim(term=3, step=8, seen=3), Claim(term=3, step=7, seen=3))
    assert decide([whole, split]).healing == (1,)


def test_claims_survive_their_way_through_the_lighthouse() -> None:
    """Encoded and decoded they are the same; fields of a newer version are dropped."""
    facts = (1, 2, 3, 4, True, (5, 6), ((0, 0), (1, 2)))
    claim = Claim(*facts, address="h:1", listener="h:7", broken=True, global_rank=8)
    said = replica(claim, min_replicas=2, fixed=True, beside=True)
    assert ReplicaClaim.decode(said.encode()) == said
    assert ReplicaClaim.decode(said.encode().replace('"fixed"', '"novelty":1,"fixed"')) == said


def test_a_replica_that_cannot_compute_with_the_others_is_told_by_name() -> None:
    """Another backend, or another number of ranks, than the replica whose state counts; versions that do not say are trusted."""
    gpu, cpu = replica(Claim(), backend="nccl"), replica(Claim(), backend="gloo")
    older, wide = replica(Claim()), replica(Claim(), Claim(), backend="nccl")
    names = ["left", "right"]
    assert (
        find_mismatch([gpu, gpu], names, 0)
        == find_mismatch([gpu, older], names, 0)
        == find_mismatch([older, cpu], names, 1)
        == (-1, "")
    )
    odd, why = find_mismatch([gpu, cpu], names, 1)
    assert odd == 0 and "left communicates over nccl and right over gloo" in why
    odd, why = find_mismatch([gpu, wide], names, 0)
    assert odd == 1 and "right has 2 ranks and left has 1" in why


claims = some.builds(
    Claim,
    term=some.integers(0, 4),
    step=some.integers(0, 4),
    seen=some.integers(4, 6),
    pending=some.integers(0, 4),
    torn=some.booleans(),
)


@given(
    some.lists(
        some.builds(
            lambda claim, beside, least: replica(claim, beside=beside, min_replicas=least),
            claims, some.booleans(), some.integers(1, 3),
        ), min_size=1, max_size=5,
    ), some.integers(0, 9),
)  # fmt: skip
def test_every_plan_leaves_all_members_at_one_state(members: list[ReplicaClaim], number: int) -> None:
    """Each member holds the top already, rolls forward to it, or heals from one that does; terms grow."""
    plan = decide(members, number)
    assert plan.term > max(claim.seen for member in members for claim in member.ranks)
    if plan.top == NOWHERE:
        return
    for index, member in enumerate(members):
        claim = member.ranks[0]
        if index in plan.healing:
            assert plan.sources
            assert index not in plan.sources
            continue
        rolled = (claim.pending, claim.step + 1) if (index, 0) in plan.rolls_forward else claim.position
        assert rolled == plan.top
    assert set(plan.sources).isdisjoint(plan.healing)
    assert set(plan.participants) - set(plan.late)
    assert set(plan.late) <= set(plan.healing)


@given(some.lists(claims.map(lambda claim: replace(claim, torn=False)), min_size=2, max_size=4))
def test_whoever_saw_a_step_committed_is_never_thrown_back_by_one_that_is_behind(found: list[Claim]) -> None:
    """The plan's state is at least as new as every whole state among the members."""
    plan = decide([replica(claim) for claim in found])
    assert all(by_age(plan.top) >= by_age(claim.position) for claim in found)


@pytest.mark.parametrize(
    ("phase", "broken", "eager", "parked", "may"),
    [
        (Phase.APPLYING, True, True, False, False),  # the state is neither old nor new
        (Phase.REDUCING, False, True, False, False),  # the others count on us
        (Phase.REDUCING, True, True, False, True),
        (Phase.VOTING, True, True, False, True),
        (Phase.COMPUTING, False, True, False, True),
        (Phase.BETWEEN, False, True, False, True),
        (Phase.BETWEEN, True, False, False, False),  # local steps are made there
        (Phase.REDUCING, True, False, False, False),  # shards are gathered there
        (Phase.COMPUTING, False, False, True, True),
        (Phase.VOTING, True, False, False, True),
    ],
)
def test_when_a_rank_may_ask_for_a_quorum(
    phase: Phase, broken: bool, eager: bool, parked: bool, may: bool
) -> None:
    """Only while its state does not change and its claim will stay true."""
    assert may_ask(phase, broken, eager, parked) is may
