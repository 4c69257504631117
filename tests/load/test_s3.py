"""Dumps in a real object store, read by URL."""

from __future__ import annotations

import pickle

import pytest

from allranks.errors import InputError
from allranks.load import LoadOptions, load_paths
from checkpoint.s3server import KEY, SECRET, S3Server

from .dumps import dump, entry

obstore = pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server(s3: S3Server) -> S3Server:
    """The server, with a folder of dumps in the bucket "ready"."""
    from obstore.store import S3Store

    store = S3Store(
        "ready", endpoint=s3.endpoint, access_key_id=KEY, secret_access_key=SECRET, region="us-east-1",
        client_options={"allow_http": True},
    )  # fmt: skip
    for rank in range(3):
        obstore.put(
            store, f"job/dumps/trace_{rank}", pickle.dumps(dump([entry(i, i + 1) for i in range(5)]), 2)
        )
    obstore.put(store, "job/dumps/notes.txt", b"hello")
    return s3


@pytest.fixture(autouse=True)
def credentials(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user has them: in the environment."""
    for name, value in (("AWS_ENDPOINT_URL", server.endpoint), ("AWS_ACCESS_KEY_ID", KEY),
                        ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_REGION", "us-east-1")):  # fmt: skip
        monkeypatch.setenv(name, value)


def test_a_folder_in_a_bucket_is_a_folder() -> None:
    """All objects below the prefix are fetched and noted."""
    result = load_paths(["s3://ready/job/dumps"])
    assert [(trace.header.rank, len(trace.calls)) for trace in result.traces] == [(0, 5), (1, 5), (2, 5)]
    assert result.traces[0].path == "s3://ready/job/dumps/trace_0"
    assert [note.path for note in result.files if note.status == "skipped"] == [
        "s3://ready/job/dumps/notes.txt"
    ]


def test_one_object_is_a_file() -> None:
    """The URL of a dump itself."""
    assert [trace.header.rank for trace in load_paths(["s3://ready/job/dumps/trace_2"]).traces] == [2]


def test_an_object_beyond_the_limit_is_not_fetched() -> None:
    """It is noted with its size."""
    result = load_paths(["s3://ready/job/dumps"], LoadOptions(max_file_bytes=100, allow_nothing=True))
    assert not result.traces
    assert sum("exceed the limit" in note.note for note in result.files) == 3


def test_a_prefix_without_objects_is_an_error() -> None:
    """One sentence, with the URL."""
    with pytest.raises(InputError, match="s3://ready/nothing/here"):
        load_paths(["s3://ready/nothing/here"])
