"""Evidence in, one diagnosis out. Pure, except for `judge_dumps`, which reads the evidence.

The agent, `allranks diagnose` and `allranks.diagnose()` use the same judge, so the same evidence gives the same verdict. Dumps and
stacks are compared first (diagnosis/); other observations of the agent correct the result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.diagnosis.context import is_secondary, with_names
from allranks.diagnosis.weak_findings import accused_in
from allranks.errors import InputError
from allranks.incidents.evidence import (
    Evidence,
    Observed,
    find_evidence,
    is_incident,
    nearest_line,
    read_incident,
)
from allranks.incidents.job_overview import find_open_hang
from allranks.incidents.policy import NO_STEP, PROGRAM_FAULT
from allranks.load import LoadResult
from allranks.model.diagnosis import Diagnosis, Finding, Status
from allranks.model.formatting import duration, ranks_text
from allranks.model.stacks import PLAIN_VERBS, WAITS, RankState, StacksReport
from allranks.model.trace import Frame, RankTrace
from allranks.stacktraces.classify import verb_of

_DOUBTFUL = ("not_started", "none_finished")  # verdicts of boxes that stacks may overrule
_MAY_WAIT_IN_CUDA = ("native_call", "checkpoint_io")
_CANNOT_RECORD = ("stopped", "gil_held_native")  # a stopped rank takes no part in its calls either
TRUSTED = 0.6  # least confidence of a verdict from stacks that overrules the black boxes


def judge(evidence: Evidence, options: DiagnoseOptions | None = None) -> Diagnosis:
    """The verdict on all evidence. Ranks of several worlds have the names of their roles."""
    return with_names(_judge(evidence, options), next((t.header.worlds for t in evidence.traces), ()))


def _judge(evidence: Evidence, options: DiagnoseOptions | None) -> Diagnosis:
    observed, how = evidence.observed, options or DiagnoseOptions()
    how = replace(how, now_ns=evidence.now_ns, copied=evidence.copied, ended=evidence.ended)
    if observed is not None:
        how = replace(how, quiet_s=observed.quiet_s)
    if evidence.traces or observed is None:
        result = diagnose(evidence.traces, evidence.files, stacks=evidence.seen, options=how)
    else:
        result = Diagnosis("unclear", None, files=tuple(evidence.files))
    if observed is not None:
        result = correct(result, evidence.report, observed)
        return _as_pause(result, observed) if observed.outcome else result
    if not evidence.traces and result.verdict is None and evidence.report is not None:
        result = _judge_stacks(result, evidence.report)
    return _with_logs(result, evidence)


def _as_pause(result: Diagnosis, observed: Observed) -> Diagnosis:
    """The diagnosis of a stall that ended, or is not known to be a hang: a pause instead of a fault."""
    verdict = result.verdict
    status: Status = "ok" if observed.ended else "unclear"
    named = verdict.ranks if verdict is not None else ()
    shown = verdict.evidence if verdict is not None and not observed.ended else ()
    pause = Finding("pause", named, observed.outcome, "warning", confidence=1.0, evidence=shown)
    return replace(result, status=status, verdict=None, findings=(pause,))


def correct(diagnosis: Diagnosis, report: StacksReport | None, observed: Observed) -> Diagnosis:
    """The diagnosis of boxes and stacks, corrected by the agent's observations."""
    better = _correct(diagnosis.verdict, diagnosis.findings, report, observed)
    if better is None:
        return diagnosis
    others = [f for f in diagnosis.findings if f is not better]
    rest = tuple(replace(f, severity="consequence") if f.severity == "root" else f for f in others)
    better = replace(better, severity="root")
    return replace(diagnosis, status="fault", verdict=better, findings=(better, *rest))


def _correct(
    found: Finding | None, findings: tuple[Finding, ...], report: StacksReport | None, observed: Observed
) -> Finding | None:
    """A better verdict from the agent's observations; None if there is none."""
    if observed.told is not None:
        return _of_death(found, findings, observed.told, observed.left)
    if observed.looping:
        return Finding(NO_STEP, (), observed.reason, confidence=0.5)
    if observed.behind:
        return accuse(observed.behind, report, observed.reason)
    if observed.diverged is not None and (found is None or found.cause == "none_finished"):
        return observed.diverged  # the rings no longer hold these calls, and later calls hang
    if observed.unmoved or (found is not None and found.ranks and found.cause in _DOUBTFUL):
        return _unmoved(found, report, observed) or _own_line(found, report)
    if found is not None and found.ranks:
        return None
    better = _from_stacks(report)
    return better if better is not None and (found is None or better.confidence > found.confidence) else None


def _of_death(
    found: Finding | None, findings: tuple[Finding, ...], told: Finding, left: tuple[int, ...]
) -> Finding | None:
    """The observed death, unless the calls explain it, or a rank ended its program while other ranks needed it."""
    if found is not None and (_explains(found, told) or _broke_off(found, told, left)):
        return None
    return next((f for f in findings if _is_own_mistake(f, told)), told)


def _explains(found: Finding, told: Finding) -> bool:
    """Whether the calls of another rank explain a death, as calls that do not match do.

    A call that other ranks have not made yet is not a cause, since they could not after the death, unless the error names
    them. A rank without an error of its own that died in a mismatched call died of the mismatch.
    """
    met = bool(told.ranks) and set(told.ranks) <= set(found.waiting) and not told.where
    if found.cause == "missing_rank":
        return (found.met_another and met) or found.ranks == accused_in(told.sentence)
    if found.cause == "call_error":  # the program survived it
        return found.met_another and set(told.ranks) <= {*found.ranks, *found.waiting}
    early = found.cause == "extra_collective" and found.ranks != told.ranks and told.confidence == 1.0
    return found.cause in PROGRAM_FAULT and (met or not early)


def _broke_off(found: Finding, told: Finding, left: tuple[int, ...]) -> bool:
    """Whether connections broke because a rank ended its program while the others were in a call that it never made."""
    ended = bool(found.ranks) and set(found.ranks) <= set(left)
    lacking = found.cause in ("missing_rank", "not_started")
    return told.cause == "none_finished" and not told.ranks and lacking and ended


def _is_own_mistake(found: Finding, told: Finding) -> bool:
    """Whether a rank that ended without an error had made a mismatched call, which explains its end."""
    ended = told.cause == "rank_died" and not told.where
    differs = found.cause in PROGRAM_FAULT or found.met_another
    mistake = differs and found.ranks == told.ranks and found.confidence >= TRUSTED
    return ended and mistake


def accuse(ranks: tuple[int, ...], report: StacksReport | None, reason: str) -> Finding | None:
    """The verdict on ranks without progress while others make progress; None without stacks.

    A rank that waits for another rank is not the cause. If all of them wait, the confidence is low.
    """
    states = [report.ranks[rank] for rank in ranks if rank in report.ranks] if report is not None else []
    if not states:
        return None
    guilty = [s for s in states if s.cause not in WAITS and s.cause not in ("healthy", "unknown")]
    guilty = guilty or [s for s in states if report is not None and _waits_alone(s, report)]
    state = (guilty or states)[0]
    where = nearest_line(state)
    what = _doing(state, where)
    sentence, sure = f"{reason} ({what}: {state.evidence})", 0.9 if guilty else 0.5
    return Finding(state.cause, (state.rank,), sentence, confidence=sure, where=where)


def _doing(state: RankState, line: str) -> str:
    """ "rank 1 sleeps at data.py:7 in load"."""
    return f"rank {state.rank} {verb_of(state, PLAIN_VERBS)} at {line or 'an unknown line'}"


def _waits_alone(state: RankState, report: StacksReport) -> bool:
    """Whether only this rank waits for a key of a store: then no group is being made, and the wait is its own."""
    others = {s.cause for rank, s in report.ranks.items() if rank != state.rank}
    return state.cause == "store_wait" and not others & {"store_wait", "rendezvous_wait"}


def _unmoved(found: Finding | None, report: StacksReport | None, observed: Observed) -> Finding | None:
    """The verdict on ranks without progress since a regroup, from their stacks. Ranks with steps are not "not started", and a rank
    that is stopped or holds the GIL cannot record the end of its last call. Ranks that wait for another rank are not suspects."""
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
    states = report.ranks if report is not None else {}
    return replace(better, sentence=f"{quiet}: {_doing(states[better.ranks[0]], better.where)}")


def _odd_one(named: set[int], report: StacksReport | None) -> tuple[int, ...]:
    """The only rank that is certainly not waiting for another rank, where several could not record the end of a call.

    Ranks that wait for it in NCCL may block in a CUDA call that holds the GIL, such as a copy for a checkpoint. Then they record
    nothing, and their stacks show no wait.
    """
    ranks = report.ranks if report is not None else {}
    if any(ranks[rank].cause in WAITS for rank in named if rank in ranks):
        return ()
    unsure = {*WAITS, *_MAY_WAIT_IN_CUDA, "healthy", "unknown"}
    others = tuple(rank for rank, state in ranks.items() if state.cause not in unsure)
    return others if len(others) == 1 else ()


def _own_line(found: Finding | None, report: StacksReport | None) -> Finding | None:
    """Adds the line of a rank before its first call, which only its stack has."""
    ranks = found.ranks if found is not None and found.cause == "not_started" and report is not None else ()
    states = [report.ranks[rank] for rank in ranks if report is not None and rank in report.ranks]
    line = nearest_line(states[0]) if states and states[0].cause not in WAITS else ""
    if found is None or not line or line in found.sentence:
        return None
    where = f"{found.sentence}; {_doing(states[0], line)}"
    return replace(found, where=line, sentence=where)


def _from_stacks(report: StacksReport | None) -> Finding | None:
    """A verdict from stacks alone, when the black boxes blame no rank. A different wait gives a low confidence. A stopped process,
    or one whose C code holds the GIL, blocks the others even if their CUDA calls seem to work."""
    if report is None or not report.culprits:
        return _nested_calls(report) if report is not None else None
    mute = tuple(rank for rank in report.culprits if report.ranks[rank].cause in _CANNOT_RECORD)
    ranks = mute if len(mute) == 1 else tuple(report.culprits)
    culprit = report.ranks[ranks[0]]
    sure = ranks == mute or culprit.cause == "stopped"
    line = nearest_line(culprit)
    sentence = report.sentence
    if len(ranks) < len(report.culprits):
        sentence = f"{_doing(culprit, line)}, and the others may wait for it"
    confidence = 0.9 if sure else 0.5 if culprit.cause in WAITS else 0.6
    return Finding(culprit.cause, ranks, sentence, confidence=confidence, where=line)


def _nested_calls(report: StacksReport) -> Finding | None:
    """Remote calls that wait for further remote calls while every rank waits for another rank."""
    states = report.ranks.values()
    nested = [s for s in states if s.cause == "p2p_wait" and s.stack and s.stack[-1].name == "_run_function"]
    if len(nested) < 2 or not all(state.cause in WAITS for state in states):
        return None
    where = "; ".join(f"rank {s.rank} at {s.where or 'an unknown line'}" for s in nested[:8])
    why = "perhaps no thread is left to answer them (num_worker_threads)"
    sentence = f"remote calls wait for each other: {where}; {why}"
    return Finding("p2p_wait", tuple(s.rank for s in nested), sentence, confidence=0.6, where=nested[0].where)


def _judge_stacks(result: Diagnosis, report: StacksReport) -> Diagnosis:
    """The diagnosis without dumps, from the stacks."""
    culprits = tuple(rank for rank in report.culprits if report.ranks[rank].cause != "unknown")
    if not culprits:  # an unreadable capture is no reason to blame a rank
        seen = Finding("unclear", (), report.sentence, severity="warning", confidence=0.2)
        read = any(state.stack for state in report.ranks.values())
        findings: tuple[Finding, ...] = (seen,) if read and report.hung is not False else ()
    else:
        guilty = report.ranks[culprits[0]]
        finding = Finding(
            guilty.cause,
            culprits,
            report.sentence,
            severity="warning" if report.hung is False else "root",
            confidence=0.4 if report.hung is None else 0.8,
            where=guilty.where,
            stacks=tuple(((rank,), _frames(report.ranks[rank])) for rank in culprits),
            evidence=tuple(dict.fromkeys((report.reason, guilty.evidence, *report.notes))),
            missing_evidence=("the calls of the ranks: start the job with `allranks run`",),
            stack_labels=("live",) * len(culprits),
        )
        findings = (finding,)
    return replace(
        result,
        status=report.status,
        verdict=findings[0] if culprits and report.hung is not False else None,
        findings=findings,
        summary=(f"stacks of {ranks_text(report.ranks)}, no recorded calls",),
    )


def _with_logs(result: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Adds evidence from logs and from NCCL about the guilty ranks."""
    if result.verdict is None:
        return result
    named = [rank for rank in result.verdict.ranks if rank in evidence.logs]
    if result.verdict.cause == "rank_died":  # with the secondary errors of two other ranks
        others = [rank for rank, text in evidence.logs.items() if is_secondary(text)]
        named += [rank for rank in others if rank not in named][:2]
    lines = [f"the log of rank {rank} ends with: {evidence.logs[rank]}" for rank in named]
    lines += [f"NCCL RAS: {line}" for line in evidence.ras]
    if not lines:
        return result
    verdict = replace(result.verdict, evidence=(*result.verdict.evidence, *lines))
    findings = tuple(verdict if f is result.verdict else f for f in result.findings)
    return replace(result, verdict=verdict, findings=findings)


def _frames(state: RankState) -> tuple[Frame, ...]:
    return tuple(Frame(frame.name, frame.file, frame.line) for frame in state.stack)


def _later_calls(traces: Sequence[RankTrace], observed: Observed) -> bool:
    """Whether the ranks made calls after the agent's last sample: a stall stays open if the agent was killed."""
    return any(len(t.calls) and int(t.calls["created_ns"].max()) > observed.taken_ns for t in traces)


def judge_dumps(
    loaded: LoadResult,
    traces: list[RankTrace],
    roots: list[str],
    how: DiagnoseOptions,
    *,
    chosen: bool = False,
) -> Diagnosis:
    """The diagnosis of loaded dumps and all other evidence next to them.

    For the folder of an incident, and for a job with an open hang or stall, the evidence of the agent counts, unless a part of the
    dumps was `chosen`.
    """
    hang = None if chosen or len(roots) != 1 else find_open_hang(Path(roots[0]))
    kept = read_incident(hang or Path(roots[0])) if hang is not None or is_incident(roots) else Evidence()
    stall = kept.observed.outcome if hang is not None and kept.observed is not None else ""
    if chosen or kept.observed is None or (stall and _later_calls(traces, kept.observed)):
        evidence, stall = find_evidence(loaded, traces, roots), ""
    else:  # in a stall the verdict names the ranks that others wait for now
        outcome = "" if stall else kept.observed.outcome
        evidence = replace(kept, observed=replace(kept.observed, outcome=outcome))
    for line in evidence.missing:
        print(f"left out: {line}", file=sys.stderr)
    result = judge(evidence, how)
    if evidence.observed is not None:
        name, taken_s = (hang or Path(roots[0])).name, evidence.observed.taken_ns / 1e9
        old = f", collected {duration(max(0.0, time.time() - taken_s))} ago" if taken_s else ""
        result = replace(result, summary=(f"evidence of incident {name}{old}", *result.summary))
    if stall:
        pause = Finding("pause", (), f"not known to be a hang; {stall}", confidence=1.0)
        status: Status = result.status if result.verdict is not None else "unclear"
        result = replace(result, status=status, findings=(*result.findings, pause))
    names = {name for group in result.groups for name in (group.label, group.name, group.desc)}
    if traces and (absent := how.pg_filters - names):
        known = sorted({group.desc or group.name for trace in traces for group in trace.groups})
        raise InputError(
            f"no group {min(absent)!r} in these dumps", hint=f"Groups: {', '.join(filter(None, known[:20]))}."
        )
    return result
