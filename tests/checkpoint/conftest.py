"""Real storage for the checkpoint tests: small and read-only filesystems."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Tests train small models here and fork ranks afterwards: OpenMP's threads would not survive the fork, and the
# first parallel operation of a child would wait for them for ever.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where stores lie is noted in the user's home folder: not in that of the user who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder bind-mounted read-only: even root cannot write."""
    folder = tmp_path / "sealed"
    folder.mkdir()
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    """A bucket name of the test's own."""
    return "t" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
