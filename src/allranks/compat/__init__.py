"""The names of elastic_harness, for scripts written for it.

    from allranks.compat.scaling import ElasticScalingManager     # change the imports, or

    import allranks.compat
    allranks.compat.install()                                     # leave them: `import elastic_harness…` works
    from elastic_harness.checkpoint import CheckpointManager

Its modules have no files: NAMES lists their content, and an import finder creates them. See also docs/understand/moving.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from allranks.errors import InputError

HARNESS = "elastic_harness"
#: module of elastic_harness -> our modules -> names; "A=B" is our B under the name A.
NAMES: dict[str, dict[str, str]] = {
    "agent": {
        "elastic.world": "ElasticTrainingConfig WorldInfo barrier broadcast_object cleanup_distributed get_rank get_world_info get_world_size "
        "is_main_process setup_distributed_environment",
    },
    "checkpoint": {
        "checkpoint.config": "AsyncSavePolicy CheckpointConfig CheckpointLoadConfig CheckpointTier",
        "checkpoint.manager": "CheckpointManager",
        "checkpoint.state": "CheckpointState create_checkpoint_state load_checkpoint_to_model",
        "checkpoint.stores.backends": "MemorySnapshotBackend NVMeBackend S3Backend",
        "compat.shapes": "S3Config SharedMemorySnapshotBackend",
        "errors": "CheckpointError CheckpointLoadError CheckpointSaveError CheckpointValidationError MemoryLimitExceeded",
    },
    "config_validator": {
        "elastic.config": "ValidationResult validate_config validate_elastic_config validate_s3_access",
    },
    "data": {
        "elastic.data": "DatasetState ResumableDataset",
        "elastic.index": "TokenIndexFile",
        "compat.shapes": "IndexBuilder",
    },
    "errors": {
        "errors": "ElasticTrainingError=AllranksError CheckpointError CheckpointLoadError CheckpointSaveError "
        "CheckpointValidationError ConfigurationError DataLoadingError DistributedSetupError MemoryLimitExceeded "
        "TopologyChangeError",
    },
    "metrics": {
        "elastic.metrics": "CheckpointMetrics GradientMetrics LRMetrics RecoveryEvent RecoveryMetrics TrainingMetrics",
    },
    "scaling": {
        "elastic.scaling": "ElasticScalingManager GradAccumulationConfig GradientAccumulationManager LRScalingManager "
        "RoundingMode ScalingConfig ScalingRule WarmupScheduler create_lr_scheduler_with_warmup",
    },
}
#: Submodules in which elastic_harness defines its classes.
DEEP = {
    "agent": ("elastic_agent",),
    "checkpoint": ("checkpointing", "memory_snapshot", "storage_backends"),
    "data": ("index_builder", "resumable_dataset"),
    "scaling": ("lr_scaling",),
}
_ROOTS = [__name__]  # `install` adds HARNESS


def _split(fullname: str) -> tuple[str, str, str]:
    """Splits a name into (root, module, submodule); the root is "" for a module that is not ours."""
    root = next((root for root in _ROOTS if f"{fullname}.".startswith(f"{root}.")), "")
    name, _, deep = fullname.removeprefix(root).removeprefix(".").partition(".")
    return root, name, deep


class _Finder(MetaPathFinder, Loader):
    """Finds `allranks.compat.X` and `allranks.compat.X.Y`, and the same below elastic_harness."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module in the tables above, else None."""
        root, name, deep = _split(fullname)
        if not root or (name and name not in NAMES) or (deep and deep not in DEEP.get(name, ())):
            return None
        return ModuleSpec(fullname, self, is_package=not deep)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code for `python -m`: only the index builder is a program."""
        if not fullname.endswith(".index_builder"):
            return None
        program = (
            "import runpy, sys\n"
            "words = [word for word in sys.argv[1:] if word != '--data-files']\n"
            "sys.argv = ['allranks', 'index', 'build', *words]\n"
            "runpy.run_module('allranks', run_name='__main__')"
        )
        return compile(program, fullname, "exec")

    def exec_module(self, module: ModuleType) -> None:
        """Fills a module with our names."""
        _, name, _ = _split(module.__name__)
        if not name:  # elastic_harness itself, which imports its modules on first use
            vars(module)["__getattr__"] = _of_harness
            return
        module.__doc__ = f"{HARNESS}.{name}"
        vars(module)["__all__"] = names = []
        for home, wanted in NAMES[name].items():
            source = importlib.import_module(f"allranks.{home}")
            for word in wanted.split():
                theirs, _, ours = word.partition("=")
                setattr(module, theirs, getattr(source, ours or theirs))
                names.append(theirs)


if not any(str(type(finder)) == str(_Finder) for finder in sys.meta_path):  # a reload creates a new class
    sys.meta_path.append(_Finder())


def _of_harness(name: str) -> ModuleType:
    if name not in NAMES:
        raise AttributeError(f"module '{HARNESS}' has no attribute {name!r}")
    return importlib.import_module(f"{HARNESS}.{name}")


def install() -> None:
    """Makes `elastic_harness` importable in this process. InputError if the real one is installed."""
    if HARNESS in _ROOTS:
        return
    if HARNESS in sys.modules or importlib.util.find_spec(HARNESS) is not None:
        raise InputError(
            "elastic_harness itself is installed: remove it, or import from allranks.compat instead"
        )
    _ROOTS.append(HARNESS)
