"""Evidence into a verdict: stacks of this node's ranks, black boxes kept in the incident, one diagnosis.

Runs in the agent. Each part may fail without the others; what failed is said in `missing`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.diagnose import DiagnoseOptions, diagnose
from allranks.errors import AllranksError
from allranks.incidents.folder import write_atomically
from allranks.load import LoadOptions, load_paths
from allranks.model.diagnosis import Diagnosis, RankNow
from allranks.model.stacks import Capture, RankState, StacksReport
from allranks.report import as_json, text
from allranks.stacks import (
    CollectOptions,
    Selection,
    Stillness,
    classify,
    collect,
    find_targets,
    read_capture,
    write_bundle,
)
from allranks.stacks.as_json import report_json
from allranks.stacks.progress import WAITS
from allranks.stacks.user_code import is_user_file

log = logging.getLogger("allranks.agent")


@dataclass(frozen=True)
class Examination:
    """What one look found."""

    stacks: StacksReport | None = None
    stacks_json: dict[str, Any] | None = None
    diagnosis: Diagnosis | None = None
    verdict: dict[str, Any] | None = None  # as in `allranks diagnose --json`
    missing: tuple[str, ...] = ()


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
    gone: tuple[int, ...] = (),
    others: Others | None = None,
    still_s: float = Stillness.still_s,
) -> Examination:
    """Collects stacks of `pids` (rank -> pid) into `folder` and diagnoses all that lies there.

    `still_s` is the silence that this job's watch takes for standing still.
    """
    missing: list[str] = []
    place = folder / "stacks" / others.us if others else folder / "stacks"
    capture = collect_stacks(place, pids, job_folder, missing) if pids else None
    if others is not None:
        missing += others.wait()
        capture = _read_all(folder / "stacks", missing) or capture
    report = _classify(capture, still_s, missing) if capture is not None else None
    diagnosis = _diagnose(folder / "boxes", report, gone, missing)
    verdict = None
    if diagnosis is not None:
        whole = as_json.to_object(diagnosis)
        write_atomically(folder / "diagnosis.json", json.dumps(whole))
        write_atomically(folder / "diagnosis.txt", "\n".join(text.render(diagnosis)) + "\n")
        found = whole["verdict"]
        verdict = found if isinstance(found, dict) else None
    if verdict is None and report is not None and report.culprits:
        verdict = _from_stacks(report)
    shape = report_json(report) if report is not None else None
    return Examination(report, shape, diagnosis, verdict, tuple(missing))


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


def _read_all(folder: Path, missing: list[str]) -> Capture | None:
    """The stacks of all nodes together."""
    try:
        return read_capture(folder) if folder.exists() else None
    except (AllranksError, OSError) as error:
        missing.append(f"stacks of other nodes: {error}")
        return None


def _classify(capture: Capture, still_s: float, missing: list[str]) -> StacksReport | None:
    try:
        return classify(capture, stillness=Stillness(still_s=min(still_s, Stillness.still_s)))
    except Exception as error:  # our own mistake: the rest of the evidence still counts
        log.exception("stacks could not be read")
        missing.append(f"stacks: {error!r}")
        return None


def _diagnose(
    boxes: Path, report: StacksReport | None, gone: tuple[int, ...], missing: list[str]
) -> Diagnosis | None:
    now = {
        rank: RankNow(rank, s.cause, nearest_line(s), s.evidence)
        for rank, s in (report.ranks if report else {}).items()
    }
    now.update({rank: RankNow(rank, "gone", "", "its process is gone") for rank in gone})
    try:
        loaded = load_paths([str(boxes)], LoadOptions())
        options = DiagnoseOptions(now_ns=time.time_ns())
        return diagnose(loaded.traces, loaded.files, stacks=now.values(), options=options)
    except (AllranksError, OSError) as error:
        missing.append(f"diagnosis: {error}")
    except Exception as error:  # as above
        log.exception("the black boxes could not be diagnosed")
        missing.append(f"diagnosis: {error!r}")
    return None


def nearest_line(state: RankState) -> str:
    """The user's line nearest the hang: the worker's where a DataLoader worker hangs, else the rank's own."""
    if state.cause == "dataloader_wait":
        for child in state.children:
            file = child.where.split(":")[0]
            if child.cause not in ("queue_wait", "healthy", "unknown") and is_user_file(file):
                return f"{child.where} (DataLoader worker {child.child})"
    return state.where


def verdict_on(ranks: list[int], report: StacksReport | None, reason: str) -> dict[str, Any] | None:
    """The verdict on ranks of one replica that the others have left behind; None when no stack could be read.

    Those that wait for another rank are not the cause; when all do, nobody is accused with confidence.
    """
    states = [report.ranks[rank] for rank in ranks if rank in report.ranks] if report is not None else []
    if not states:
        return None
    guilty = [s for s in states if s.cause not in WAITS and s.cause not in ("healthy", "unknown")]
    state = (guilty or states)[0]
    where = nearest_line(state)
    what = f"{state.cause} at {where}" if where else state.cause
    return {
        "cause": state.cause, "ranks": [state.rank], "group": "", "sequence": None, "confidence": 0.9 if guilty else 0.5,
        "where": where, "sentence": f"{reason} ({what}: {state.evidence})",
    }  # fmt: skip


def _from_stacks(report: StacksReport) -> dict[str, Any]:
    """A verdict from stacks alone, when the black boxes show no open call. Who waits elsewhere is only odd."""
    culprit = report.ranks[report.culprits[0]]
    confidence = 0.5 if culprit.cause in WAITS else 0.6
    return {
        "cause": culprit.cause, "ranks": list(report.culprits), "group": "", "sequence": None,
        "confidence": confidence, "where": nearest_line(culprit), "sentence": report.sentence,
    }  # fmt: skip
