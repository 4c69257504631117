"""`allranks.jobs()` and `allranks.status(job)`: the jobs of this node and their ranks, as the commands show them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allranks.incidents.job_overview import Overview, find_job, recorded_jobs
from allranks.model.cluster import JobView
from allranks.watch.samples import read_samples


@dataclass(frozen=True)
class RecordedJob:
    """A job that was recorded on this node."""

    name: str
    folder: Path  # of its black boxes; `allranks.diagnose(job.folder)` judges them
    ranks: int  # of this node
    running: bool


def jobs() -> list[RecordedJob]:
    """The jobs that this user recorded on this node, the newest first."""
    found = []
    for folder in recorded_jobs():
        samples = read_samples(folder)
        found.append(RecordedJob(folder.name, folder, len(samples), any(s.alive for s in samples)))
    return found


def status(job: str | Path | None = None) -> JobView:
    """The ranks of a job, by its name or folder: step, call, who waits for whom. Without one: the newest that runs."""
    return Overview(find_job(None if job is None else str(job))).look()
