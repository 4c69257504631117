"""Checks of a node before a job, and explanations of a job's logs.

This module runs the checks. Each returns findings with a hint to copy, never raises, and never waits without a limit. A
`warning` may cost time later, a `problem` will stop the job or lose its evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from allranks.model.options import option

Status = Literal["ok", "warning", "problem", "skipped"]
CLOCK_LIMIT_S = 2.0  # largest difference between clocks


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    status: Status
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class DoctorOptions:
    """What the job will use. None or empty: read from the environment, or not checked."""

    etcd: str = option("", "rendezvous etcd to check, several separated by commas", metavar="HOST:PORT")
    lighthouse: str = option("", "lighthouse to check", metavar="HOST:PORT")
    s3: str = option("", "bucket or s3:// URL to check, with the missing permission named", metavar="BUCKET")
    s3_endpoint: str = option("", "endpoint of an S3-compatible store", metavar="URL")
    checkpoint_folders: tuple[str, ...] = option(
        (),
        "folder whose space and speed are measured; repeatable",
        flags="--checkpoint-folder",
        metavar="PATH",
    )
    ports: tuple[int, ...] = option((), "port that must be free; repeatable", flags="--port", metavar="PORT")
    nproc_per_node: int | None = option(None, "ranks that will run here")
    timeout_s: float = 5.0


def run_checks(options: DoctorOptions) -> list[Check]:
    """Runs all checks."""
    from allranks.doctor import evidence, machine, services

    found: list[Check] = []
    for part in (
        *(machine.check_environment, machine.check_python, machine.check_gpus, machine.check_network),
        *(machine.check_limits, machine.check_shared_memory, machine.check_folders, machine.check_history),
        *(services.check_ports, services.check_etcd, services.check_lighthouse),
        *(services.check_object_store, services.check_clock),
        *(evidence.check_stack_tools, evidence.check_torch_settings),
        *(evidence.check_recorder, evidence.check_recorder_folder),
    ):
        try:
            found += part(options)
        except Exception as error:  # a bug in one check must not hide the others
            text = f"the check itself failed: {type(error).__name__}: {error}"
            found.append(Check(part.__name__.removeprefix("check_"), "warning", text))
    return found
