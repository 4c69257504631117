"""The drill matrix of `benchmarks/loop.py --matrix`: every kind of fault at every point, one real job for each cell.

Cells run side by side (--jobs), each result is one JSON line at the end of a file (--out), and a run that was ended
(--minutes) continues there. Processes are forked from one that has imported torch (--exec: started as a user does).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before numpy is imported: its threads do not survive a fork
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import forks  # noqa: E402
from allranks.drill.plan import make_plan  # noqa: E402
from allranks.drill.run import ALARMS, FaultResult, run_drill  # noqa: E402
from allranks.drill.self_faults import FAULTS  # noqa: E402
from allranks.incidents.folder import read_incidents  # noqa: E402

TRAIN = Path(__file__).with_name("_loop_matrix_train.py")
RANKS, LAST, PAUSE_AT = 3, 40, 25
DEATHS = ("kill", "exit", "segfault", "raise")
KINDS_REPLICA = (
    *DEATHS, "stop", "hang", "busy", "lock", "gil", "loader", "subprocess", "queue", "fifo", "file_lock", "network",
    "store", "partition",
)  # fmt: skip
KINDS_WHOLE = (*KINDS_REPLICA, "recv", "extra")
KINDS_CUDA = ("kill", "raise", "stop", "hang", "busy", "gil", "loader")
POINTS = ("0", "1", "5", "19", "60", "pause", "heal", "save", "regroup", "last")
LATE_S = 2.0  # the promise: noticed at most so long after the allowed silence
LIMIT_S = 120.0  # of one cell: a hang that only time tells is named after 46 s


@dataclass(frozen=True)
class Cell:
    """One job with one judged fault."""

    mode: str  # whole | replica
    kind: str
    point: str
    number: int
    device: str = "cpu"

    @property
    def rank(self) -> int:
        """Changes from cell to cell."""
        return self.number % RANKS


def list_cells(kinds: list[str], points: list[str], modes: list[str], device: str) -> list[Cell]:
    """All cells. Every run of as many as there are kinds has each kind once and each point about as often."""
    chosen: dict[str, Iterable[str]] = {"whole": KINDS_WHOLE, "replica": KINDS_REPLICA}
    if device == "cuda":
        chosen = dict.fromkeys(chosen, KINDS_CUDA)
    rows = [(m, k) for k in KINDS_WHOLE for m in modes if k in chosen[m] and (not kinds or k in kinds)]
    turns = range(len(points))
    found = [(m, k, points[(row + turn) % len(points)]) for turn in turns for row, (m, k) in enumerate(rows)]
    return [Cell(m, k, p, number, device) for number, (m, k, p) in enumerate(found)]


def faults_of(cell: Cell) -> list[dict[str, Any]]:
    """The plan: the judged fault last, after the one that makes a heal or a regroup."""
    own: dict[str, Any] = {"kind": cell.kind, "rank": cell.rank}
    other = (cell.rank + 1) % RANKS
    if cell.point == "heal":  # the rank that comes back, or any rank of a job that restores
        return [{"kind": "kill", "rank": cell.rank, "at_step": 12}, {**own, "at_step": 0, "at": "heal"}]
    if cell.point == "regroup":
        return [{"kind": "kill", "rank": other, "at_step": 12}, {**own, "at_step": 0, "at": "regroup"}]
    if cell.point == "save":
        return [{**own, "at_step": 15, "at": "save"}]
    step = {"pause": PAUSE_AT + 5, "last": LAST - 1}.get(cell.point)
    return [{**own, "at_step": int(cell.point) if step is None else step}]


def command_of(cell: Cell, folder: Path, notice_s: float) -> list[str]:
    """`allranks run` for this cell."""
    steps = 100_000 if cell.point != "last" else LAST
    mode = (
        ["--replicas", str(RANKS)]
        if cell.mode == "replica"
        else ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "3", "--recovery", "on"]
    )
    pause = ["--pause-at", str(PAUSE_AT)] if cell.point == "pause" else []
    return [
        *(
            "allranks",
            "run",
            *mode,
            "--notice-s",
            str(notice_s),
            "--job",
            f"matrix-{os.getpid()}-{cell.number}",
        ),
        *(str(TRAIN), str(folder / "out"), str(steps), "--device", cell.device, *pause),
    ]


def run_cell(cell: Cell, folder: Path, notice_s: float) -> dict[str, Any]:
    """Runs one job until all its faults are explained, and judges the last one."""
    faults = faults_of(cell)
    incidents = folder / "drill" / "incidents"

    fired = folder / "drill" / f"fired.{len(faults) - 1}"

    def explained() -> bool:
        if not fired.exists():
            return False
        at = float(json.loads(fired.read_text() or "{}").get("at", 1e99))
        alarms = [i for i in read_incidents(incidents) if i["kind"] in ALARMS]
        if len(alarms) < len(faults):  # the first one is that of the fault before
            return False
        later = [i for i in alarms if i["opened"] >= at]
        settled = [i for i in later if i["kind"] == "partition" or _is_explained(incidents, i)]
        return bool(settled) and len(settled) == len(later)

    began = time.monotonic()
    boxes = folder / "boxes"
    boxes.mkdir(parents=True)
    # the job is ended when its verdict is known: ranks that are stuck in a collective do not hear SIGTERM
    os.environ |= {"ALLRANKS_DIR": str(boxes), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}
    plan = make_plan({"seed": cell.number, "faults": faults}, ranks=RANKS)
    result = run_drill(
        plan,
        command_of(cell, folder, notice_s),
        folder / "drill",
        timeout_s=LIMIT_S,
        quiet=True,
        until=explained,
    )
    row = {**asdict(cell), "rank": cell.rank, "seconds": round(time.monotonic() - began, 1)}
    row |= _judge(result.faults[-1], incidents, cell.point)
    row |= {"alarms": result.false_alarms, "evictions": result.false_evictions, "exit": result.exit_code}
    if row["alarms"] or not (row["right_rank"] and row["right_cause"]):
        row["log"] = (folder / "drill" / "output.log").read_text(errors="replace")[-3000:]
        row["incidents"] = [
            [i["kind"], (i["verdict"] or {}).get("sentence")] for i in read_incidents(incidents)
        ]
    return row


def _is_explained(incidents: Path, incident: dict[str, Any]) -> bool:
    """The verdict of all evidence is there; of a hang also what is done about it."""
    judged = (incidents / str(incident["id"]) / "diagnosis.json").exists()
    return judged and bool(incident["kind"] == "death" or incident.get("action"))


def _judge(found: FaultResult, incidents: Path, point: str) -> dict[str, Any]:
    """How far noticing was from what is allowed, and whether rank and cause are right."""
    verdict = found.verdict or {}
    ranks, late_s, limit_s = verdict.get("ranks"), None, 0.0
    if found.incident and found.noticed_s is not None:
        story = json.loads((incidents / found.incident / "incident.json").read_text())
        at = {moment["name"]: float(moment["at"]) for moment in story["timeline"]}
        late_s = found.noticed_s
        if "overdue" in at:  # a hang: the silence that the job's history allows does not count
            late_s = at["noticed"] - at["overdue"]
            limit_s = at["overdue"] - at["last good step"]
    return {
        "fired": found.fired,
        "noticed_s": found.noticed_s,
        "limit_s": limit_s,
        "late_s": late_s,
        "ranks": ranks,
        "cause": verdict.get("cause"),
        "where": verdict.get("where"),
        "right_rank": ranks == [found.rank] or (found.kind == "partition" and ranks == []),
        "right_cause": verdict.get("cause")
        in (*FAULTS[found.kind].causes, *(["not_started"] if point == "heal" else [])),
    }


def run_matrix(
    cells: list[Cell], jobs: int, out: Path, notice_s: float, *, minutes: float, fork: bool
) -> None:
    """Side by side, each in a process of its own; every result is appended to the file as it comes.

    No cell is begun after `minutes`; what the file has already is not run again.
    """
    done = {_key(row) for row in read_rows(out)}
    waiting = [cell for cell in cells if _key(asdict(cell)) not in done]
    folder = Path(tempfile.mkdtemp(prefix="allranks-matrix-"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_source(), os.environ.get("PYTHONPATH"))))
    if fork:
        forks.load()
    over = time.monotonic() + 60 * minutes if minutes else math.inf
    running: dict[int, float] = {}  # process of a cell -> when it must have ended
    while running or (waiting and time.monotonic() < over):
        while waiting and len(running) < jobs and time.monotonic() < over:
            cell = waiting.pop(0)
            place = folder / f"{cell.mode}-{cell.number}"
            running[_fork_cell(cell, place, out, notice_s, fork)] = time.monotonic() + LIMIT_S + 25
        for pid, limit in list(running.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del running[pid]
            elif time.monotonic() > limit:
                os.kill(pid, signal.SIGTERM if time.monotonic() < limit + 25 else signal.SIGKILL)
        time.sleep(0.05)


def _fork_cell(cell: Cell, folder: Path, out: Path, notice_s: float, fork: bool) -> int:
    """The process that runs it and writes its line."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if fork:
            forks.own_template()
        row = run_cell(cell, folder, notice_s)
    except BaseException as error:  # one broken cell does not end the others
        row = {**asdict(cell), "rank": cell.rank, "fired": False, "error": repr(error)}
    with open(out, "a") as file:
        file.write(json.dumps(row) + "\n")  # one small write: lines of several processes do not mix
    print(_line(row), file=sys.stderr, flush=True)
    right = row.get("right_rank") and row.get("right_cause") and not row.get("alarms")
    if right and (row.get("late_s") or 0) <= LATE_S:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _source() -> str:
    return str(Path(__file__).parents[1] / "src")


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["device"], row["mode"], row["kind"], row["point"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The results in a file, oldest first; a line that was cut short is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _line(row: dict[str, Any]) -> str:
    right = f"rank {'right' if row.get('right_rank') else 'WRONG'}, cause {'right' if row.get('right_cause') else 'WRONG'}"
    late = row.get("late_s")
    noticed = "NOT noticed" if late is None else f"noticed {late:.2f} s late ({row['noticed_s']:.2f} s)"
    name = f"{row['mode']:>7} {row['kind']:>10} {row['point']:>7} rank {row['rank']}"
    if not row.get("fired"):
        return f"{name}: did not fire {row.get('error', '')}"
    return f"{name}: {noticed}, {right} ({row.get('cause')} {row.get('ranks')}), {row['seconds']} s"


def summarise(path: Path) -> dict[str, Any]:
    """Prints the table of each mode and the promises; returns the numbers. The last result of a cell counts."""
    rows = {_key(row): row for row in read_rows(path)}
    for device, mode in sorted({key[:2] for key in rows}):
        table = {key[2:]: row for key, row in rows.items() if key[:2] == (device, mode)}
        points = [p for p in POINTS if any(point == p for _, point in table)]
        print(f"\n| {mode}, {device}: rank / cause / late | {' | '.join(points)} |")
        print("|---" * (len(points) + 1) + "|")
        for kind in dict.fromkeys(kind for kind, _ in table):
            print(f"| {kind} | {' | '.join(_cell(table.get((kind, p))) for p in points)} |")
    fired = [row for row in rows.values() if row.get("fired")]
    late = sorted(row["late_s"] for row in fired if row["late_s"] is not None)
    numbers = {
        "cells": len(rows),
        "fired": len(fired),
        "unnoticed": len(fired) - len(late),
        "right_rank": sum(row["right_rank"] for row in fired) / max(1, len(fired)),
        "right_cause": sum(row["right_cause"] for row in fired) / max(1, len(fired)),
        "late_s_median": late[len(late) // 2] if late else None,
        "late_s_max": late[-1] if late else None,
        "later_than_2_s": sum(value > LATE_S for value in late),
        "false_alarms": sum(row["alarms"] for row in fired),
    }
    for name, value in numbers.items():
        print(f"{name:>16}  {value if not isinstance(value, float) else round(value, 4)}")
    return numbers


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if not row.get("fired"):
        return "not fired"
    if row["late_s"] is None:
        return "**not noticed**"
    mark = {True: "yes", False: "**no**"}
    return f"{mark[row['right_rank']]} / {mark[row['right_cause']]} / {row['late_s']:.1f} s"
