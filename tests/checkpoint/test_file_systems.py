"""Disks that are not a local ext4: without locks, NFS, without a size, and what a saver that died left on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.checkpoint.stores import Attempt
from allranks.checkpoint.stores.file_store import FileStore, _sync_folder

from .kernel_answers import FILE_SYSTEMS

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


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_file_system_without_locks_or_exchange_is_saved_to_read_and_kept_in_order(
    tmp_path: Path, file_system: str
) -> None:
    """Nothing could be restored without locks, and nothing was ever removed or replaced on NFS."""
    done = subprocess.run(
        [sys.executable, "-c", SAVE_READ_REMOVE, file_system, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "['one', 'two'] 2 True ['two']\n", done.stderr
    assert os.listdir(tmp_path) == ["two"]


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


def test_a_file_system_that_cannot_sync_folders_is_no_failure() -> None:
    """CIFS and some FUSE file systems answer EINVAL; so does /proc."""
    _sync_folder(Path("/proc"))
