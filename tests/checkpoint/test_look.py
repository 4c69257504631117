"""Looking for checkpoints: a store that does not answer, damaged ones only, or another job's never mean step 1."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier, NVMeBackend, S3Backend
from allranks.checkpoint.manifest import MANIFEST, decode_manifest, encode_manifest
from allranks.checkpoint.stores import StoreSpec, open_store
from allranks.checkpoint.stores.file_store import FileStore
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.cli import main
from allranks.drill.ranks import Ranks
from allranks.elastic.topology import ElasticJob
from allranks.errors import (
    CheckpointLoadError,
    CheckpointUnreachable,
    ConfigurationError,
    TopologyChangeError,
)

from .jobs import flip, make_job, make_state, same_state
from .s3server import Proxy, S3Server


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nobody listens, and where no other test can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def _with_s3(tmp_path: Path, bucket: str, options: dict[str, str], **more: Any) -> CheckpointConfig:
    quick = {"timeout_s": "2", "max_retries": "0"}
    return CheckpointConfig(
        nvme_path=tmp_path / "nvme", s3_bucket=bucket, s3_prefix="run/1", s3_options={**options, **quick},
        memory_snapshot_interval=0, **{"wait_for_stores_s": 0.3, **more},
    )  # fmt: skip


@contextmanager
def _as_nobody() -> Iterator[None]:
    """As a user who may not read what root owns; a normal user stays what it is."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def _start(config: CheckpointConfig) -> Any:
    model, optimizer = make_job()
    with CheckpointManager(config) as manager:
        return ElasticJob(model, optimizer, checkpoint=manager).start(1, 0)


def test_a_store_that_is_down_stops_the_start(
    s3: S3Server, bucket: str, tmp_path: Path, nowhere: str
) -> None:
    """The error names tier, address, what it answered and what to do; an empty disk beside it changes nothing."""
    S3Backend(bucket, "run/1", options=s3.options()).save(make_state(7), "checkpoint_step_00000007")
    config = _with_s3(tmp_path, bucket, s3.options(nowhere))
    model, optimizer = make_job()
    with CheckpointManager(config) as manager:
        with pytest.raises(
            CheckpointUnreachable, match=rf"\[S3\] s3://{bucket}/run/1 did not answer"
        ) as caught:
            manager.restore(model, optimizer)
        assert "on_unreachable" in caught.value.hint and "allranks checkpoint ls" in caught.value.hint
        with pytest.raises(CheckpointUnreachable):
            manager.load_checkpoint()
    with pytest.raises(TopologyChangeError, match="did not answer"):
        _start(config)
    assert _start(_with_s3(tmp_path, bucket, s3.options())).step == 8


def test_a_store_that_says_no_is_quoted(s3: S3Server, tmp_path: Path) -> None:
    """A bucket that does not exist, and keys that are wrong, are answers."""
    for config in (
        _with_s3(tmp_path, "no-such-bucket", s3.options()),
        _with_s3(tmp_path, "ready", {**s3.options(), "secret_access_key": "wrong"}),
    ):
        with CheckpointManager(config) as manager, pytest.raises(CheckpointUnreachable) as caught:
            manager.restore(*make_job())
        said = str(caught.value)
        assert re.search(r"\[S3\] \S+ answered: (NoSuchBucket|403 Forbidden|SignatureDoesNotMatch)", said), (
            said
        )
        assert "did not answer" not in said


def test_a_store_that_comes_back_in_time_is_read(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    """Looking is repeated before anybody gives up."""
    S3Backend(bucket, "run/1", options=s3.options()).save(make_state(7), "checkpoint_step_00000007")
    answers = iter(["cut", 503, "cut"])
    with Proxy(s3.ports["s3"], lambda line: next(answers, None)) as proxy:
        config = _with_s3(tmp_path, bucket, s3.options(proxy.endpoint), wait_for_stores_s=60.0)
        assert _start(config).step == 8
        assert len(proxy.judged) == 3


def test_a_wrong_key_stops_the_start_at_once(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    """Waiting does not make a key right."""
    asked: list[str] = []
    with Proxy(s3.ports["s3"], asked.append) as proxy:
        options = {**s3.options(proxy.endpoint), "secret_access_key": "wrong"}
        config = _with_s3(tmp_path, bucket, options, wait_for_stores_s=60.0)
        with pytest.raises(TopologyChangeError, match="403") as caught:
            _start(config)
    assert len(asked) == 1 and "check AWS_SECRET_ACCESS_KEY" in caught.value.hint


def test_an_unreachable_store_can_be_skipped_on_purpose(
    s3: S3Server, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user's word, and it is logged."""
    options = {**s3.options(), "secret_access_key": "wrong"}
    NVMeBackend(tmp_path / "nvme").save(make_state(3), "checkpoint_step_00000003")
    assert _start(_with_s3(tmp_path, bucket, options, on_unreachable="ignore")).step == 4
    assert "on_unreachable=ignore" in caplog.text
    with pytest.raises(ConfigurationError, match="on_unreachable"):
        CheckpointConfig(on_unreachable="maybe")


def test_an_older_checkpoint_on_the_disk_is_not_taken_while_the_store_is_down(
    s3: S3Server, bucket: str, tmp_path: Path, nowhere: str
) -> None:
    """The store may hold something newer."""
    NVMeBackend(tmp_path / "nvme").save(make_state(3), "checkpoint_step_00000003")
    with pytest.raises(TopologyChangeError, match="may hold a newer checkpoint"):
        _start(_with_s3(tmp_path, bucket, s3.options(nowhere)))


def test_what_this_process_holds_in_memory_needs_no_store(
    s3: S3Server, bucket: str, tmp_path: Path, nowhere: str
) -> None:
    """A live job goes back to its own snapshot while the store is down: nothing newer was given to it."""
    config = dataclasses.replace(
        _with_s3(tmp_path, bucket, s3.options(nowhere)), nvme_path=None, memory_snapshot_interval=1
    )
    model, optimizer = make_job()
    with CheckpointManager(config) as manager:
        manager.step(4, model, optimizer)
        state = manager.restore(model, optimizer)
        assert state is not None and state.step == 4


def test_a_folder_without_permission_stops_the_start(tmp_path: Path) -> None:
    """It may be full of checkpoints."""
    folder = tmp_path / "nvme"
    NVMeBackend(folder).save(make_state(3), "checkpoint_step_00000003")
    config = CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0)
    assert _start(config).step == 4
    folder.chmod(0)
    try:
        with _as_nobody(), pytest.raises(TopologyChangeError, match="Permission denied") as caught:
            _start(config)
    finally:
        folder.chmod(0o755)
    named = re.search(r"ls -ld '(.*)'", caught.value.hint)
    # the folder, or the one above it that is closed already
    assert named and str(folder).startswith(named[1])


def test_the_place_where_a_disk_is_mounted_is_a_store() -> None:
    """ext4 has a folder there that only root may look into: it holds no checkpoints."""
    folder = Path(tempfile.mkdtemp(prefix="allranks-look-"))  # where nobody may look, too
    try:
        folder.chmod(0o777)
        (folder / "lost+found").mkdir(mode=0o700)
        with _as_nobody():
            assert FileStore(folder).names() == []
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["a file", "a link to nowhere", "a link to itself"])
def test_a_path_that_is_no_folder_stops_the_start(tmp_path: Path, what: str) -> None:
    """A link whose target is not mounted is not an empty folder."""
    path = tmp_path / "nvme"
    if what == "a file":
        path.write_text("x")
    else:
        path.symlink_to(path if "itself" in what else tmp_path / "not-mounted")
    with pytest.raises(TopologyChangeError, match="did not answer"):
        _start(CheckpointConfig(nvme_path=path, memory_snapshot_interval=0, wait_for_stores_s=0.1))


def test_an_empty_store_is_a_first_start_unless_a_checkpoint_is_asked_for(tmp_path: Path) -> None:
    """`missing_ok=False` is for jobs that must go on from something."""
    model, optimizer = make_job()
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path / "new")) as manager:
        assert manager.restore(model, optimizer) is None
        with pytest.raises(CheckpointLoadError, match="no checkpoint") as caught:
            manager.restore(model, optimizer, missing_ok=False)
    assert str(tmp_path / "new") in str(caught.value)


def _one_cannot_look(rank: int, world_size: int, folder: str) -> str:
    path = Path(folder) / str(rank)
    if rank == 1:
        path.write_text("not a folder")
    try:
        _start_in_group(CheckpointConfig(nvme_path=path, memory_snapshot_interval=0, wait_for_stores_s=0.1))
    except TopologyChangeError as error:
        return str(error)
    return "started"


def _start_in_group(config: CheckpointConfig) -> None:
    model, optimizer = make_job()
    with CheckpointManager(config) as manager:
        ElasticJob(model, optimizer, checkpoint=manager).start()


def test_all_ranks_stop_when_one_cannot_look(tmp_path: Path) -> None:
    """With the same sentence, which names the rank."""
    with Ranks(_one_cannot_look, 2, (str(tmp_path),)) as ranks:
        texts = ranks.values(timeout_s=60)
    assert texts[0] == texts[1] and f"rank 1: [NVME] {tmp_path / '1'} did not answer" in texts[0]


def _one_cannot_read(rank: int, world_size: int, folder: str) -> str:
    path = Path(folder) / str(rank)
    for step in (2, 3):
        NVMeBackend(path).save(make_state(step), f"checkpoint_step_{step:08d}")
    if rank == 1:
        data = path / "checkpoint_step_00000003" / "rank-00000.safetensors"
        data.unlink()
        data.symlink_to(data)
    try:
        _start_in_group(CheckpointConfig(nvme_path=path, memory_snapshot_interval=0, wait_for_stores_s=0.1))
    except TopologyChangeError as error:
        return str(error)
    return "started"


def test_all_ranks_stop_when_one_can_list_but_not_read(tmp_path: Path) -> None:
    """Nobody goes back to an older step; nothing is quarantined for it."""
    with Ranks(_one_cannot_read, 2, (str(tmp_path),)) as ranks:
        texts = ranks.values(timeout_s=60)
    assert all("stopped answering: step 3 in NVME: rank 1: " in text for text in texts)
    assert not list(tmp_path.glob("*/quarantine"))


def _one_has_lost_its_disk(rank: int, world_size: int, folder: str) -> str:
    path = Path(folder) / str(rank)
    if rank == 0:
        NVMeBackend(path).save(make_state(3), "checkpoint_step_00000003")
    try:
        _start_in_group(CheckpointConfig(nvme_path=path, memory_snapshot_interval=0))
    except TopologyChangeError as error:
        return str(error)
    return "started"


def test_a_checkpoint_that_only_some_ranks_have_does_not_mean_step_1(tmp_path: Path) -> None:
    """A node came back with an empty disk: the others' checkpoints are still there."""
    with Ranks(_one_has_lost_its_disk, 2, (str(tmp_path),)) as ranks:
        texts = ranks.values(timeout_s=60)
    assert texts[0] == texts[1] and "step 3 is complete on 1 of 2 ranks only" in texts[0]


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00000.json", MANIFEST])
def test_every_restart_stops_when_all_checkpoints_are_damaged(tmp_path: Path, file: str) -> None:
    """What lies in quarantine is remembered; the way to start from scratch is named, and works."""
    config = CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0)
    for step in (1, 2):
        NVMeBackend(tmp_path).save(make_state(step), f"checkpoint_step_{step:08d}")
        flip(tmp_path / f"checkpoint_step_{step:08d}" / file, -20)
    for _ in range(3):
        with pytest.raises(TopologyChangeError, match=r"(?s)step[ _]0*2\b.*step[ _]0*1\b") as caught:
            _start(config)
        assert f"allranks checkpoint set-aside '{tmp_path}'" in caught.value.hint
    assert main(["checkpoint", "set-aside", str(tmp_path)]) == 0
    assert _start(config).restored == "fresh"
    assert len(list(tmp_path.glob("set-aside-*/**/rank-00000.json"))) == 2


def test_every_restart_stops_when_all_objects_are_damaged(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    """The same for a bucket; nothing that is set aside is ever deleted by a later save of the same step."""
    backend = S3Backend(bucket, "run/1", options=s3.options())
    backend.save(make_state(1), "checkpoint_step_00000001")
    store = open_store(StoreSpec(f"s3://{bucket}/run/1", s3.options()))
    assert isinstance(store, KeyedStore)
    key = next(key for key, _ in store.blobs.keys("") if key.endswith("safetensors"))
    store.blobs.put(key, [memoryview(b"gone")], 4)
    config = _with_s3(tmp_path, bucket, s3.options())
    for _ in range(2):
        with pytest.raises(TopologyChangeError, match=r"step[ _]0*1\b"):
            _start(config)
    options = [word for k, v in s3.options().items() for word in ("--option", f"{k}={v}")]
    assert main(["checkpoint", "set-aside", f"s3://{bucket}/run/1", *options]) == 0
    assert _start(config).restored == "fresh"
    backend.save(make_state(1), "checkpoint_step_00000001")
    backend.save(make_state(2), "checkpoint_step_00000002")
    assert backend.cleanup_old_checkpoints(1) == ["checkpoint_step_00000001"]
    assert key in [key for key, _ in store.blobs.keys("")]


def test_set_aside_keeps_whole_checkpoints_and_ls_names_what_is_in_quarantine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is deleted: a checkpoint that was set aside loads by its path."""
    for step in (1, 2):
        NVMeBackend(tmp_path).save(make_state(step), f"checkpoint_step_{step:08d}")
    FileStore(tmp_path).quarantine("checkpoint_step_00000002", "flipped")
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "in quarantine" in shown and "flipped" in shown
    assert main(["checkpoint", "set-aside", str(tmp_path)]) == 0
    where = capsys.readouterr().out.split()[-1]
    assert FileStore(tmp_path).names() == []
    assert same_state(NVMeBackend(where).load("checkpoint_step_00000001"), make_state(1))


def test_a_checkpoint_of_a_newer_version_alone_does_not_mean_step_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older installation cannot read it, and must not start over."""
    monkeypatch.setattr("allranks.checkpoint.manifest.SCHEMA", 0)
    NVMeBackend(tmp_path).save(make_state(3), "checkpoint_step_00000003")
    with pytest.raises(TopologyChangeError, match="schema 1 is newer"):
        _start(CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0))


def test_a_newest_checkpoint_of_a_newer_version_is_neither_passed_over_nor_replaced(
    tmp_path: Path,
) -> None:
    """An older step in its place would train, and then save over it. The user may decide so."""
    backend = NVMeBackend(tmp_path)
    backend.save(make_state(2), "checkpoint_step_00000002")
    head = decode_manifest(backend.store.read("checkpoint_step_00000002", MANIFEST), "")
    sealed = encode_manifest(dataclasses.replace(head, schema=2, step=3))
    shutil.copytree(tmp_path / "checkpoint_step_00000002", tmp_path / "checkpoint_step_00000003")
    (tmp_path / "checkpoint_step_00000003" / MANIFEST).write_bytes(sealed)
    config = CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0, keep_last_n=1)
    refused = r"schema 2 is newer than 1.*No older checkpoint was restored"
    with pytest.raises(TopologyChangeError, match=refused) as e:
        _start(config)
    assert "upgrade allranks" in str(e.value.hint)
    assert _start(dataclasses.replace(config, on_unreachable="ignore")).step == 3
    assert (tmp_path / "checkpoint_step_00000003" / MANIFEST).read_bytes() == sealed


def _save_as(folder: Path, job: str, step: int) -> None:
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0, checkpoint_interval=1, job=job)
    with CheckpointManager(config) as manager:
        manager.step(step, model, optimizer)


def test_another_jobs_checkpoint_is_not_restored_unless_it_is_named(tmp_path: Path) -> None:
    """Nor is a fresh start made over it: its steps would replace the other job's."""
    _save_as(tmp_path, "alpha", 5)
    name = "checkpoint_step_00000005"
    assert decode_manifest((tmp_path / name / MANIFEST).read_bytes(), name).job == "alpha"
    config = CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0, job="beta")
    with pytest.raises(TopologyChangeError, match="belongs to job 'alpha'") as caught:
        _start(config)
    assert "from_job" in caught.value.hint
    assert _start(dataclasses.replace(config, from_job="alpha")).step == 6
    assert _start(dataclasses.replace(config, job="alpha")).step == 6


def test_a_checkpoint_without_a_jobs_name_still_loads(tmp_path: Path) -> None:
    """Those of earlier versions have none."""
    NVMeBackend(tmp_path).save(make_state(3), "checkpoint_step_00000003")
    assert _start(CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0, job="beta")).step == 4


def test_without_a_path_nothing_is_written_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two jobs, or two users, share no folder that nobody named."""
    assert CheckpointConfig().nvme_path is None
    with CheckpointManager(CheckpointConfig(s3_bucket="b")) as manager:
        assert list(manager.places.specs()) == [CheckpointTier.S3]
    with CheckpointManager(CheckpointConfig()) as manager:
        assert list(manager.places.specs()) == []
    assert "no checkpoint will outlive this process: set nvme_path or s3_bucket" in caplog.text
