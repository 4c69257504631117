"""Incident folders in an object store."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path

import pytest

from allranks.incidents.publish import IncidentUploader
from allranks.load import load_paths
from checkpoint.s3server import KEY, SECRET, S3Server
from load.dumps import dump, entry


@pytest.fixture
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has them: in the environment."""
    pytest.importorskip("obstore")
    for name, value in (("AWS_ENDPOINT_URL", s3.endpoint), ("AWS_ACCESS_KEY_ID", KEY),
                        ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_REGION", "us-east-1")):  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("credentials")
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


class Bucket:
    """Blobs in a dict; the first put fails."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.failures = 1

    def put(self, key: str, pieces: Iterable[memoryview], length: int) -> None:
        """Keeps them."""
        if self.failures:
            self.failures -= 1
            raise OSError("slow down")
        self.blobs[key] = b"".join(pieces)


def test_incident_folders_are_copied_to_an_object_store_as_they_grow(tmp_path: Path) -> None:
    """A failed copy is made up for by the next one, and what did not change is not copied twice."""
    bucket = Bucket()
    keeper = IncidentUploader(bucket)
    folder = tmp_path / "i-1"
    (folder / "boxes").mkdir(parents=True)
    (folder / "boxes" / "0.box").write_bytes(b"box")
    keeper.keep(folder)
    assert keeper._worker.flush(60)
    keeper.keep(folder)
    keeper.close()
    assert bucket.blobs == {"i-1/boxes/0.box": b"box"}
    assert keeper._copy(folder) == 0
