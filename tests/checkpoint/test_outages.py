"""The table of outages in docs/understand/storage.md, cell by cell, for a whole job, for replicas and for elastic jobs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .outages import in_two_ranks, make, start
from .s3server import S3Server

pytestmark = [
    pytest.mark.usefixtures("forks"),
    pytest.mark.timeout(900),  # for hanging only: one fixture makes all cells of the whole job
]

DOCS = Path(__file__).parents[2] / "docs" / "understand" / "storage.md"
TIERS = ("MEMORY", "PEER", "NVME", "S3")


def _table() -> dict[tuple[str, str, bool], str]:
    """(outage, tier, whether another tier has an older one) → what the documentation promises."""
    lines = DOCS.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.strip().startswith("| outage |"))
    cells = {}
    for line in lines[first + 2 :]:
        if not line.strip().startswith("|"):
            break
        outage, tiers, alone, other = (
            re.sub(r"\(.*?\)|`", "", text).strip() for text in line.strip(" |").split("|")
        )
        for tier in tiers.split(", "):
            cells[outage, tier, False], cells[outage, tier, True] = alone, other
    return cells


CELLS = _table()
IDS = [f"{outage}-{tier}-{'older' if other else 'alone'}" for outage, tier, other in CELLS]


OUTAGES = (
    "down at start",
    "down in the middle",
    "wrong key",
    "no permission",
    "keys ran out",
    "a web page in its place",
    "an untrue list",
    "not mounted",
    "empty",
    "newest damaged",
    "all damaged",
    "slow",
    "down while training",
)
OF_OBJECT_STORES = ("keys ran out", "a web page in its place", "an untrue list")
#: What a tier cannot suffer; the documentation says why.
IMPOSSIBLE = {
    *(("MEMORY", outage) for outage in OUTAGES if outage not in ("empty", "newest damaged", "all damaged")),
    ("NVME", "wrong key"),
    ("PEER", "no permission"),
    *((tier, outage) for tier in ("PEER", "NVME") for outage in OF_OBJECT_STORES),
    *((tier, "not mounted") for tier in ("PEER", "S3")),
}


def test_every_outage_of_every_tier_has_its_cells() -> None:
    """Nothing is left out of the table but what a tier cannot suffer, alone and beside an older checkpoint."""
    everything = {(outage, tier) for outage in OUTAGES for tier in TIERS if (tier, outage) not in IMPOSSIBLE}
    assert set(CELLS) == {(outage, tier, other) for outage, tier in everything for other in (False, True)}


def test_only_empty_stores_lead_to_step_1() -> None:
    """And these only when no other tier has anything."""
    fresh = {cell for cell, outcome in CELLS.items() if outcome == "step 1"}
    assert fresh == {("empty", tier, False) for tier in TIERS}


#: An elastic start restores as any other: in every run the first cell of each outcome, in `make test-all` all of them.
FIRST = {outcome: cell for cell, outcome in reversed(CELLS.items())}.values()


def _starts() -> Iterator[Any]:
    for cell, name in zip(CELLS, IDS, strict=True):
        yield pytest.param(cell, "replicas", id=f"{name}-replicas")
        marks = [] if cell in FIRST else [pytest.mark.everything]
        yield pytest.param(cell, "elastic", id=f"{name}-elastic", marks=marks)


@pytest.mark.parametrize(("cell", "mode"), _starts())
def test_a_start_in_an_outage_does_what_the_table_says(
    cell: tuple[str, str, bool], mode: str, tmp_path: Path, s3: S3Server
) -> None:
    """And so does the restart after it."""
    outage, tier, other = cell
    tmp_path.chmod(0o755)
    with contextlib.ExitStack() as stack:
        setup = make(tier, outage, other, tmp_path, s3, stack)
        outcomes = start(setup, mode)
    assert set(outcomes) == {CELLS[cell]}


#: A replica reads every cell; that two ranks agree is tried in every run for each outcome and each outage of each tier, in
#: `make test-all` for all of them.
AGREED = {*FIRST, *{(outage, tier): (outage, tier, other) for outage, tier, other in CELLS if other}.values()}


@pytest.fixture(scope="module")
def whole_job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, s3: S3Server
) -> Iterator[list[dict[str, Any]]]:
    """All cells in one pair of ranks."""
    everything = request.config.getoption("--everything")
    with contextlib.ExitStack() as stack:
        setups = {}
        for number, ((outage, tier, other), name) in enumerate(zip(CELLS, IDS, strict=True)):
            if not everything and (outage, tier, other) not in AGREED:
                continue
            folder = tmp_path_factory.mktemp(f"cell{number}")
            setups[name] = make(tier, outage, other, folder, s3, stack)
        yield in_two_ranks(setups)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=name, marks=[] if cell in AGREED else [pytest.mark.everything])
        for cell, name in zip(CELLS, IDS, strict=True)
    ],
)
def test_a_whole_job_in_an_outage_does_what_the_table_says_on_all_ranks(
    cell: tuple[str, str, bool], whole_job: list[dict[str, Any]]
) -> None:
    """Two ranks of one process group, started twice."""
    name = dict(zip(CELLS, IDS, strict=True))[cell]
    assert {outcome for rank in whole_job for outcome in rank[name]} == {CELLS[cell]}
