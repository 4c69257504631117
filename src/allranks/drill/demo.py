"""The demo: one job, a hang, a kill, two recoveries, and the proof.

Runs in the command; ranks are real processes under `allranks run`. All results are read from the files of the job.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from allranks.drill.plan import make_plan
from allranks.drill.run import DrillResult, read_marks, run_drill
from allranks.errors import AllranksError

TRAIN = Path(__file__).with_name("demo_train.py")
REPLICAS = 4
STEPS, PACE_S = 3000, 0.1  # at most; training ends soon after both replicas have healed
HANG_AT, KILL_AT = 40, 150  # steps
NOTICE_S, TIMEOUT_S = 3.0, 420.0
Say = Callable[[str, str], None]  # (kind of line, text)


@dataclass(frozen=True)
class DemoResult:
    """The result of the demo."""

    drill: DrillResult
    loss_difference: float | None  # largest difference from the undisturbed curve
    losses: tuple[float, ...]
    reference: tuple[float, ...]
    identical: bool
    story: str  # path of the page of the hang

    @property
    def good(self) -> bool:
        drill = self.drill
        faults = all(fault.fired and fault.verdict_right for fault in drill.faults)
        close = self.loss_difference is not None and self.loss_difference < 1e-3
        calm = not drill.false_evictions
        return faults and close and calm and self.identical and drill.exit_code == 0


def run_demo(parent: Path, say: Say) -> DemoResult:
    out, folder = parent / "training", parent / "drill"
    out.mkdir(parents=True, exist_ok=True)
    say("title", f"1. Training on {REPLICAS} replicas, with a hang and a kill")
    drill = _drill(folder, out, say)
    losses = _losses(folder)
    if not losses:
        log = folder / "output.log"
        last = log.read_text(errors="replace").splitlines()[-5:] if log.exists() else []
        raise AllranksError(
            f"no step was trained: `allranks run` ended with code {drill.exit_code}",
            hint="\n".join([*last, f"The whole output: {log}"]),
        )
    say("title", "2. The same training undisturbed, in one process, to compare with")
    command = [sys.executable, str(TRAIN), "--reference", "--steps", str(len(losses)), "--out", str(out)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    reference = tuple(json.loads((out / "reference.json").read_text()))
    difference = max((abs(a - b) for a, b in zip(losses, reference, strict=True)), default=None)
    if reference:
        say("text", f"{len(reference)} steps: loss {reference[0]:.3f} → {reference[-1]:.3f}")
    incident = drill.faults[0].incident
    story = str(folder / "incidents" / incident / "story.html") if incident else ""
    return DemoResult(drill, difference, tuple(losses), reference, bool(drill.identical_replicas), story)


def _stop_when_healed(folder: Path, out: Path, say: Say) -> Say:
    """Passes the story on to `say`, and ends training 20 steps after both culprits have healed."""
    # the lines of each story in order; a slow machine may interleave the two stories
    waiting = [["verdict: ", "rank 2 healed"], ["died of SIGKILL", "rank 1 healed"]]

    def follow(kind: str, text: str) -> None:
        say(kind, text)
        for story in [story for story in waiting if story[0] in text]:
            story.pop(0)
            if not story:
                waiting.remove(story)
                if not waiting:
                    (out / "stop_at").write_text(str(len(_losses(folder)) + 20))

    return follow


def _drill(folder: Path, out: Path, say: Say) -> DrillResult:
    hang = {"kind": "hang", "rank": 2, "at_step": HANG_AT}
    kill = {"kind": "kill", "rank": 1, "at_step": KILL_AT}
    plan = make_plan({"faults": [hang, kill]}, ranks=REPLICAS)
    command = [
        "allranks", "run", "--replicas", str(REPLICAS), "--notice-s", str(NOTICE_S), "--job", f"demo-{time.time_ns()}",
        str(TRAIN), "--steps", str(STEPS), "--pace-s", str(PACE_S), "--out", str(out),
    ]  # fmt: skip
    read = _follow(folder / "output.log", _stop_when_healed(folder, out, say))
    result = run_drill(plan, command, folder, timeout_s=TIMEOUT_S, quiet=True, until=read)
    read()
    return result


def _follow(path: Path, say: Say) -> Callable[[], bool]:
    """A function that passes new lines of the story in the job's output to `say`. It returns False, to continue."""
    position, rest = 0, ""

    def read() -> bool:
        nonlocal position, rest
        if path.exists():
            with open(path, errors="replace") as log:
                log.seek(position)
                *lines, rest = (rest + log.read()).split("\n")
                position = log.tell()
            for line in lines:
                for kind, shown in notable(line):
                    say(kind, shown)
        return False

    return read


_RULES: tuple[tuple[str, str, str], ...] = (
    (r"lighthouse at (\S+), page (\S+)", "text", r"lighthouse page: \2"),
    (r"\[rank 0\] (step (?:0|\d*[05]0): loss .*)", "text", r"\1"),
    (r"\d-\d{6}\S*: stalled: (no rank has made progress .*)", "bad", r"noticed: \1"),
    (r"\d-\d{6}\S*: evict: (.*)", "action", r"action: \1"),
    (r"\[allranks [\d:]+\] (?:\S+: )?(Rank \d+ died of SIGKILL)", "bad", r"kill -9: \1"),
    (r"\d-\d{6}\S*: (Rank \d+ .*?)(?:; story: .*)?$", "bad", r"verdict: \1"),
    (r"\[allranks [\d:]+\] (quorum \d+: .*)", "good", r"\1"),
    (r"\[(rank \d+)\] allranks\.manager: (healed: .*)", "good", r"\1 \2"),
)


def notable(line: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of a line of the job's output that belongs to the story."""
    for pattern, kind, shown in _RULES:
        if found := re.search(pattern, line):
            yield kind, found.expand(shown)
            return


def _losses(folder: Path) -> list[float]:
    """The committed losses by step, as the replicas reported them."""
    entries = (entry for entries in read_marks(folder).values() for entry in entries if "loss" in entry)
    losses = {entry["at_step"]: entry["loss"] for entry in entries}
    return [losses[step] for step in sorted(losses)]
