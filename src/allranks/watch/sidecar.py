"""Watches a job without launching it or changing its code, and collects stacks when it stalls. Runs in `allranks watch`.

Stalls are noticed as under `allranks run` (silence.py). Ranks without a black box make progress while all their main threads
work. `start_command()` starts a command, `take()` takes running processes, `run()` watches until they end. Signals are forwarded to
the command at once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.blackbox.header import process_state
from allranks.errors import InputError
from allranks.model.debug_options import DebugOptions
from allranks.model.stacks import Capture, Mark, RankMarks, RasReply, StacksReport
from allranks.stacktraces import gpus, ras
from allranks.stacktraces.boxes import find_boxes
from allranks.stacktraces.bundle import write_bundle
from allranks.stacktraces.classify import classify
from allranks.stacktraces.collect import CollectOptions, collect
from allranks.stacktraces.find import RANK_TITLES, Selection, Target, choose, family, is_frontend
from allranks.stacktraces.html import render_html
from allranks.stacktraces.procfs import descendants, scan, work_done
from allranks.stacktraces.progress import Stillness
from allranks.stacktraces.text import grow_tree, render_text, report_json
from allranks.watch.role_progress import SAMPLE_S, has_worked
from allranks.watch.samples import RankSample, read_sample
from allranks.watch.silence import NoticeOptions, ProgressHistory

log = logging.getLogger("allranks.stacktraces")

POLL_S = 0.5
RAS_LIMIT_S = 1.0
_RAS_ANSWERS = ", and by the operation counts of NCCL, whose RAS service answers"
_GPUS_ANSWER = ", and by whether data moves in the memory of their GPUs"
_NO_ANSWER = (
    ". A hang in which all of them use CPU is not noticed (waits of NCCL may: its RAS service does not answer here, and "
    "nvidia-smi lists no GPU that they use)"
)
RESCAN_S = 5.0
#: Command lines and names of helpers that a Python program starts for itself.
_HELPER = re.compile(r"resource_tracker|semaphore_tracker|forkserver|compile_worker|^pt_data_")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
ON_DEMAND = signal.SIGQUIT


@dataclass(frozen=True)
class MainThreadWork:
    """Progress of ranks without a black box: a round ends when each of them has worked since the last round."""

    rounds: int = 0
    # rank -> when, ticks, switches
    before: Mapping[int, tuple[float, int, int]] = field(default_factory=dict)
    worked: frozenset[int] = frozenset()
    round_s: float = 0.0  # of the last round

    def after(self, now_s: float, work: Mapping[int, tuple[int, int]]) -> MainThreadWork:
        """The state after one more sample of the main threads: rank -> (clock ticks, context switches)."""
        before, worked = dict(self.before), set(self.worked & work.keys())
        for rank, (ticks, switches) in work.items():
            since, old_ticks, old_switches = before.setdefault(rank, (now_s, ticks, switches))
            passed = now_s - since
            if passed < SAMPLE_S:
                continue
            if has_worked(passed, ticks - old_ticks, switches - old_switches):
                worked.add(rank)
            before[rank] = (now_s, ticks, switches)
        if work and worked >= work.keys():
            return MainThreadWork(self.rounds + 1, before, frozenset(), now_s)
        return replace(self, before=before, worked=frozenset(worked))


@dataclass(frozen=True)
class Collection:
    reason: str
    folder: Path
    report: StacksReport


class Sidecar:
    """A watched job. `say` gets each line for the terminal, `on_collection` each finished collection."""

    def __init__(
        self,
        options: DebugOptions,
        folder: Path,
        say: Callable[[str], None] = lambda text: None,
        on_collection: Callable[[Collection], None] = lambda done: None,
    ) -> None:
        self.options = options
        self.folder = folder
        self.collections: list[Collection] = []
        self._say = say
        self._on_collection = on_collection
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] | None = None  # signals that arrive while the child is being started
        self._roots: tuple[int, ...] = ()
        self._targets: list[Target] = []
        self._launchers: set[int] = set()  # processes that ran next to ranks
        self._scanned_s = -RESCAN_S
        self._requested = False
        self._work = MainThreadWork()
        limit_s = options.no_progress_s or math.inf
        self._history = ProgressHistory(
            NoticeOptions(floor_s=limit_s, cap_s=max(300.0, limit_s), warm_up_s=limit_s, asked=True)
        )
        self._passes = SlowPasses(options.slow_ms)
        self._poll_s = min(POLL_S, max(0.02, options.slow_ms / 2e3)) if options.slow_ms else POLL_S
        self._stalls = 0  # collections during the present stall
        self._points = options.fixed_points()  # later times of collections, in seconds after the start
        self._running: set[int] = set()  # ranks
        self._made_s = self._began_s = time.monotonic()
        self._said: set[str] = set()
        self._ras: tuple[RasReply, ...] = ()  # the last two answers
        self._gpus: tuple[tuple[gpus.GpuUse, ...], ...] = ()  # the last two answers
        self._asked_ras_s = -RESCAN_S
        self._old: dict[int, object] = {}
        self._several = False  # the job has several Python processes and no ranks
        #: Continues the watch of such a job when a collection is due, whose reason it gets, and returns the exit code.
        self.on_several: Callable[[str], int] | None = None
        self._leave = ""  # that reason
        self._due = ""  # the reason of a collection that is still to be made

    def start_command(self, words: Sequence[str]) -> None:
        """Starts the command on our standard streams. Signals that arrive meanwhile are forwarded too."""
        self._early = []
        self._catch()
        try:
            self._child = subprocess.Popen(list(words))
        except OSError as error:
            self._release()
            hint = "Give the command that starts the job, or --pid of one that already runs."
            raise InputError(f"cannot start {words[0]!r}: {error.strerror}", hint=hint) from error
        self._roots = (self._child.pid,)
        early, self._early = self._early, None
        for number in early:
            self._forward(number, None)

    def take(self, pids: Sequence[int]) -> None:
        """Watches running processes."""
        missing = [pid for pid in pids if process_state(pid) in ("", "Z", "X")]
        if missing:
            raise InputError(f"process {', '.join(map(str, missing))} does not run")
        self._roots = tuple(pids)

    def continue_watch(self, other: Sidecar, reason: str) -> int:
        """Collects at once, and watches the job of another sidecar, which still forwards the signals."""
        self._child, self._roots = other._child, other._roots
        if self._child is not None:
            signal.signal(ON_DEMAND, self._request)
        self._due = reason
        return self.run()

    def run(self) -> int:
        """Watches to the end of the job; returns the command's exit code (128 + N for signal N), 0 without one."""
        if self._child is None:
            self._catch()
        self._began_s = time.monotonic()
        try:
            while True:
                if (code := self._ended()) is not None:
                    return code
                try:
                    self._sample(time.monotonic() - self._began_s)
                except Exception as error:  # must not reach the job
                    self._say(f"sample failed: {type(error).__name__}: {error}")
                    log.debug("sample failed", exc_info=True)
                if self._leave and self.on_several is not None:
                    return self.on_several(self._leave)
                self._pause()
        finally:
            self._release()

    def _sample(self, now: float) -> None:
        """One turn of the loop: observe, decide, collect."""
        reason = self._decide(now, self._observe(now)) or self._due
        if self._requested:
            self._requested, reason = False, "asked for"
        if reason and (self.options.enabled or reason == "asked for"):
            self._due = ""
            self._collect(reason)

    def _decide(self, now: float, samples: list[RankSample]) -> str:
        """The reason to collect now, "" for none."""
        alive = {s.rank for s in samples if s.alive}
        if alive and self._points and now >= self._points[0]:
            point, *rest = self._points
            self._points = tuple(rest)
            return f"{point:.0f} s after the start"
        gone, self._running = self._running - alive, alive
        if self.options.rank_lost and gone and alive:
            return f"rank {', '.join(map(str, sorted(gone)))} ended while {len(alive)} others run"
        clock_s = self._began_s + now
        self._history.observe(clock_s, samples)
        if self.options.slow_ms and (reason := self._slow(samples)):
            return reason
        self._stalls = 0 if self._history.moves else self._stalls
        stall = self._history.standstill(clock_s, samples) if self.options.no_progress_s else None
        if stall is None or self._stalls >= self.options.repeats:
            return ""
        self._stalls += 1
        self._history.extend_deadline(3 if self._stalls == 1 else 2)  # the next collection is one limit later
        return f"no progress for {stall.quiet_s:.0f} s"

    def _slow(self, samples: Sequence[RankSample]) -> str:
        """The reason to collect because a pass lasts too long; "" for none."""
        newest = [
            replace(now, rank=s.rank, pid=s.pid, alive=s.alive)
            for s in samples
            if s.path and (now := read_sample(s.path)) is not None
        ]
        work = {s.rank: work_done(s.pid, main=True).ticks for s in newest}
        self._passes, reason = self._passes.after(time.time(), newest, work)
        return reason

    # the job

    def _ended(self) -> int | None:
        if self._child is not None:
            code = self._child.poll()
            return None if code is None else code if code >= 0 else 128 - code
        return None if any(process_state(pid) not in ("", "Z", "X") for pid in self._roots) else 0

    def _pause(self) -> None:
        """Waits for the next sample, or the end of the command."""
        if self._child is None:
            time.sleep(self._poll_s)
            return
        try:
            self._child.wait(timeout=self._poll_s)
        except subprocess.TimeoutExpired:
            pass

    def _observe(self, now: float) -> list[RankSample]:
        if now - self._scanned_s >= (RESCAN_S if self._targets else POLL_S):
            self._targets, self._scanned_s = self._find(), now
        ranks = [target for target in self._targets if target.child is None]
        alive = {t.rank for t in ranks if process_state(t.pid) not in ("", "Z", "X")}
        boxes = {t.rank: read_sample(t.box) for t in ranks if t.box is not None}
        plain = [t for t in ranks if boxes.get(t.rank) is None and t.rank in alive]
        self._sample_main_threads(now, plain)
        self._say_once(ranks, plain)
        return [self._sample_of(t, boxes.get(t.rank), t.rank in alive) for t in ranks]

    def _sample_of(self, rank: Target, box: RankSample | None, alive: bool) -> RankSample:
        """A sample from the black box; without one, rounds of work stand for calls."""
        if box is not None:  # which has rank and pid as they are in their container
            return replace(box, rank=rank.rank, pid=rank.pid, alive=alive)
        calls, start = self._work.rounds + 1, rank.start_ticks
        return RankSample(rank.rank, rank.pid, "", alive, -1, calls, calls, 0, start, joined=True)

    def _sample_main_threads(self, now: float, plain: Sequence[Target]) -> None:
        """Samples ranks without a black box. Waits of NCCL use CPU, so its own counts and the GPUs are checked too."""
        if plain and now - self._asked_ras_s >= RESCAN_S:
            self._asked_ras_s = now
            self._ask_others([target.pid for target in plain])
        if not self._stalled():
            self._work = self._work.after(now, {t.rank: self._work_done(t) for t in plain})

    def _work_done(self, rank: Target) -> tuple[int, int]:
        """Work of a rank's main thread. In a program without recognised ranks, children may do the work and count too."""
        known = rank.pid not in self._roots or rank.reason == "RANK"
        pids = [rank.pid] if known else [rank.pid, *descendants(rank.pid)]
        done = [work_done(pid, main=True) for pid in pids]
        return sum(one.ticks for one in done), sum(one.switches for one in done)

    def _ask_others(self, pids: Sequence[int]) -> None:
        """Queries NCCL's RAS service and the GPUs."""
        reply = ras.ask(of=pids, limit_s=RAS_LIMIT_S)
        self._ras = (*self._ras[-1:], reply) if reply is not None else ()
        used = gpus.ask(pids)
        self._gpus = (*self._gpus[-1:], used) if used else ()

    def _stalled(self) -> bool:
        """Whether NCCL's ranks are at different operations without progress, or no GPU of the job moves data."""
        waiting = len(self._gpus) == 2 and gpus.all_wait(self._gpus[0], self._gpus[1])
        return waiting or bool(ras.stood_still_s(self._ras))

    def _say_once(self, ranks: Sequence[Target], plain: Sequence[Target]) -> None:
        """Reports how the progress of this job is judged, if its ranks have no black boxes."""
        if not ranks:
            text = "no rank is among the watched processes"
        elif plain and self.options.no_progress_s:
            seen = (_RAS_ANSWERS if self._ras else "") + (_GPUS_ANSWER if self._gpus else "")
            text = (
                f"{len(plain)} of {len(ranks)} ranks have no black box: progress is judged by the CPU time and the "
                f"context switches of their main threads{seen or _NO_ANSWER}. `allranks run` or "
                "allranks.record() in the script records every call"
            )
        else:
            return
        if text not in self._said and (ranks or self._said or time.monotonic() - self._made_s > RESCAN_S):
            self._said.add(text)
            self._say(text)

    def _find(self) -> list[Target]:
        """The ranks among the watched processes and their descendants; a plain Python command is rank 0 itself."""
        entries = scan()
        ours = [e for e in entries if e.pid in self._roots]
        ours += [e for e in family(self._roots, entries) if e.pid not in self._roots]
        folders = tuple(Path(e.environ["ALLRANKS_DIR"]) for e in ours if "ALLRANKS_DIR" in e.environ)
        boxes, own = find_boxes(folders), os.getpid()
        chosen = choose(ours, boxes, Selection(titles=(*RANK_TITLES, *self.options.patterns)), own_pid=own)
        if chosen:
            self._launchers |= {e.pid for e in ours}
            self._several = False
            return chosen
        python = [
            e.pid for e in ours if e.python and e.pid not in self._launchers and not is_frontend(e.title)
        ]
        if not python:
            return []
        roles = [
            e for e in ours if e.pid in python and not (_HELPER.search(e.title) or _HELPER.match(e.comm))
        ]
        self._several = len(roles) > 1
        plain = [pid for pid in python if pid in self._roots] or python[:1]
        return choose(ours, boxes, Selection(pids=tuple(plain)), own_pid=own)

    # collecting

    def _collect(self, reason: str) -> None:
        self._targets = self._find()
        if not self._targets:
            self._say(f"{reason}: no rank was found")
            return
        if self._several and self.on_several is not None:
            self._leave = reason
            return
        stamp, number = time.strftime("%Y%m%d-%H%M%S"), len(self.collections) + 1
        folder = self.folder / f"{stamp}-{number}-{re.sub(r'[^a-z0-9]+', '_', reason.lower())[:40]}"
        self._say(f"{reason}: collecting stacks of {sum(t.child is None for t in self._targets)} ranks")
        o = self.options
        rounds = 1 if reason.startswith("a pass of") else o.rounds  # a pass may end soon
        how = CollectOptions(rounds, o.interval_s, o.native, cuda_gdb=o.cuda_gdb, raw_folder=folder)
        capture = self._with_main_threads(collect(self._targets, how))
        report = classify(capture, stillness=Stillness(still_s=self.options.no_progress_s or 10.0))
        write_report(folder, report, capture)
        done = Collection(reason, folder, report)
        self.collections.append(done)
        self._on_collection(done)

    def _with_main_threads(self, capture: Capture) -> Capture:
        """Adds marks for ranks without a black box: the end of the last round of work."""
        known = {one.rank for one in capture.marks}
        quiet = time.monotonic() - self._began_s - self._work.round_s
        now = time.time()
        mark = Mark(at_s=now - quiet, step=-1)
        plain = {p.rank for p in capture.processes if p.child is None} & self._work.before.keys() - known
        added = tuple(RankMarks(rank, (mark,), seen_s=now) for rank in sorted(plain))
        return replace(capture, marks=(*capture.marks, *added))

    # signals

    def _catch(self) -> None:
        """Installs the handlers. From a terminal, Ctrl-C reaches the command by itself."""
        for number in FORWARDED:
            self._old[number] = signal.signal(number, self._forward)
        self._old[ON_DEMAND] = signal.signal(ON_DEMAND, self._request)

    def _forward(self, number: int, frame: object) -> None:
        if self._early is not None:
            self._early.append(number)
            return
        if self._child is None:
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                raise KeyboardInterrupt
            return
        if self._child.poll() is None and not (number == signal.SIGINT and os.isatty(0)):
            self._child.send_signal(number)

    def _request(self, number: int, frame: object) -> None:
        self._requested = True

    def _release(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)  # type: ignore[arg-type]


def write_report(folder: Path, report: StacksReport, capture: Capture) -> None:
    """Writes bundle, page, text and JSON."""
    roots = grow_tree(capture)
    write_bundle(capture, folder)
    texts = {
        "report.txt": "\n".join(render_text(report, roots)) + "\n",
        "report.json": json.dumps(report_json(report, roots), indent=1),
        "report.html": render_html(report, roots),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")


EVERY_S = 10.0  # between two collections


@dataclass(frozen=True)
class SlowPasses:
    """Passes longer than the limit, each reported once."""

    limit_ms: float
    reported: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)  # rank -> mark
    work: Mapping[int, int] = field(default_factory=dict)  # rank -> clock ticks at the last sample
    last_s: float = -EVERY_S

    def after(
        self, now_s: float, samples: Iterable[RankSample], work: Mapping[int, int]
    ) -> tuple[SlowPasses, str]:
        """The state after one more sample, and the reason to collect stacks now ("" for none). A rank that is in no call and uses
        no CPU waits for requests and is not slow."""
        slow = [
            (one, silent_ms)
            for one in samples
            if one.alive and one.last_ns and (silent_ms := now_s * 1e3 - one.last_ns / 1e6) > self.limit_ms
        ]
        works = {rank for rank, ticks in work.items() if ticks > self.work.get(rank, ticks)}
        new = [
            (one, silent_ms)
            for one, silent_ms in slow
            if self.reported.get(one.rank) != one.mark
            and (one.calls_started > one.calls_completed or one.rank in works)
        ]
        if not new or now_s - self.last_s < EVERY_S:
            return replace(self, work=dict(work)), ""
        first, silent_ms = max(new, key=lambda pair: pair[1])
        reported = {**self.reported, **{one.rank: one.mark for one, _ in slow}}
        reason = f"a pass of rank {first.rank} lasts {silent_ms:.0f} ms"
        return SlowPasses(self.limit_ms, reported, dict(work), now_s), reason
