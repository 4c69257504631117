"""Lists that are out of date or cut short: nothing is deleted, and no older step is restored, because of one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier
from allranks.checkpoint.manifest import MANIFEST
from allranks.checkpoint.stores import StoreSpec, checkpoint_name, open_store
from allranks.checkpoint.stores.backends import Backend
from allranks.checkpoint.stores.file_store import FileStore
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.errors import CheckpointUnreachable

from .jobs import make_state
from .s3server import Proxy, S3Server, http_answer

PREFIX = "run"
OLD, NEW = "2026-11-10T06:00:00.000Z", "2026-11-16T06:00:00.000Z"


def _store(s3: S3Server, bucket: str, endpoint: str = "") -> KeyedStore:
    quick = {"timeout_s": "20", "max_retries": "0"}
    store = open_store(StoreSpec(f"s3://{bucket}/{PREFIX}", {**s3.options(endpoint), **quick}))
    assert isinstance(store, KeyedStore)
    return store


def _manager(s3: S3Server, bucket: str, endpoint: str = "", **more: Any) -> CheckpointManager:
    spec = _store(s3, bucket, endpoint).spec
    return CheckpointManager(
        CheckpointConfig(
            s3_bucket=bucket,
            s3_prefix=PREFIX,
            s3_options=dict(spec.options),
            memory_snapshot_interval=0,
            wait_for_stores_s=0.0,
            **more,
        )
    )


def _save(s3: S3Server, bucket: str, *steps: int) -> None:
    for step in steps:
        Backend(_store(s3, bucket).spec).save(make_state(step), checkpoint_name(step))


def _newest(s3: S3Server, bucket: str, endpoint: str = "") -> int:
    with _manager(s3, bucket, endpoint) as manager:
        state = manager.load_checkpoint()
        return state.step if state is not None else 0


@contextmanager
def _listing_only(s3: S3Server, bucket: str, shown: Callable[[str], bool]) -> Iterator[Proxy]:
    """The store behind a proxy whose lists lack some of the keys, and call the others six days old."""
    keys = [key for key, _ in _store(s3, bucket).blobs.keys("") if shown(key)]

    def judge(line: str) -> bytes | None:
        if not line.startswith("GET") or "list-type=2" not in line:
            return None
        wanted = [key for key in keys if "start-after" not in line and _asked(line) in f"{PREFIX}/{key}"]
        entries = "".join(
            f"<Contents><Key>{PREFIX}/{key}</Key><LastModified>{NEW if key[0] == '.' else OLD}</LastModified>"
            "<ETag>&quot;x&quot;</ETag><Size>1</Size></Contents>"
            for key in wanted
        )
        head = f"<Name>b</Name><KeyCount>{len(wanted)}</KeyCount><IsTruncated>false</IsTruncated>"
        body = f"<ListBucketResult>{head}{entries}</ListBucketResult>"
        return http_answer("200 OK", body, "Content-Type: application/xml\r\n")

    with Proxy(s3.ports["s3"], judge) as proxy:
        yield proxy
        assert any("list-type=2" in line for line in proxy.judged), "no list was asked for"


def _asked(line: str) -> str:
    """The prefix that a request for a list names."""
    return line.partition("prefix=")[2].split("&")[0].split(" ")[0].replace("%2F", "/")


def _everything(s3: S3Server, bucket: str) -> list[str]:
    return [key for key, _ in _store(s3, bucket).blobs.keys("")]


def test_a_list_without_manifests_makes_tidy_delete_nothing(s3: S3Server, bucket: str) -> None:
    """The manifests are asked for by name before anything goes."""
    _save(s3, bucket, 1, 2, 3)
    there = _everything(s3, bucket)
    incomplete = pytest.raises(OSError, match=r"list of objects is not complete.*manifest\.json")
    with _listing_only(s3, bucket, lambda key: not key.endswith(MANIFEST)) as proxy, incomplete:
        _store(s3, bucket, proxy.endpoint).tidy()
    assert _everything(s3, bucket) == there and _newest(s3, bucket) == 3


def test_what_was_left_behind_is_still_tidied(s3: S3Server, bucket: str) -> None:
    """The other side of the test above: nothing of this name was ever committed."""
    _save(s3, bucket, 1)
    left = "checkpoint_step_00000009/rank-00000-0123456789ab.safetensors"
    _store(s3, bucket).blobs.put(left, [memoryview(b"x")], 1)
    with _listing_only(s3, bucket, lambda key: True) as proxy:
        assert _store(s3, bucket, proxy.endpoint).tidy() == [left]
    assert left not in _everything(s3, bucket)


def test_what_was_set_aside_is_kept_by_a_list_that_does_not_show_it(s3: S3Server, bucket: str) -> None:
    """Setting aside deletes nothing, a day later neither."""
    _save(s3, bucket, 1)
    assert _store(s3, bucket).set_aside()
    there = _everything(s3, bucket)
    incomplete = pytest.raises(OSError, match="list of objects is not complete")
    with _listing_only(s3, bucket, lambda key: "set-aside" not in key) as proxy, incomplete:
        _store(s3, bucket, proxy.endpoint).tidy()
    assert _everything(s3, bucket) == there


STALE: dict[str, Callable[[str], bool]] = {
    "without manifests": lambda key: not key.endswith(MANIFEST),
    "before the newest": lambda key: not key.startswith(checkpoint_name(3)),
    "before the newest manifest": lambda key: key != f"{checkpoint_name(3)}/{MANIFEST}",
    "before all but the first": lambda key: key.startswith(checkpoint_name(1)),
    "cut after the pointer": lambda key: key.startswith("."),
}


@pytest.mark.parametrize("shown", STALE.values(), ids=STALE)
def test_a_list_that_lacks_the_newest_checkpoint_is_an_outage(
    s3: S3Server, bucket: str, shown: Callable[[str], bool]
) -> None:
    """Neither an older step nor step 1."""
    _save(s3, bucket, 1, 2, 3)
    with (
        _listing_only(s3, bucket, shown) as proxy,
        pytest.raises(CheckpointUnreachable, match="not complete"),
    ):
        _newest(s3, bucket, proxy.endpoint)
    assert _newest(s3, bucket) == 3


def test_a_newest_checkpoint_that_was_deleted_by_hand_is_said(
    s3: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As people do who want an older step; the next save is the newest again."""
    _save(s3, bucket, 1, 2)
    blobs = _store(s3, bucket).blobs
    blobs.delete([key for key, _ in blobs.keys(f"{checkpoint_name(2)}/")])
    assert _newest(s3, bucket) == 1
    assert f"{checkpoint_name(2)} is skipped: it has no {MANIFEST}" in caplog.text
    _save(s3, bucket, 3)
    assert _newest(s3, bucket) == 3
    assert _store(s3, bucket).names() == [checkpoint_name(1), checkpoint_name(3)]


@pytest.mark.parametrize("act", ["remove", "quarantine"])
def test_the_pointer_follows_what_is_taken_away(s3: S3Server, bucket: str, act: str) -> None:
    """The next older one is the newest then, without a complaint."""
    _save(s3, bucket, 1, 2)
    store = _store(s3, bucket)
    assert store.remove(checkpoint_name(2)) if act == "remove" else store.quarantine(checkpoint_name(2), "x")
    assert store.names() == [checkpoint_name(1)] and _newest(s3, bucket) == 1


def test_a_commit_whose_answer_was_lost_keeps_its_files(s3: S3Server, bucket: str) -> None:
    """The saver hears of an error and gives up; the manifest is there, so what it names stays."""

    def judge(line: str) -> str | None:
        return "late" if line.startswith("PUT") and MANIFEST in line else None

    with Proxy(s3.ports["s3"], judge) as proxy, _manager(s3, bucket, proxy.endpoint) as manager:
        manager.save_checkpoint(make_state(1), CheckpointTier.S3)
        manager.wait_for_pending_saves(60)
        assert proxy.judged
    assert _newest(s3, bucket) == 1


def test_a_folder_whose_list_is_out_of_date_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may show a folder as it was a minute ago; what is asked for by name is as it is."""
    for step in (1, 2):
        Backend(StoreSpec(str(tmp_path))).save(make_state(step), checkpoint_name(step))
    real, store = os.scandir, FileStore(tmp_path)
    asked = []

    def stale(path: Any) -> Any:
        asked.append(path)
        return [entry for entry in real(path) if entry.name != checkpoint_name(2)]

    monkeypatch.setattr("allranks.checkpoint.stores.file_store.os.scandir", stale)
    config = CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0, wait_for_stores_s=0.0)
    with CheckpointManager(config) as manager, pytest.raises(CheckpointUnreachable, match="not complete"):
        manager.load_checkpoint()
    assert asked
    monkeypatch.undo()
    assert store.names() == [checkpoint_name(1), checkpoint_name(2)]


def test_a_folder_from_which_the_newest_was_removed_by_hand_restores_the_next(tmp_path: Path) -> None:
    """`rm -r` is an answer."""
    for step in (1, 2):
        Backend(StoreSpec(str(tmp_path))).save(make_state(step), checkpoint_name(step))
    for path in (tmp_path / checkpoint_name(2)).iterdir():
        path.unlink()
    (tmp_path / checkpoint_name(2)).rmdir()
    config = CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0, wait_for_stores_s=0.0)
    with CheckpointManager(config) as manager:
        state = manager.load_checkpoint()
    assert state is not None and state.step == 1
