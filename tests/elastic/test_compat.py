"""Scripts written for elastic_harness run: every documented name is there and is ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forks")

DOCUMENTED = {
    "agent": "ElasticTrainingConfig WorldInfo get_world_info setup_distributed_environment cleanup_distributed "
    "is_main_process get_rank get_world_size barrier broadcast_object",
    "checkpoint": "CheckpointConfig CheckpointState CheckpointManager CheckpointTier MemorySnapshotBackend NVMeBackend "
    "S3Backend S3Config SharedMemorySnapshotBackend create_checkpoint_state load_checkpoint_to_model "
    "CheckpointLoadConfig AsyncSavePolicy MemoryLimitExceeded",
    "scaling": "ScalingRule ScalingConfig LRScalingManager GradAccumulationConfig GradientAccumulationManager "
    "ElasticScalingManager WarmupScheduler RoundingMode create_lr_scheduler_with_warmup",
    "metrics": "TrainingMetrics CheckpointMetrics RecoveryMetrics RecoveryEvent GradientMetrics LRMetrics",
    "errors": "ElasticTrainingError ConfigurationError DistributedSetupError CheckpointError CheckpointLoadError "
    "CheckpointSaveError CheckpointValidationError TopologyChangeError DataLoadingError",
    "config_validator": "ValidationResult validate_elastic_config validate_s3_access validate_config",
    "data": "ResumableDataset TokenIndexFile DatasetState IndexBuilder",
}


def _run(code: str, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_finder_of_another_package_with_the_same_name_is_not_taken_for_ours() -> None:
    """Editable installs and lazy importers bring classes called _Finder."""
    theirs = "import sys\nclass _Finder:\n    find_spec = staticmethod(lambda *_: None)\nsys.meta_path.append(_Finder())\n"
    _run(theirs + "import allranks.compat.data")


def test_every_documented_import_works_after_install() -> None:
    """`from elastic_harness.X import Y` for all of them, deep paths too, and twice is once."""
    lines = ["import allranks.compat", "allranks.compat.install()", "allranks.compat.install()"]
    for module, names in DOCUMENTED.items():
        lines.append(f"from elastic_harness.{module} import {', '.join(names.split())}")
    lines += [
        "from elastic_harness.checkpoint.storage_backends import CheckpointLoadConfig as A",
        "from elastic_harness.scaling.lr_scaling import LRScalingManager as B",
        "from elastic_harness.data.index_builder import IndexBuilder",
        "import elastic_harness.metrics",
        "import elastic_harness.scaling.lr_scaling as deep",
        "assert deep.LRScalingManager is B",
        "import allranks.elastic.scaling as ours",
        "assert LRScalingManager is ours.LRScalingManager is B and A is CheckpointLoadConfig",
        "assert issubclass(CheckpointSaveError, ElasticTrainingError)",
        "print('all there')",
    ]
    assert _run("\n".join(lines)).strip() == "all there"


def test_the_index_builder_is_a_program(tmp_path: Path) -> None:
    """As in elastic_harness: `python -m …data.index_builder` builds an index."""
    (tmp_path / "text.jsonl").write_text('{"text": "a b"}\n')
    words = ["--data-files", "text.jsonl", "--output", "out.index"]
    command = [sys.executable, "-m", "allranks.compat.data.index_builder", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.index").is_file()


def test_every_documented_import_works_with_the_package_replaced() -> None:
    """`sed s/elastic_harness/allranks.compat/`: the deep paths too, and they hold the same classes."""
    import importlib

    from allranks.compat import DEEP, NAMES

    for name in NAMES:
        ours = importlib.import_module(f"allranks.compat.{name}")
        for module in DEEP.get(name, ()):
            deep = importlib.import_module(f"allranks.compat.{name}.{module}")
            assert all(getattr(deep, one) is getattr(ours, one) for one in ours.__all__)


def test_a_real_elastic_harness_is_not_hidden(tmp_path: Path) -> None:
    """Two packages of one name: refused, with the choice."""
    (tmp_path / "elastic_harness.py").write_text("")
    code = (
        "import allranks.compat\n"
        "try:\n    allranks.compat.install()\nexcept Exception as error:\n    print(error)\n"
    )
    assert "elastic_harness itself is installed" in _run(code, tmp_path)


def test_the_documented_training_setup_runs(tmp_path: Path) -> None:
    """The guide's own example, in one process: resume from nothing, train, save, resume."""
    code = f"""
import allranks.compat, os, torch
allranks.compat.install()
from elastic_harness.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier, create_checkpoint_state, load_checkpoint_to_model
from elastic_harness.scaling import ElasticScalingManager, ScalingConfig, GradAccumulationConfig
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
manager = CheckpointManager(CheckpointConfig(checkpoint_interval=2, memory_snapshot_interval=1, nvme_path={str(tmp_path)!r}))
scaling = ElasticScalingManager(
    lr_config=ScalingConfig(base_lr=1e-4, base_batch_size=8, base_world_size=4),
    accum_config=GradAccumulationConfig(target_global_batch_size=256, local_batch_size=8, base_world_size=4),
    optimizer=optimizer, strategy="constant_batch")
assert manager.load_checkpoint() is None
for step in range(1, 5):
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
    if manager.should_checkpoint(step, CheckpointTier.NVME):
        manager.save_checkpoint(create_checkpoint_state(step, model, optimizer), tier=CheckpointTier.NVME)
manager.wait_for_pending_saves()
state = manager.load_checkpoint(tier=CheckpointTier.NVME)
load_checkpoint_to_model(state, model, optimizer)
result = scaling.on_topology_change(3)
manager.close()
print(state.step, state.world_size, result)
"""
    assert _run(code).strip() == "4 1 {'lr': 0.0001, 'accumulation_steps': 11}"


def test_the_index_builder_writes_its_json_file(tmp_path: Path) -> None:
    """The builder's JSON file is there, and never overwrites data."""
    import importlib

    IndexBuilder = importlib.import_module("allranks.compat.data").IndexBuilder

    class Words:
        def encode(self, text: str) -> list[int]:
            return list(range(len(text.split())))

    (tmp_path / "train.json").write_text('{"text": "a b"}\n')
    built = IndexBuilder(Words(), entry_interval=10).build(
        [tmp_path / "train.json"], tmp_path / "train.index"
    )
    assert built.total_tokens == 2
    assert (tmp_path / "train.json").read_text() == '{"text": "a b"}\n'
    IndexBuilder(Words()).build([tmp_path / "train.json"], tmp_path / "other.bin")
    assert '"total_tokens": 2' in (tmp_path / "other.json").read_text()
