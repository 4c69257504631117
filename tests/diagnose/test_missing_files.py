"""Real dumps of which some files are missing: an absent file is never proof, and nobody is accused for it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from allranks.diagnosis import diagnose
from allranks.load import LoadResult, load_paths
from allranks.model.diagnosis import Diagnosis

from .histories import Do, run

HERE = Path(__file__).parent
FOLDERS = sorted([*HERE.glob("cases/*/dumps"), *HERE.glob("nccl_h200/*/dumps")])
SOURCES = [*FOLDERS, *sorted(HERE.glob("torch215/*.tar.gz"))]
#: As sure as this is an accusation.
SURE = 0.6


def case(name: str) -> Path:
    return HERE / "cases" / name / "dumps"


def without(loaded: LoadResult, *lost: int) -> Diagnosis:
    """The verdict without the files of some ranks."""
    return diagnose([trace for trace in loaded.traces if trace.header.rank not in lost])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name if path.is_dir() else path.name)
def test_without_one_or_two_files_nobody_else_is_accused(source: Path) -> None:
    """The verdict is the same, weaker, or about the ranks without a file."""
    loaded = load_paths([str(source)])
    ranks = [trace.header.rank for trace in loaded.traces if trace.header.rank is not None]
    whole = without(loaded).verdict
    guilty = set(whole.ranks) if whole is not None else set()
    for number in (1, 2):
        for lost in itertools.combinations(ranks, number) if len(ranks) > number else ():
            verdict = without(loaded, *lost).verdict
            if verdict is None or verdict.confidence < SURE:
                continue
            there = set(verdict.ranks) & set(ranks) - set(lost)
            assert there <= guilty or (guilty and guilty <= there), (lost, verdict)


def test_a_wait_in_a_group_that_no_other_file_knows_is_no_inversion() -> None:
    """gloo's dumps name no members. Earlier calls of the group ended, so another member made them: its file is missing."""
    loaded = load_paths([str(case("flight_recorder_subgroup_hang"))])
    result = without(loaded, 3)
    assert result.status == "unclear" and result.verdict is not None
    assert result.verdict.ranks == () and "group tp_1" in result.verdict.sentence
    assert any("dumps of the other ranks" in text for text in result.verdict.missing_evidence)


def test_a_rank_whose_file_shows_that_it_lacks_comes_before_two_without_a_file() -> None:
    """However many files are missing, what one shows counts more."""
    loaded = load_paths([str(case("nccl_fsdp_stuck"))])
    verdict = without(loaded, 1, 2).verdict
    assert verdict is not None and (verdict.cause, verdict.ranks) == ("missing_rank", (0,))


def test_one_rank_alone_in_a_new_call_asks_for_the_file_that_is_missing() -> None:
    """Perhaps only this rank makes the call."""
    verdict = without(load_paths([str(HERE / "torch215" / "extra_call.tar.gz")]), 0).verdict
    assert verdict is not None and verdict.confidence < SURE
    assert "the file of rank 0" in verdict.missing_evidence


def test_a_first_round_shows_nothing_of_which_of_two_ranks_is_odd() -> None:
    """Rank 3 makes one call more; of four files two are missing."""
    programs = {rank: [Do("all_reduce", line=line) for line in (10, 11)] for rank in range(4)}
    programs[3].append(Do("all_reduce", line=12))
    traces = run({"world": (0, 1, 2, 3)}, programs, backend="nccl").traces(lost=frozenset({0, 1}))
    verdict = diagnose(traces).verdict
    assert verdict is not None and verdict.confidence < SURE
    assert "the file of ranks 0, 1" in verdict.missing_evidence


@pytest.mark.parametrize("source", FOLDERS, ids=lambda path: path.parent.name)
def test_a_file_that_was_cut_is_one_note_and_accuses_nobody(source: Path, tmp_path: Path) -> None:
    """Its end might show that a rank entered the call, that a batch ended, or that most ranks did the same."""
    whole = without(load_paths([str(source)])).verdict
    files = sorted(path for path in source.iterdir() if path.is_file())
    for number, victim in enumerate(files):
        content = victim.read_bytes()
        folder = tmp_path / str(number)
        folder.mkdir()
        for path in files:
            (folder / path.name).write_bytes(path.read_bytes())
            os.utime(folder / path.name, (0, 0))
        for end in (len(content) // 2, len(content) * 7 // 8, len(content) - 2):
            (folder / victim.name).write_bytes(content[:end])
            os.utime(folder / victim.name, (0, 0))
            loaded = load_paths([str(folder)])
            result = diagnose(loaded.traces, loaded.files)
            assert [n.status for n in result.files if Path(n.path).name == victim.name] == ["damaged"]
            verdict, there = result.verdict, {trace.header.rank for trace in loaded.traces}
            if verdict is not None and verdict.confidence >= SURE and set(verdict.ranks) <= there:
                guilty = set(whole.ranks) if whole is not None else set()
                assert set(verdict.ranks) <= guilty or (guilty and guilty <= set(verdict.ranks)), verdict
