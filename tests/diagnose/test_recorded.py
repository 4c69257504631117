"""Black boxes of real jobs, one archive per script of examples/hangs: right rank, cause and line, and no false statement.

`pack` makes the archives out of the folder that `benchmarks/verdicts.py --recorded FOLDER` leaves:

    python -m tests.diagnose.test_recorded FOLDER
"""

from __future__ import annotations

import io
import json
import random
import re
import sys
import tarfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.load import load_paths
from allranks.model.diagnosis import RankNow
from allranks.model.trace import RankTrace

from .facts import false_statements
from .gallery_module import gallery

RECORDED = Path(__file__).parent / "recorded"
TRUTH = gallery.truth()
NAMES = sorted(path.name.removesuffix(".tar.gz") for path in RECORDED.glob("*.tar.gz"))

#: Kinds without a round before the fault: of several calls that lack the rank the one that is waited in longest is named.
FIRST_BY_TIME = frozenset({"ddp_models_in_other_order"})


def _turned(trace: RankTrace, world: int) -> RankTrace:
    """The trace with the ranks numbered from the other end."""
    calls = trace.calls.copy()
    for column in ("peer", "root"):
        known = calls[column] >= 0
        calls[column][known] = world - 1 - calls[column][known]
    groups = tuple(replace(group, ranks=tuple(world - 1 - r for r in group.ranks)) for group in trace.groups)
    return replace(
        trace, calls=calls, groups=groups, header=replace(trace.header, rank=world - 1 - trace.header.rank)
    )


@cache
def _read(name: str) -> tuple[dict[str, Any], tuple[RankTrace, ...]]:
    """What is known of a recorded job, and its traces, which nobody may change."""
    archive = RECORDED / f"{name}.tar.gz"
    with tarfile.open(archive) as tar:
        note = tar.next()
        assert note is not None and note.name == f"{name}.json"
        facts = json.load(tar.extractfile(note))  # type: ignore[arg-type]
    traces = load_paths([str(archive)]).traces
    for trace in traces:
        trace.calls.flags.writeable = False
    return facts, tuple(traces)


def _by_clock(trace: RankTrace, ns: int) -> RankTrace:
    """The trace of a rank whose clock differs by so much."""
    calls = trace.calls.copy()
    for column in ("created_ns", "started_ns", "completed_ns"):
        calls[column][calls[column] > 0] += ns
    return replace(trace, calls=calls)


def _outcome(
    name: str, lost: int | None = None, ring: int = 0, turned: int = 0, clocks: int | None = None
) -> Any:
    """The verdict on a recorded job: with all its files, without one of them, with short rings, other clocks, or renumbered."""
    facts, recorded = _read(name)
    traces = [trace for trace in recorded if trace.header.rank != lost]
    if ring:
        traces = [replace(trace, calls=trace.calls[-ring:]) for trace in traces]
    traces = [_turned(trace, turned) for trace in traces] if turned else traces
    if clocks is not None:
        chance = random.Random(f"{name} {clocks}")
        traces = [_by_clock(trace, chance.randrange(-20_000_000, 20_000_000)) for trace in traces]
    gone = [turned - 1 - rank if turned else rank for rank in facts["gone"] if rank != lost]
    seen = tuple(RankNow(rank, "gone", "", "its process is gone") for rank in gone)
    options = DiagnoseOptions(now_ns=facts["now_ns"], ended=not facts["now_ns"])
    result = diagnose(traces, (), stacks=seen, options=options)
    return gallery.Outcome(TRUTH[name], tuple(traces), result, facts["now_ns"], seen)


def test_every_script_of_the_gallery_was_recorded() -> None:
    """A new script needs an archive."""
    assert set(NAMES) == set(TRUTH)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_hang_gets_the_verdict_of_the_table(name: str) -> None:
    """Rank, cause and line; where nothing is wrong, nobody is blamed."""
    outcome = _outcome(name)
    assert gallery.is_right(outcome) == (True, True, True), outcome.diagnosis.verdict


@pytest.mark.parametrize("name", NAMES)
def test_nothing_false_is_said_of_a_recorded_hang(name: str) -> None:
    """Every rank, call, size, tag, root, step, state and line, with all files, short rings, and each file left out."""
    ranks = [trace.header.rank for trace in _outcome(name).traces]
    rings = [{"ring": random.Random(f"{name} {i}").randrange(2, 16)} for i in range(2)]
    for variant in ({}, *rings, *({"lost": rank} for rank in ranks)):
        outcome = _outcome(name, **variant)
        assert false_statements(outcome.diagnosis, outcome.traces, outcome.seen) == [], variant


@pytest.mark.parametrize("name", [name for name in NAMES if name != "other_model_on_one_rank"])
def test_the_verdict_does_not_depend_on_how_ranks_are_numbered(name: str) -> None:
    """The same cause, and the same ranks by their new numbers. One script's errors name ranks in their text."""
    truth, verdict = TRUTH[name], _outcome(name, turned=TRUTH[name].processes).diagnosis.verdict
    if not truth.causes:
        assert verdict is None
        return
    assert verdict is not None and verdict.cause in truth.causes, verdict
    assert verdict.ranks == tuple(sorted(truth.processes - 1 - rank for rank in truth.ranks)), verdict


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FIRST_BY_TIME])
def test_the_verdict_does_not_depend_on_which_rank_was_a_moment_earlier(name: str) -> None:
    """Clocks of hosts differ, and ranks come in any order: ranks, line and sentence are the same, but for how long they waited."""
    verdicts = [_outcome(name, clocks=clocks).diagnosis.verdict for clocks in (None, 1, 2, 3)]
    said = {v and (v.ranks, v.where, re.sub(r" [\d.]+ (ms|s|min)\b", "", v.sentence)) for v in verdicts}
    assert len(said) == 1, said


@pytest.mark.parametrize("name", [name for name in NAMES if not TRUTH[name].causes])
def test_a_healthy_job_with_a_file_missing_blames_nobody(name: str) -> None:
    """A black box that was not collected is not a death."""
    for rank in range(TRUTH[name].processes):
        assert _outcome(name, lost=rank).diagnosis.status == "ok"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broadcast_skipped", "continued to all_reduce #15 of group default_pg at broadcast_skipped.py:12"),
        ("message_sizes", "sends [[4]] at message_sizes.py:11, rank 1 expects [[8]] at message_sizes.py:13"),
    ],
)
def test_a_difference_is_shown_with_both_lines(name: str, sentence: str) -> None:
    """The call in which the rank is instead, or the other end of the message."""
    verdict = _outcome(name).diagnosis.verdict
    assert verdict is not None and sentence in verdict.sentence


def pack(folder: Path) -> None:
    """Writes the archives, with paths of this machine replaced by others of equal length: boxes hold offsets."""
    import torch

    roots = (Path(__file__).parents[2], Path(torch.__file__).parents[4])
    RECORDED.mkdir(exist_ok=True)
    for note in sorted(folder.glob("*.json")):
        boxes = sorted((folder / note.stem).rglob("*.box"))
        with tarfile.open(RECORDED / f"{note.stem}.tar.gz", "w:gz", compresslevel=9) as tar:
            for path, name in ((note, note.name), *((box, f"{note.stem}/{box.name}") for box in boxes)):
                data = path.read_bytes()
                for root in roots:
                    own = str(root).encode()
                    data = data.replace(own, b"/home/user".ljust(len(own), b"_")[: len(own)])
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
