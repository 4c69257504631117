"""The scripts of examples/hangs as real gloo jobs: right rank, cause and line, no healthy job blamed, no false statement."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis import diagnose

from .facts import false_statements
from .gallery_module import HANGS, gallery
from .histories import on_shared_tables
from .test_properties import PLANTS, plant

pytest.importorskip("torch")
TRUTH = gallery.truth()
#: Like others of the table, for the boxes: as real jobs behind --soak, from their recorded boxes always (test_recorded.py).
_LIKE_OTHERS = """
    endless_loop empty_queue two_locks named_pipe key_that_nobody_sets slow_save_on_rank_0 stopped waits_for_a_child
    monitored_barrier_without_one nan_skip_of_two_calls swallowed_exception fsdp_skipped_in_loop dtensor_on_one_rank
    fsdp_full_tensor_on_rank_0 ddp_uneven_inputs early_stopping signal_to_one_rank objects_on_rank_0 checkpoint_on_rank_0
    metrics_by_key gather_roots reduce_scatter_sizes two_ranks_are_stuck hybrid_shards unused_parameters_on_one_rank
    batch_norm_eval_on_rank_0 members_of_a_new_group batch_to_wrong_peer lost_receive experts_without_tokens failed_pickle
    ring_attention_one_round_less gather_object_roots broadcast_objects_from_two epoch_earlier overflow_skips_optimizer
    reduce_skipped broadcast_skipped odd_ranks_go_elsewhere most_make_an_extra_call pipeline_and_replicas join_on_some
    stages_in_other_order wrong_mesh_dimension killed_in_a_subgroup other_model_on_one_rank detections_of_every_rank
    store_barrier uneven_reduce_scatter async_never_waited ok_groups_of_uneven_work ok_async_over_groups ok_different_lines
    groups_made_in_other_order error_swallowed_in_backward
    barrier_of_all clipping_where_needed data_for_the_tensor_group detached_features expert_capacity
    full_state_on_rank_0 gathered_dtypes gradients_in_two_buckets keys_of_the_state leaves_the_vote loader_thread_died
    loader_worker_stuck local_sgd_counter no_gradient_sync_on_one object_to_tensor ok_groups_come_and_go
    ok_leave_one_by_one ok_messages_in_flight ok_rank_0_alone ok_root_runs_ahead old_version_of_the_model one_f_one_b
    parameter_server preempted_node reduce_against_all_reduce scatter_list_too_short set_of_parameters tied_embeddings
    wrapped_model_bypassed
    actor_and_critic coalesced_call_left_out hook_on_one_module hook_that_reduces_twice
    ok_pipelines_of_other_depth retry_without_the_others ring_in_both_directions sampler_without_seed
    six_ranks_two_stages skipped_send_after_error work_never_waited
"""
LIKE_OTHERS = frozenset(_LIKE_OTHERS.split())
NAMES = [pytest.param(name, marks=pytest.mark.soak) if name in LIKE_OTHERS else name for name in TRUTH]


@cache
def _outcome(name: str, folder: Path) -> Any:
    gallery.preload()
    return gallery.run_hang(TRUTH[name], folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hangs")


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_on_a_real_hang_is_that_of_the_table(name: str, folder: Path) -> None:
    """Rank, cause and line; where nothing is wrong, nobody is blamed."""
    outcome = _outcome(name, folder)
    verdict = outcome.diagnosis.verdict
    assert gallery.is_right(outcome) == (True, True, True), verdict


@pytest.mark.parametrize("name", NAMES)
def test_nothing_false_is_said_of_a_real_hang(name: str, folder: Path) -> None:
    """Every rank, call, size, tag, step and line that findings name is in the calls."""
    outcome = _outcome(name, folder)
    assert false_statements(outcome.diagnosis, outcome.traces, outcome.seen) == []


@pytest.mark.parametrize("kind", PLANTS)
def test_nothing_false_is_said_of_generated_jobs(kind: str) -> None:
    """As above, over jobs of many groups with a fault planted anywhere."""
    for seed in range(12):
        world, _ = plant(kind, random.Random(f"facts {kind} {seed}"))
        traces = on_shared_tables(world.traces())
        assert false_statements(diagnose(traces), traces) == [], (kind, seed)


def test_the_table_lists_every_script_and_at_least_sixty_kinds_of_hang() -> None:
    """A script without a row would never be run."""
    scripts = {path.stem for path in HANGS.glob("*.py")} - {"gallery"}
    assert scripts == set(TRUTH)
    assert sum(bool(case.ranks) for case in TRUTH.values()) >= 60


def test_a_false_statement_is_noticed() -> None:
    """The check itself: a sentence with a rank, call and line that nobody has."""
    from dataclasses import replace

    world, _ = plant("missing", random.Random(1))
    traces = on_shared_tables(world.traces())
    result = diagnose(traces)
    assert result.verdict is not None
    wrong = replace(
        result.verdict, sentence="rank 99 entered all_reduce #777 of group default_pg at other.py:3"
    )
    assert len(false_statements(replace(result, findings=(wrong,)), traces)) == 4
