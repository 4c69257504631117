"""The one judge of an incident: what lies in its folder in, one diagnosis out.

The agent judges with it, and `allranks diagnose FOLDER` judges again with it: the same evidence gives the same verdict.
Black boxes and stacks do not tell everything: how a process ended, which ranks have not moved since before a regroup,
when the copies were taken. The agent keeps that in observed.json beside them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from allranks.diagnose import DiagnoseOptions, diagnose
from allranks.errors import AllranksError
from allranks.incidents.policy import NO_STEP, PROGRAM_FAULT
from allranks.load import LoadOptions, load_paths
from allranks.model.diagnosis import Diagnosis, Finding, RankNow
from allranks.model.files import write_atomically
from allranks.model.parsing import from_json
from allranks.model.stacks import RankState, StacksReport, is_user_file
from allranks.model.trace import Frame
from allranks.stacks import Stillness, classify, read_capture
from allranks.stacks.causes import WAITS

log = logging.getLogger("allranks.agent")

T = TypeVar("T")

FILE = "observed.json"
_DOUBTFUL = ("not_started", "none_finished")  # verdicts of boxes that stacks may know better
_MAY_WAIT_IN_CUDA = ("native_call", "checkpoint_io")
_CANNOT_RECORD = ("stopped", "gil_held_native")  # nor, if it is stopped, take part in a call that it has made
TRUSTED = 0.6  # of a verdict from stacks: less does not overrule the black boxes


@dataclass(frozen=True)
class Observed:
    """What the agent knew of an incident besides black boxes and stacks."""

    taken_ns: int = 0  # epoch: when the black boxes were copied
    gone: tuple[int, ...] = ()  # ranks whose process exited without shutting down
    told: Finding | None = None  # what is known without a diagnosis: a death, a cut connection, a lost node
    reason: str = ""  # why it was opened
    quiet_s: float = 0.0
    unmoved: tuple[int, ...] = ()  # ranks that have not begun their step again, while others have
    marked: tuple[int, ...] = ()  # ranks that have made steps
    behind: tuple[int, ...] = ()  # ranks that the others go on without
    still_s: float = Stillness.still_s  # the silence that this job's watch takes for a stall
    looping: bool = False  # collectives are completed, steps are not
    left: tuple[int, ...] = ()  # ranks whose program ended by itself
    diverged: Finding | None = None  # calls that differed while the job still ran

    def write(self, folder: Path) -> None:
        """Keeps it with the evidence."""
        write_atomically(folder / FILE, json.dumps(asdict(self)))


def read_observed(folder: Path) -> Observed | None:
    """What the agent kept; None when there is nothing, or nothing readable."""
    try:
        return from_json((folder / FILE).read_bytes(), Observed)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def judge_folder(
    folder: Path, missing: list[str] | None = None
) -> tuple[Diagnosis | None, StacksReport | None]:
    """Judges what lies in an incident's folder; what could not be used is added to `missing`."""
    absent: list[str] = [] if missing is None else missing
    observed = read_observed(folder) or Observed()
    report = attempt("stacks", lambda: _stacks(folder / "stacks", observed), absent)
    diagnosis = attempt("diagnosis", lambda: _diagnose(folder / "boxes", report, observed), absent)
    return judge(diagnosis, report, observed), report


def judge(diagnosis: Diagnosis | None, report: StacksReport | None, observed: Observed) -> Diagnosis | None:
    """The diagnosis of boxes and stacks, corrected by what the agent saw. Pure."""
    findings = diagnosis.findings if diagnosis is not None else ()
    better = _correct(diagnosis.verdict if diagnosis is not None else None, findings, report, observed)
    if better is None:
        return diagnosis
    others = [f for f in findings if f is not better]
    rest = tuple(replace(f, severity="consequence") if f.severity == "root" else f for f in others)
    better = replace(better, severity="root")
    base = diagnosis or Diagnosis("fault", None)
    return replace(base, status="fault", verdict=better, findings=(better, *rest))


def _correct(
    found: Finding | None, findings: tuple[Finding, ...], report: StacksReport | None, observed: Observed
) -> Finding | None:
    """What the agent knows better than the boxes; None when it does not."""
    if observed.told is not None:
        return _of_death(found, findings, observed.told, observed.left)
    if observed.looping:
        return Finding(NO_STEP, (), observed.reason, confidence=0.5)
    if observed.behind:
        return accuse(observed.behind, report, observed.reason)
    if observed.diverged is not None and (found is None or found.cause == "none_finished"):
        return observed.diverged  # the rings have lost it since, and the calls behind it hang
    if observed.unmoved or (found is not None and found.ranks and found.cause in _DOUBTFUL):
        return _unmoved(found, report, observed) or _own_line(found, report)
    if found is not None and found.ranks:
        return None
    better = _from_stacks(report)
    return better if better is not None and (found is None or better.confidence > found.confidence) else None


def _of_death(
    found: Finding | None, findings: tuple[Finding, ...], told: Finding, left: tuple[int, ...]
) -> Finding | None:
    """A death that was seen, unless the calls explain it, or a rank that ended its program while others needed it."""
    if found is not None and (_explains(found, told) or _broke_off(found, told, left)):
        return None
    return next((f for f in findings if _is_own_mistake(f, told)), told)


def _explains(found: Finding, told: Finding) -> bool:
    """Whether a rank died of what another did: calls that do not match are found in the boxes of all.

    A call that others have not made yet is no cause: they could not, after a rank had died of itself. A rank without a
    word of its own that died in a call which does not fit another's died of that.
    """
    met = bool(told.ranks) and set(told.ranks) <= set(found.waiting) and not told.where
    if found.cause == "missing_rank":
        return found.met_another and met
    if found.cause == "call_error":  # one that its program survived
        return found.met_another and set(told.ranks) <= {*found.ranks, *found.waiting}
    early = found.cause == "extra_collective" and found.ranks != told.ranks and told.confidence == 1.0
    return found.cause in PROGRAM_FAULT and (met or not early)


def _broke_off(found: Finding, told: Finding, left: tuple[int, ...]) -> bool:
    """Whether connections broke since a rank had ended its program, and the others were in a call that it never made."""
    ended = bool(found.ranks) and set(found.ranks) <= set(left)
    lacking = found.cause in ("missing_rank", "not_started")
    return told.cause == "none_finished" and not told.ranks and lacking and ended


def _is_own_mistake(found: Finding, told: Finding) -> bool:
    """Whether a rank that ended without a word of its own had made a call that does not match: that was its end."""
    ended = told.cause == "rank_died" and not told.where
    differs = found.cause in PROGRAM_FAULT or found.met_another
    mistake = differs and found.ranks == told.ranks and found.confidence >= TRUSTED
    return ended and mistake


def accuse(ranks: tuple[int, ...], report: StacksReport | None, reason: str) -> Finding | None:
    """The verdict on ranks that do not move while others do; None when no stack could be read.

    Those that wait for another rank are not the cause; when all do, nobody is accused with confidence.
    """
    states = [report.ranks[rank] for rank in ranks if rank in report.ranks] if report is not None else []
    if not states:
        return None
    guilty = [s for s in states if s.cause not in WAITS and s.cause not in ("healthy", "unknown")]
    guilty = guilty or [s for s in states if report is not None and _waits_alone(s, report)]
    state = (guilty or states)[0]
    where = nearest_line(state)
    what = f"{state.cause} at {where}" if where else state.cause
    sentence, sure = f"{reason} ({what}: {state.evidence})", 0.9 if guilty else 0.5
    return Finding(state.cause, (state.rank,), sentence, confidence=sure, where=where)


def _waits_alone(state: RankState, report: StacksReport) -> bool:
    """Whether a rank waits for a key of a store and no other rank does: nobody is making a group, the wait is its own."""
    others = {s.cause for rank, s in report.ranks.items() if rank != state.rank}
    return state.cause == "store_wait" and not others & {"store_wait", "rendezvous_wait"}


def nearest_line(state: RankState) -> str:
    """The user's line nearest the hang: the worker's where a DataLoader worker hangs, else the rank's own."""
    if state.cause == "dataloader_wait":
        for child in state.children:
            file = child.where.split(":")[0]
            if child.cause not in ("queue_wait", "healthy", "unknown") and is_user_file(file):
                return f"{child.where} (DataLoader worker {child.child})"
    return state.where


def _unmoved(found: Finding | None, report: StacksReport | None, observed: Observed) -> Finding | None:
    """After a regroup the boxes show new groups and new calls: who has not moved since before it is the suspect,
    who has made steps is not "not started", and a rank that is stopped or holds the GIL could not record the end of its
    last call. Only stacks that show no wait for another rank count."""
    named, suspects = set(found.ranks if found else ()), observed.unmoved
    if found is not None and named and named <= set(suspects or named):
        doubtful = found.cause == "none_finished" or (
            found.cause == "not_started" and named <= set(observed.marked)
        )
        suspects = (_odd_one(named, report) or tuple(sorted(named))) if doubtful else ()
    better = accuse(suspects, report, observed.reason)
    if better is None or better.confidence < TRUSTED:
        return None
    quiet = f"rank {better.ranks[0]} has not moved for {observed.quiet_s:.1f} s while others wait for it"
    return replace(better, sentence=f"{quiet}: {better.cause} at {better.where or 'an unknown line'}")


def _odd_one(named: set[int], report: StacksReport | None) -> tuple[int, ...]:
    """The one rank that surely waits for nobody, where several could not record the end of a call.

    Ranks that wait for it in NCCL may block in a CUDA call that keeps the GIL, a copy for a checkpoint, say: nothing is
    recorded then, and no wait is seen.
    """
    ranks = report.ranks if report is not None else {}
    if any(ranks[rank].cause in WAITS for rank in named if rank in ranks):
        return ()
    unsure = {*WAITS, *_MAY_WAIT_IN_CUDA, "healthy", "unknown"}
    others = tuple(rank for rank, state in ranks.items() if state.cause not in unsure)
    return others if len(others) == 1 else ()


def _own_line(found: Finding | None, report: StacksReport | None) -> Finding | None:
    """A rank that never came to its first call has left no line in its box; its stack has one."""
    ranks = found.ranks if found is not None and found.cause == "not_started" and report is not None else ()
    states = [report.ranks[rank] for rank in ranks if report is not None and rank in report.ranks]
    line = nearest_line(states[0]) if states and states[0].cause not in WAITS else ""
    if found is None or not line or line in found.sentence:
        return None
    where = f"{found.sentence}; rank {states[0].rank} is at {line} ({states[0].cause.replace('_', ' ')})"
    return replace(found, where=line, sentence=where)


def _from_stacks(report: StacksReport | None) -> Finding | None:
    """A verdict from stacks alone, when the black boxes name nobody. Who waits elsewhere is only odd; a process that is
    stopped, or whose C code holds the GIL, is what others wait for although their CUDA calls look like work."""
    if report is None or not report.culprits:
        return None
    mute = tuple(rank for rank in report.culprits if report.ranks[rank].cause in _CANNOT_RECORD)
    ranks = mute if len(mute) == 1 else tuple(report.culprits)
    culprit = report.ranks[ranks[0]]
    sure = ranks == mute or culprit.cause == "stopped"
    line = nearest_line(culprit)
    sentence = report.sentence
    if len(ranks) < len(report.culprits):
        sentence = f"rank {culprit.rank} is in {culprit.cause} at {line or 'an unknown line'}, and the others may wait for it"
    confidence = 0.9 if sure else 0.5 if culprit.cause in WAITS else 0.6
    return Finding(culprit.cause, ranks, sentence, confidence=confidence, where=line)


def attempt(what: str, work: Callable[[], T], missing: list[str]) -> T | None:
    """One part of the evidence; if it cannot be read the rest still counts, and `missing` says so."""
    try:
        return work()
    except (AllranksError, OSError) as error:
        missing.append(f"{what}: {error}")
    except Exception as error:  # a mistake of ours
        log.exception("%s could not be read", what)
        missing.append(f"{what}: {error!r}")
    return None


def _stacks(folder: Path, observed: Observed) -> StacksReport | None:
    if not folder.exists():
        return None
    stillness = Stillness(still_s=min(observed.still_s, Stillness.still_s))
    return classify(read_capture(folder), stillness=stillness, quiet_s=observed.quiet_s)


def _diagnose(boxes: Path, report: StacksReport | None, observed: Observed) -> Diagnosis:
    now = {}
    for rank, s in (report.ranks if report else {}).items():
        frames = tuple(Frame(frame.name, frame.file, frame.line) for frame in s.stack if not frame.native)
        now[rank] = RankNow(rank, s.cause, nearest_line(s), s.evidence, frames)
    now.update({rank: RankNow(rank, "gone", "", "its process is gone") for rank in observed.gone})
    loaded = load_paths([str(boxes)], LoadOptions())
    options = DiagnoseOptions(now_ns=observed.taken_ns, quiet_s=observed.quiet_s)
    return diagnose(loaded.traces, loaded.files, stacks=now.values(), options=options)
