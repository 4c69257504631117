"""ALLRANKS_RECORD=auto: every Python process that makes a process group records; all others are as they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.cli.record import RecordFlags, variables
from allranks.load import load_paths

PTH = Path(__file__).parents[2] / "src" / "allranks" / "recording"

#: Two trainers are a world of their own; trainer 0 and a process that it has started make a second group by hand.
JOB = """
import datetime, os, subprocess, sys
import torch
from torch.distributed import init_process_group
import torch.distributed as dist
role, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
limit = datetime.timedelta(seconds=300)

def second(rank):
    store = dist.PrefixStore("weights", dist.FileStore(folder + "/weights", 2))
    return dist.ProcessGroupGloo(store, rank, 2, limit)

if role == "trainer":
    init_process_group("gloo", store=dist.FileStore(folder + "/world", 2), rank=rank, world_size=2, timeout=limit)
    child = subprocess.Popen([sys.executable, __file__, "rollout", "1", folder]) if rank == 0 else None
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if child is not None:
        second(0).broadcast([torch.ones(4)], dist.BroadcastOptions()).wait()
        assert child.wait() == 0
else:
    second(rank).broadcast([torch.ones(4)], dist.BroadcastOptions()).wait()
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python reads our .pth file, as it does where the wheel is installed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import site; site.addsitedir({str(PTH)!r})")
    boxes = variables(RecordFlags(output=str(tmp_path / "boxes"), job="j"), {})
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site"), **boxes}


def _python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_every_process_that_makes_a_group_has_a_black_box(tmp_path: Path, env: dict[str, str]) -> None:
    """A child that a rank starts, and a group that is made without init_process_group, too."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    words = [[sys.executable, str(script), "trainer", str(rank), str(tmp_path)] for rank in range(2)]
    ranks = [subprocess.Popen(one, env=env) for one in words]
    assert [one.wait(timeout=300) for one in ranks] == [0, 0]
    boxes = [load_paths([str(one)]).traces[0] for one in (tmp_path / "boxes").glob("*.box")]
    assert sorted(len(one.calls) for one in boxes) == [1, 3, 4]


def test_a_process_without_groups_is_left_alone(tmp_path: Path, env: dict[str, str]) -> None:
    code = "import sys, torch.distributed as dist; print('allranks.recording.recorder' in sys.modules)"
    done = _python(code, env)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert not (tmp_path / "boxes").exists()


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_without_the_variable_nothing_is_imported(env: dict[str, str], value: str) -> None:
    done = _python("import sys; print('allranks' in sys.modules)", {**env, "ALLRANKS_RECORD": value})
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize("broken", ["raise SystemExit('broken')", "raise OSError('broken')", "1/0", "("])
def test_an_install_that_is_broken_stops_no_program(tmp_path: Path, env: dict[str, str], broken: str) -> None:
    package = tmp_path / "site" / "allranks"
    package.mkdir()
    (package / "__init__.py").write_text(f"print('imported')\n{broken}")
    done = _python("print('runs')", env)
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "runs", "")
    assert broken == "(" or "imported" in done.stdout  # the fault was met


def test_a_torch_that_we_do_not_know_is_left_as_it_is(tmp_path: Path, env: dict[str, str]) -> None:
    """The module that is waited for has nothing of what we look for."""
    package = tmp_path / "site" / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "distributed_c10d.py").write_text("found = 1")
    code = "import torch.distributed.distributed_c10d as c, sys; print(c.found, 'allranks.recording.auto' in sys.modules)"
    done = _python(code, env)
    assert (done.stdout, done.stderr) == ("1 True\n", "")


RAY = """
import datetime, sys
import ray

@ray.remote(num_cpus=0)
class Trainer:
    def train(self, rank, folder):
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.FileStore(folder + "/world", 2), rank=rank, world_size=2)
        dist.all_reduce(torch.ones(4))
        return rank

ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
trainers = [Trainer.remote() for _ in range(2)]
print(ray.get([one.train.remote(rank, sys.argv[1]) for rank, one in enumerate(trainers)]))
ray.shutdown()
"""


@pytest.mark.everything
def test_actors_of_ray_record_too(tmp_path: Path, env: dict[str, str]) -> None:
    pytest.importorskip("ray")
    script = tmp_path / "job.py"
    script.write_text(RAY)
    words = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert "[0, 1]" in done.stdout, done.stderr
    boxes = [load_paths([str(one)]).traces[0] for one in (tmp_path / "boxes").glob("*.box")]
    assert sorted((one.header.rank, len(one.calls)) for one in boxes) == [(0, 1), (1, 1)]
