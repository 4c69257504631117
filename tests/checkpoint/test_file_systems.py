"""Disks that are not a local ext4: without locks, NFS, without a size, and what a saver that died left on them."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, NVMeBackend, stores
from allranks.checkpoint.stores import Attempt
from allranks.checkpoint.stores.file_store import FileStore, sync_folder
from allranks.drill.ranks import Ranks
from allranks.errors import CheckpointLoadError, CheckpointSaveError, CheckpointUnreachable

from .jobs import contents, make_job, make_state
from .kernel_answers import FILE_SYSTEMS, answer_as

SAVE_READ_REMOVE = """
import sys
from pathlib import Path
from allranks.checkpoint.stores import Attempt
from allranks.checkpoint.stores.file_store import FileStore
from tests.checkpoint.kernel_answers import answer_as

answer_as(sys.argv[1])
store = FileStore(Path(sys.argv[2]))
for number, name in enumerate(("one", "two", "two")):
    attempt = Attempt(name, f"{number:012x}")
    store.write(attempt, "data", [memoryview(b"%d" % number)], 1)
    store.commit(attempt, b"{}")
with store.reading("two"):
    print(store.names(), store.read("two", "data").decode(), store.remove("one"), store.names())
"""


@pytest.mark.parametrize("file_system", [name for name in FILE_SYSTEMS if "file server" not in name])
def test_a_file_system_without_locks_or_exchange_is_saved_to_read_and_kept_in_order(
    tmp_path: Path, file_system: str
) -> None:
    """Nothing could be restored without locks, and nothing was ever removed or replaced on NFS."""
    done = subprocess.run(
        [sys.executable, "-c", SAVE_READ_REMOVE, file_system, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "['one', 'two'] 2 True ['two']\n", done.stderr
    assert contents(tmp_path) == ["two"]


def _commit(store: FileStore, name: str, token: str, data: bytes) -> None:
    attempt = Attempt(name, token)
    store.write(attempt, "data", [memoryview(data)], len(data))
    store.commit(attempt, b"{}")


def test_a_checkpoint_that_was_moved_aside_when_its_saver_died_is_still_there(tmp_path: Path) -> None:
    """Without an exchange of names there is a moment in which neither the old nor the new one has the name."""
    store = FileStore(tmp_path)
    _commit(store, "step_00000001", "0" * 12, b"old")
    (tmp_path / "step_00000001").rename(tmp_path / f".replaced-step_00000001-{'1' * 12}")
    assert store.names() == ["step_00000001"]
    assert store.read("step_00000001", "data") == b"old"


def test_what_was_replaced_and_is_still_read_stays_hidden(tmp_path: Path) -> None:
    """The new one has the name: the old one must not come back."""
    store = FileStore(tmp_path)
    _commit(store, "step_00000001", "0" * 12, b"old")
    (tmp_path / "step_00000001").rename(tmp_path / f".replaced-step_00000001-{'1' * 12}")
    _commit(store, "step_00000001", "2" * 12, b"new")
    assert store.names() == ["step_00000001"]
    assert store.read("step_00000001", "data") == b"new"


def test_a_folder_in_which_a_file_grows_belongs_to_a_live_saver(tmp_path: Path) -> None:
    """On a file server locks of other nodes may not be seen, and a folder does not change while its file grows."""
    store = FileStore(tmp_path)
    folder = tmp_path / f".saving-step_00000001-{'0' * 12}"
    folder.mkdir()
    (folder / "rank-00000.safetensors.part").write_bytes(b"growing")
    os.utime(folder, (1, 1))
    assert store.tidy() == []
    os.utime(folder / "rank-00000.safetensors.part", (1, 1))
    assert store.tidy() == [folder.name]


@pytest.mark.needs_root
def test_a_disk_that_does_not_tell_its_size_is_not_full(tmp_path: Path) -> None:
    """tmpfs without a limit, and some FUSE file systems: 0 blocks, none of them free."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=0", "none", str(tmp_path)], check=True)
    try:
        assert os.statvfs(tmp_path).f_blocks == 0
        store = FileStore(tmp_path)
        _commit(store, "step_00000001", "0" * 12, b"whole")
        assert store.names() == ["step_00000001"]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_file_system_that_cannotsync_folders_is_no_failure() -> None:
    """CIFS and some FUSE file systems answer EINVAL; so does /proc."""
    sync_folder(Path("/proc"))


def _start_on(rank: int, world: int, file_system: str, folder: Path) -> str:
    """What a start on such a file system comes to."""
    assert _restored(folder) == 0  # and every module is loaded
    answer_as(file_system)
    try:
        return f"step {_restored(folder)}"
    except CheckpointUnreachable as error:
        return str(error)


@pytest.mark.parametrize(
    ("file_system", "answer"),
    [
        ("a file server that is gone", "Input/output error"),
        ("a file server that was replaced", "Stale file handle"),
    ],
)
def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path, file_system: str, answer: str) -> None:
    """The folder can be opened, but the kernel has no list of what is in it."""
    with Ranks(_start_on, 1, (file_system, tmp_path), backend=None) as ranks:
        [said] = ranks.values(60)
    assert f"[NVME] {tmp_path} did not answer: {answer}" in said


def _restored(folder: Path, wait_s: float = 0.1) -> int:
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0, wait_for_stores_s=wait_s)
    with CheckpointManager(config) as manager:
        state = manager.restore(model, optimizer)
    return 0 if state is None else state.step


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, mounted."""
    point = tmp_path / "a share"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "none", str(point)], check=True)
    yield point / "run"
    subprocess.run(["umount", "-l", str(point)], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.needs_root
def test_a_share_that_is_not_mounted_is_not_an_empty_folder(share: Path) -> None:
    """Neither is it saved to: what lies below would be hidden when the share is back."""
    NVMeBackend(share).save(make_state(3), "checkpoint_step_00000003")
    assert _restored(share) == 3
    subprocess.run(["umount", "-l", str(share.parent)], check=True)
    with pytest.raises(CheckpointUnreachable, match=f"{share.parent} is not mounted") as caught:
        _restored(share)
    assert f"mount '{share.parent}'" in (caught.value.hint or "")
    with pytest.raises(CheckpointSaveError, match="is not mounted"):
        NVMeBackend(share).save(make_state(4), "checkpoint_step_00000004")
    FileStore(share).set_aside()  # the user's word
    assert _restored(share) == 0


@pytest.mark.needs_root
def test_a_folder_that_its_owner_has_emptied_is_empty(share: Path) -> None:
    """The share is mounted: anyone who removes checkpoints there knows it."""
    NVMeBackend(share).save(make_state(3), "checkpoint_step_00000003")
    shutil.rmtree(share)
    assert _restored(share) == 0


@pytest.mark.needs_root
def test_a_share_that_is_mounted_while_the_job_waits_is_read(share: Path) -> None:
    """After a power cut jobs may start before their file server is there."""
    NVMeBackend(share).save(make_state(3), "checkpoint_step_00000003")
    kept = share.parent.parent / "kept"
    shutil.copytree(share, kept / "run")
    subprocess.run(["umount", "-l", str(share.parent)], check=True)
    asked = threading.Event()

    class Mounting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is not mounted" in record.getMessage() and not asked.is_set():
                asked.set()
                subprocess.run(["mount", "--bind", str(kept), str(share.parent)], check=True)

    handler = Mounting()
    logging.getLogger("allranks.checkpoint").addHandler(handler)
    try:
        assert _restored(share, wait_s=60) == 3
    finally:
        logging.getLogger("allranks.checkpoint").removeHandler(handler)
    assert asked.is_set()


def test_a_mount_point_of_fstab_that_is_not_mounted_is_not_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a machine that has never saved there."""
    table = tmp_path / "fstab"
    point = tmp_path / "a share"
    table.write_text(
        f"# what\nserver:/x {str(point).replace(' ', chr(92) + '040')} nfs defaults 0 0\nnone none swap\n"
    )
    monkeypatch.setattr(stores, "FSTAB", table)
    with pytest.raises(CheckpointUnreachable, match=f"{point} is not mounted") as caught:
        _restored(point / "run")
    assert f"allranks checkpoint set-aside '{point}/run'" in (caught.value.hint or "")
    assert _restored(tmp_path / "elsewhere") == 0
    FileStore(point / "run").set_aside()  # as the hint says
    assert _restored(point / "run") == 0


def test_a_checkpoint_without_its_manifest_is_not_nothing(tmp_path: Path) -> None:
    """A copy that was cut short: it was there once, so the start is not a first one; nor is it moved away."""
    NVMeBackend(tmp_path).save(make_state(3), "checkpoint_step_00000003")
    (tmp_path / "checkpoint_step_00000003" / "manifest.json").unlink()
    for _ in range(2):
        with pytest.raises(CheckpointLoadError, match=r"checkpoint_step_00000003: it has no manifest.json"):
            _restored(tmp_path)
    assert (tmp_path / "checkpoint_step_00000003" / "rank-00000.safetensors").exists()


def test_a_manifest_that_cannot_be_looked_at_is_not_missing(tmp_path: Path) -> None:
    """A link to itself stands for what a file server may answer about one file."""
    manifest = tmp_path / "checkpoint_step_00000003" / "manifest.json"
    manifest.parent.mkdir()
    manifest.symlink_to(manifest)
    with pytest.raises(CheckpointUnreachable, match="Too many levels of symbolic links"):
        _restored(tmp_path)
