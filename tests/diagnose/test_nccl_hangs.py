"""The kinds of examples/hangs on NCCL: ranks on one H200, torch 2.11, calls only enqueued (scripts/gpu_hangs.py).

Each archive holds torch's own dumps, the black boxes and the truth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .facts import false_statements
from .gallery_module import gallery, outcome

CASES = Path(__file__).parent / "nccl_hangs"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in CASES.iterdir())
TRUTH = gallery.truth()
#: Kinds that are no such hang on NCCL, which has no tags and no monitored_barrier, or of which too little was caught.
NOT_SO = frozenset(
    [
        "barrier_kinds",
        "batch_without_partner",  # NCCL keeps small messages: the job went on
        "dtensor_on_one_rank",  # its scatter failed
        "lost_receive",
        "message_tags",
        "stopped",  # before its first call had ended
        "tensor_parallel_skipped_block",  # its scatter failed
    ]
)
#: Kinds whose calls, being only enqueued, tell the guilty rank, but not cause or line as on gloo.
LESS_EXACT = frozenset(
    ("async_save_beside_ddp", "wrong_group", "fsdp_skipped_module", "fsdp_skipped_in_loop")
)
#: Kinds of which torch's own dumps tell less: no roots, reduce operations and steps, and nothing of ranks that have ended.
DUMPS_TELL_LESS = frozenset(
    [
        "async_save_beside_ddp",
        "batch_norm_eval_on_rank_0",
        "broadcast_objects_from_two",
        "broadcast_roots",
        "clip_on_one_rank",
        "ddp_models_in_other_order",
        "ddp_unused_layer",
        "different_operations",
        "dropped_layer_same_sizes",
        "error_swallowed_in_backward",
        "fewer_micro_batches",
        "fsdp_eval_on_rank_0",
        "fsdp_skipped_in_loop",
        "fsdp_skipped_module",
        "gather_object_roots",
        "gather_roots",
        "killed",
        "left_early",
        "message_sizes",
        "more_micro_batches",
        "never_called",
        "new_group_without_one",
        "reduce_operations",
        "reduce_roots",
        "scatter_sizes",
        "two_extra_calls",
        "uncaught_exception",
        "unused_parameters_on_one_rank",
        "wrong_group",
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nccl_hangs")


def _outcome(name: str, files: str, folder: Path) -> Any:
    return outcome(CASES / f"{name}.tar.xz", files, folder)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_SO])
def test_the_black_boxes_of_an_nccl_hang_get_the_verdict_of_the_table(name: str, folder: Path) -> None:
    """Rank, cause and line are those of the same script on gloo."""
    outcome = _outcome(name, "boxes", folder)
    right = gallery.is_right(outcome)
    assert right[0] if name in LESS_EXACT else all(right), outcome.diagnosis.verdict


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_SO | DUMPS_TELL_LESS])
def test_the_dumps_of_an_nccl_hang_get_the_verdict_of_the_table(name: str, folder: Path) -> None:
    """torch's own dumps: finished calls read "scheduled" in them as long as a later call is pending."""
    outcome = _outcome(name, "dumps", folder)
    assert gallery.is_right(outcome) == (True, True, True), outcome.diagnosis.verdict


@pytest.mark.parametrize("files", ["boxes", "dumps"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_false_is_said_of_an_nccl_hang(name: str, files: str, folder: Path) -> None:
    """Every rank, call, size and line that findings name is in the calls."""
    outcome = _outcome(name, files, folder)
    assert false_statements(outcome.diagnosis, outcome.traces, outcome.seen) == []


@pytest.mark.parametrize("name", sorted(DUMPS_TELL_LESS))
def test_dumps_that_tell_less_accuse_nobody_with_confidence(name: str, folder: Path) -> None:
    """A rank that is not guilty is named at 60 % at most."""
    outcome = _outcome(name, "dumps", folder)
    verdict = outcome.diagnosis.verdict
    assert verdict is None or verdict.ranks == outcome.truth.ranks or verdict.confidence <= 0.6


def test_the_jobs_are_all_there() -> None:
    """An emptied folder would pass every other test."""
    assert len(NAMES) >= 88 and set(NAMES) <= set(TRUTH)
