"""An undisturbed run to compare with, and a real etcd."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.drill.ranks import Ranks
from allranks.launch import etcd_server

LAST = 60


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    """host:port of a private etcd."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    server = etcd_server.start(tmp_path / "etcd", port=0)
    yield server.client.removeprefix("http://")
    assert etcd_server.stop(tmp_path / "etcd")


def _alone(rank: int, world: int, folder: Path) -> None:
    from . import train

    os.environ.pop("ALLRANKS_SNAPSHOTS", None)
    train.PACE_S = 0.0
    train.main(folder, LAST)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss of every step of a run of one rank that nothing happens to."""
    import allranks.checkpoint.manager  # noqa: F401 -- imported here, the forked rank need not

    from .jobs import Job

    job = Job(tmp_path_factory.mktemp("undisturbed"), LAST)
    job.gate(LAST)
    with Ranks(_alone, world_size=1, args=(job.folder,), backend=None) as ranks:
        ranks.values(timeout_s=100)
    return [row["loss"] for row in job.timeline()]
