"""The peers of benchmarks/checkpoint.py: torch.save, safetensors, DCP in all its ways, torch_checkpointing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from _checkpoint_job import Job, Method, Started, nothing

CACHE = Path(os.environ.get("ALLRANKS_BENCH_CACHE", Path.home() / ".cache" / "allranks-bench"))
_PACKAGE = "torch_checkpointing==0.1.1"


def plain(job: Job) -> list[Method]:
    """torch.save and safetensors, with fsync: the whole save is a stall."""
    import torch
    from safetensors.torch import save_file

    def torch_save(path: Path, _: int) -> Started:
        path.mkdir(exist_ok=True)
        with (path / "x.pt").open("wb") as file:
            torch.save(job.state(), file)
            os.fsync(file.fileno())
        return nothing, nothing

    def safetensors(path: Path, _: int) -> Started:
        path.mkdir(exist_ok=True)
        flat = {str(number): tensor for number, tensor in enumerate(job.tensors())}
        save_file(flat, str(path / "x.safetensors"))
        fd = os.open(path / "x.safetensors", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        return nothing, nothing

    return [Method("torch_save", torch_save, stands=True), Method("safetensors", safetensors, stands=True)]


def dcp(job: Job) -> list[Method]:
    """DCP's synchronous and asynchronous saves; "best" is the reused shared stager with async staging."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    kinds = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}

    def sync(path: Path, _: int) -> Started:
        dcp.save(job.state(), checkpoint_id=str(path))
        return nothing, nothing

    def asynchronous(kind: str, best: bool) -> Method:
        stager = DefaultStager(StagingOptions(False, True, True, False)) if best else None

        def start(path: Path, _: int) -> Started:
            more = {"async_stager": stager} if stager else {}
            answer = dcp.async_save(
                job.state(), checkpoint_id=str(path), async_checkpointer_type=kinds[kind], **more
            )
            if stager:
                return answer.staging_completion.result, answer.upload_completion.result
            return nothing, answer.result

        name = f"dcp_async_{kind}{'_best' if best else ''}"
        return Method(name, start, stager.close if stager else nothing)

    return [
        Method("dcp_save", sync, stands=True), asynchronous("thread", False), asynchronous("thread", True),
        asynchronous("process", False), asynchronous("process", True),
    ]  # fmt: skip


def torch_checkpointing(job: Job, left_out: list[str]) -> list[Method]:
    """DCP's successor, if it can be installed beside this torch. It never calls fsync."""
    place = CACHE / _PACKAGE.replace("==", "-")
    if not place.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(place),
            _PACKAGE,
        ]
        if subprocess.run(command, capture_output=True, timeout=120).returncode:
            left_out.append("torch_checkpointing: cannot be installed")
            shutil.rmtree(place, ignore_errors=True)
            return []
    sys.path.insert(0, str(place))
    paths = [str(place), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    try:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        manager = CheckpointManager(config)
    except Exception as error:
        left_out.append(f"torch_checkpointing: {type(error).__name__}: {error}")
        return []

    def start(path: Path, _: int) -> Started:
        manager.save(str(path), job.state())
        return manager._staging_future.result, manager._write_future.result

    return [Method("torch_checkpointing", start, manager.close)]
