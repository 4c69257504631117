"""Incident folders in a real object store."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from allranks.incidents.publish import IncidentUploader
from allranks.load import load_paths
from checkpoint.s3server import KEY, SECRET, S3Server
from load.dumps import dump, entry

pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has them: in the environment."""
    for name, value in (("AWS_ENDPOINT_URL", s3.endpoint), ("AWS_ACCESS_KEY_ID", KEY),
                        ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_REGION", "us-east-1")):  # fmt: skip
        monkeypatch.setenv(name, value)


def test_a_kept_incident_can_be_diagnosed_from_the_bucket(tmp_path: Path) -> None:
    """What was copied has the layout of the folder, and grows with it."""
    from allranks.checkpoint.stores import StoreSpec
    from allranks.checkpoint.stores.object_store import ObjectBlobs

    keeper = IncidentUploader(ObjectBlobs(StoreSpec("s3://ready/incidents")))
    folder = tmp_path / "i-7"
    (folder / "boxes").mkdir(parents=True)
    for rank in range(2):
        (folder / "boxes" / f"trace_{rank}").write_bytes(pickle.dumps(dump([entry(0, 1)]), 2))
        keeper.keep(folder)
    keeper.close()
    found = load_paths(["s3://ready/incidents/i-7"])
    assert [(trace.header.rank, trace.path) for trace in found.traces] == [
        (rank, f"s3://ready/incidents/i-7/boxes/trace_{rank}") for rank in range(2)
    ]
