"""The files that keep the output of ranks never stop a rank: a print() that finds no room raises in the training."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.supervise.logs import KEPT_BYTES, find_room, trim

TALK = "for number in range(60_000):\n    print('x' * 119, number)\nprint('the end')\n"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with 6 MB, as shared memory is in many a container."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount")
    words = [mount or "false", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_rank_that_prints_more_than_the_folder_of_the_job_holds_trains_on(
    small: Path, tmp_path: Path
) -> None:
    (tmp_path / "talk.py").write_text(TALK)
    words = "run --standalone --no-lighthouse --no-watch --nproc-per-node 1 talk.py"
    done = subprocess.run(
        [sys.executable, "-m", "allranks", *words.split()],
        cwd=tmp_path, env={**os.environ, "ALLRANKS_DIR": str(small)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("the end\n") and done.stdout.count("\n") == 60_001


def test_logs_go_where_they_have_room_and_nowhere_where_files_are_limited(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ulimit -f lets a print() into a file fail, and not one to the terminal."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = find_room(small / "job")
    assert found is not None and found.is_relative_to(tmp_path) and not found.is_relative_to(small)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, limits[1]))
    try:
        assert find_room(tmp_path / "job") is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_beginning_of_a_long_log_is_given_back_while_it_grows(tmp_path: Path) -> None:
    """Its length and its end stay, and the writer goes on where it was."""
    path = tmp_path / "none_x" / "attempt_0" / "0" / "stdout.log"
    path.parent.mkdir(parents=True)
    with path.open("wb", buffering=0) as log:
        for _ in range(16):
            log.write(b"y" * (1 << 20))
        log.write(b"last\n")
        trim(tmp_path, most=8 << 20, scarce=0)
        facts = path.stat()
        assert facts.st_size == (16 << 20) + 5 and facts.st_blocks * 512 < 4 << 20
        trim(tmp_path, most=1 << 40, scarce=1 << 60)
        assert path.stat().st_blocks * 512 < 2 * KEPT_BYTES
        log.write(b"more\n")
    assert path.read_bytes().endswith(b"ylast\nmore\n")
