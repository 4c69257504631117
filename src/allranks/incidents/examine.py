"""Looks at the ranks of one incident: their stacks into its folder, then the judgement of all that lies there.

Runs in the agent. Each part may fail without the others; what failed is said in `missing`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.errors import AllranksError
from allranks.incidents.folder import write_atomically
from allranks.incidents.judge import Observed, judge_folder
from allranks.model.diagnosis import Diagnosis, Finding
from allranks.model.stacks import Capture, StacksReport
from allranks.report import as_json, text
from allranks.stacks import CollectOptions, Selection, collect, find_targets, write_bundle
from allranks.stacks.as_json import report_json

log = logging.getLogger("allranks.agent")


@dataclass(frozen=True)
class Examination:
    """What one look found."""

    stacks: StacksReport | None = None
    diagnosis: Diagnosis | None = None
    missing: tuple[str, ...] = ()

    @property
    def verdict(self) -> Finding | None:
        """Who and why; None when nothing is wrong, or nothing could be read."""
        return self.diagnosis.verdict if self.diagnosis is not None else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The guilty ones."""
        return self.verdict.ranks if self.verdict is not None else ()

    def facts(self) -> dict[str, Any]:
        """As an incident keeps them; a look that found no verdict changes none."""
        stacks = {} if self.stacks is None else {"stacks": report_json(self.stacks)}
        if self.verdict is None:
            return stacks
        return {**stacks, "verdict": as_json.verdict(self.verdict), "ranks": self.ranks}


@dataclass(frozen=True)
class Others:
    """The parts of other nodes. `us` is our agent's name: with others there is one folder of stacks per agent."""

    us: str
    wait: Callable[[], list[str]]  # until they have come; returns what is missing


def examine(
    folder: Path,
    pids: dict[int, int],
    *,
    job_folder: Path,
    observed: Observed,
    others: Others | None = None,
) -> Examination:
    """Collects stacks of `pids` (rank -> pid) into `folder` and judges all that lies there."""
    missing: list[str] = []
    place = folder / "stacks" / others.us if others else folder / "stacks"
    if pids:
        collect_stacks(place, pids, job_folder, missing)
    if others is not None:
        missing += others.wait()
    observed.write(folder)
    diagnosis, report = judge_folder(folder, missing)
    if diagnosis is not None:
        write_atomically(folder / "diagnosis.json", json.dumps(as_json.to_object(diagnosis)))
        write_atomically(folder / "diagnosis.txt", "\n".join(text.render(diagnosis)) + "\n")
    return Examination(report, diagnosis, tuple(missing))


def collect_stacks(
    folder: Path, pids: dict[int, int], job_folder: Path, missing: list[str]
) -> Capture | None:
    """The stacks of these ranks of this node, kept in the folder; what could not be read is added to `missing`."""
    try:
        targets = find_targets(Selection(pids=tuple(pids.values()), box_folders=(job_folder,)))
        capture = collect(targets, CollectOptions(raw_folder=folder))
        folder.mkdir(parents=True, exist_ok=True)
        write_bundle(capture, folder)
        seen = {process.rank for process in capture.processes if process.snapshots}
        missing += [f"stacks of rank {rank}: nothing could be read" for rank in sorted(set(pids) - seen)]
        return capture
    except (AllranksError, OSError) as error:
        missing.append(f"stacks: {error}")
    except Exception as error:  # our own mistake: the rest of the evidence still counts
        log.exception("stacks could not be read")
        missing.append(f"stacks: {error!r}")
    return None
