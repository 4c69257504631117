"""The examples that nothing else runs: each ends well, as its first lines say it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
#: example -> how it is started, what it prints at its end
STARTED = {
    "char_transformer.py": ((sys.executable,), "loss"),
    "checkpoint_training.py": ((sys.executable,), "starting at step 1"),
    "diloco.py": ((sys.executable,), "exchange 3"),
    "hsdp.py": ((sys.executable,), "loss"),
    "proactive.py": ((sys.executable,), "s with the push"),
    "record_train.py": (RUN, "rank 1: "),
    "train_ddp.py": ((sys.executable,), "loss"),
}
ARGUMENTS = {"checkpoint_training.py": ("--folder", "saved", "--steps", "20")}
pytestmark = [pytest.mark.soak, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", STARTED)
def test_the_example_ends_well(name: str, tmp_path: Path) -> None:
    """A short run of it, in a folder of its own."""
    words, wanted = STARTED[name]
    env = {
        **os.environ,
        "STEPS": "30",
        "ROUNDS": "3",
        "OMP_NUM_THREADS": "1",
        "ALLRANKS_DIR": str(tmp_path / "boxes"),
    }
    done = subprocess.run(
        [*words, str(EXAMPLES / name), *ARGUMENTS.get(name, ())],
        env=env, cwd=tmp_path, text=True, timeout=160, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stdout, done.stdout[-4000:]
    assert wanted in done.stdout, done.stdout[-4000:]
