"""Watches a job from the side, with no change to its code, and collects when a trigger says so.

Runs in `allranks watch`. `start()` begins a command or takes running processes; `run()` watches until they end;
signals that arrive are passed on to the command at once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from allranks.blackbox.header import process_state
from allranks.errors import InputError
from allranks.model.stacks import Capture, Mark, RankMarks, RasReply, StacksReport
from allranks.stacks import gpus, ras
from allranks.stacks.boxes import find_boxes, read_progress
from allranks.stacks.bundle import write_bundle
from allranks.stacks.classify import classify
from allranks.stacks.collect import CollectOptions, collect
from allranks.stacks.debug_config import (
    DebugOptions,
    MainThreadWork,
    Observation,
    TriggerState,
    decide_trigger,
)
from allranks.stacks.find import RANK_TITLES, Selection, Target, choose, family, is_frontend
from allranks.stacks.html import render_html
from allranks.stacks.procfs import descendants, main_thread_work, scan
from allranks.stacks.progress import Stillness
from allranks.stacks.text import grow_tree, render_text, report_json

log = logging.getLogger("allranks.stacks")

POLL_S = 0.5
RAS_LIMIT_S = 1.0
_RAS_ANSWERS = ", and by the operation counts of NCCL, whose RAS service answers"
_GPUS_ANSWER = ", and by whether data moves in the memory of their GPUs"
_NO_ANSWER = (
    ". Not seen: a hang in which all of them burn CPU (as waits of NCCL may: its RAS service does not answer here, and "
    "nvidia-smi names no GPU that they use)"
)
RESCAN_S = 5.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
ON_DEMAND = signal.SIGQUIT


@dataclass(frozen=True)
class Collection:
    reason: str
    folder: Path
    report: StacksReport


class Sidecar:
    """One watched job. `say` gets a line for people, `on_collection` every finished collection."""

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
        self._roots: tuple[int, ...] = ()
        self._targets: list[Target] = []
        self._beside: set[int] = set()  # processes that ran beside ranks: launchers
        self._scanned_s = -RESCAN_S
        self._asked = False
        self._work = MainThreadWork()
        self._made_s = self._began_s = time.monotonic()
        self._said: set[str] = set()
        self._ras: tuple[RasReply, ...] = ()  # the last two answers
        self._gpus: tuple[tuple[gpus.GpuUse, ...], ...] = ()  # the last two answers
        self._asked_ras_s = -RESCAN_S
        self._old: dict[int, object] = {}

    def start_command(self, words: Sequence[str]) -> None:
        """Starts the command; its standard streams are ours."""
        try:
            self._child = subprocess.Popen(list(words))
        except OSError as error:
            raise InputError(f"cannot start {words[0]!r}: {error.strerror}") from error
        self._roots = (self._child.pid,)

    def take(self, pids: Sequence[int]) -> None:
        """Watches processes that run already."""
        missing = [pid for pid in pids if process_state(pid) in ("", "Z", "X")]
        if missing:
            raise InputError(f"process {', '.join(map(str, missing))} does not run")
        self._roots = tuple(pids)

    def run(self) -> int:
        """Watches to the end of the job; returns the command's exit code (128 + N for signal N), 0 without one."""
        self._catch()
        self._began_s = time.monotonic()
        state = TriggerState()
        try:
            while True:
                if (code := self._ended()) is not None:
                    return code
                try:
                    state = self._sample(time.monotonic() - self._began_s, state)
                except Exception as error:  # the job must not suffer from its observer
                    self._say(f"this sample failed: {type(error).__name__}: {error}")
                    log.debug("a sample failed", exc_info=True)
                self._pause()
        finally:
            self._release()

    def _sample(self, now: float, state: TriggerState) -> TriggerState:
        """One turn of the loop: observe, decide, collect."""
        reason, state = decide_trigger(self._observe(now), state, self.options)
        if self._asked:
            self._asked, reason = False, "asked for"
        if reason and (self.options.enabled or reason == "asked for"):
            self._collect(reason)
        return state

    # the job

    def _ended(self) -> int | None:
        if self._child is not None:
            code = self._child.poll()
            return None if code is None else code if code >= 0 else 128 - code
        return None if any(process_state(pid) not in ("", "Z", "X") for pid in self._roots) else 0

    def _pause(self) -> None:
        """Until the next sample, or the end of the command."""
        if self._child is None:
            time.sleep(POLL_S)
            return
        try:
            self._child.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            pass

    def _observe(self, now: float) -> Observation:
        if now - self._scanned_s >= (RESCAN_S if self._targets else POLL_S):
            self._targets, self._scanned_s = self._find(), now
        ranks = [target for target in self._targets if target.child is None]
        alive = frozenset(t.rank for t in ranks if process_state(t.pid) not in ("", "Z", "X"))
        boxes = {t.rank: read_progress(t.box, time.time()) for t in ranks if t.box is not None}
        known = {rank: progress for rank, progress in boxes.items() if progress is not None}
        marks = {rank: progress.mark for rank, progress in known.items()}
        oldest = max((p.oldest_call_s for p in known.values() if p.oldest_call_s is not None), default=None)
        silent = now + max((p.expected_s for p in known.values()), default=0.0)
        plain = [t for t in ranks if t.rank not in marks and t.rank in alive]
        self._sample_main_threads(now, plain)
        self._say_once(ranks, plain)
        marks.update({target.rank: (self._work.rounds,) for target in plain})
        output = {t.rank: size for t in ranks if (size := _log_size(t.pid)) is not None}
        return Observation(now, marks, output, oldest, alive, silent)

    def _sample_main_threads(self, now: float, plain: Sequence[Target]) -> None:
        """Of ranks without a black box. Waits of NCCL burn CPU: its own counts and the GPUs know better."""
        if plain and now - self._asked_ras_s >= RESCAN_S:
            self._asked_ras_s = now
            self._ask_others([target.pid for target in plain])
        if not self._stalled():
            self._work = self._work.after(now, {t.rank: self._work_done(t) for t in plain})

    def _work_done(self, rank: Target) -> tuple[int, int]:
        """Of its main thread; a program in which no rank was recognised may leave the work to its children."""
        known = rank.pid not in self._roots or rank.reason == "RANK"
        pids = [rank.pid] if known else [rank.pid, *descendants(rank.pid)]
        done = [main_thread_work(pid) for pid in pids]
        return sum(ticks for ticks, _ in done), sum(switches for _, switches in done)

    def _ask_others(self, pids: Sequence[int]) -> None:
        """NCCL's RAS service and the GPUs, where they answer."""
        reply = ras.ask(of=pids, limit_s=RAS_LIMIT_S)
        self._ras = (*self._ras[-1:], reply) if reply is not None else ()
        used = gpus.ask(pids)
        self._gpus = (*self._gpus[-1:], used) if used else ()

    def _stalled(self) -> bool:
        """Whether NCCL shows ranks at different operations that do not move, or no GPU of the job moves data."""
        return bool(ras.stood_still_s(self._ras)) or (
            len(self._gpus) == 2 and gpus.all_wait(self._gpus[0], self._gpus[1])
        )

    def _say_once(self, ranks: Sequence[Target], plain: Sequence[Target]) -> None:
        """What can be seen of this job, and what cannot."""
        if not ranks:
            text = "no rank is found yet among the watched processes"
        elif plain and self.options.no_progress_s:
            seen = (_RAS_ANSWERS if self._ras else "") + (_GPUS_ANSWER if self._gpus else "")
            text = (
                f"{len(plain)} of {len(ranks)} ranks have no black box: whether they move is judged by the CPU and the "
                f"context switches of their main threads{seen or _NO_ANSWER}. `allranks run` or "
                "allranks.record() in the script shows every call"
            )
        else:
            return
        if text not in self._said and (ranks or self._said or time.monotonic() - self._made_s > RESCAN_S):
            self._said.add(text)
            self._say(text)

    def _find(self) -> list[Target]:
        """The ranks among the descendants of what we watch; a plain Python command is rank 0 itself."""
        entries = scan()
        ours = [e for e in entries if e.pid in self._roots]
        ours += [e for e in family(self._roots, entries) if e.pid not in self._roots]
        folders = tuple(Path(e.environ["ALLRANKS_DIR"]) for e in ours if "ALLRANKS_DIR" in e.environ)
        boxes, own = find_boxes(folders), os.getpid()
        chosen = choose(ours, boxes, Selection(titles=(*RANK_TITLES, *self.options.patterns)), own_pid=own)
        if chosen:
            self._beside |= {e.pid for e in ours}
        python = [e.pid for e in ours if e.python and e.pid not in self._beside and not is_frontend(e.title)]
        if chosen or not python:
            return chosen
        plain = [pid for pid in python if pid in self._roots] or python[:1]
        return choose(ours, boxes, Selection(pids=tuple(plain)), own_pid=own)

    # collecting

    def _collect(self, reason: str) -> None:
        self._targets = self._find()
        if not self._targets:
            self._say(f"{reason}: no rank was found")
            return
        stamp, number = time.strftime("%Y%m%d-%H%M%S"), len(self.collections) + 1
        folder = self.folder / f"{stamp}-{number}-{re.sub(r'[^a-z0-9]+', '_', reason.lower())[:40]}"
        self._say(f"{reason}: collecting stacks of {sum(t.child is None for t in self._targets)} ranks")
        o = self.options
        how = CollectOptions(o.rounds, o.interval_s, o.native, cuda_gdb=o.cuda_gdb, raw_folder=folder)
        capture = self._with_main_threads(collect(self._targets, how))
        report = classify(capture, stillness=Stillness(still_s=self.options.no_progress_s or 10.0))
        write_report(folder, report, capture)
        done = Collection(reason, folder, report)
        self.collections.append(done)
        self._on_collection(done)

    def _with_main_threads(self, capture: Capture) -> Capture:
        """Ranks without a black box made progress when all main threads had last worked: that is their mark."""
        known = {one.rank for one in capture.marks}
        quiet = time.monotonic() - self._began_s - self._work.round_s
        now = time.time()
        mark = Mark(at_s=now - quiet, step=-1)
        plain = {p.rank for p in capture.processes if p.child is None} & self._work.before.keys() - known
        added = tuple(RankMarks(rank, (mark,), seen_s=now) for rank in sorted(plain))
        return replace(capture, marks=(*capture.marks, *added))

    # signals

    def _catch(self) -> None:
        """Passes signals on. From a terminal Ctrl-C reaches the command by itself."""
        for number in FORWARDED:
            self._old[number] = signal.signal(number, self._forward)
        self._old[ON_DEMAND] = signal.signal(ON_DEMAND, self._ask)

    def _forward(self, number: int, frame: object) -> None:
        if self._child is None:
            if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                raise KeyboardInterrupt
            return
        if self._child.poll() is None and not (number == signal.SIGINT and os.isatty(0)):
            self._child.send_signal(number)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True

    def _release(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)  # type: ignore[arg-type]


def write_report(folder: Path, report: StacksReport, capture: Capture) -> None:
    """Bundle, page, text and JSON side by side."""
    roots = grow_tree(capture)
    write_bundle(capture, folder)
    texts = {
        "report.txt": "\n".join(render_text(report, roots)) + "\n",
        "report.json": json.dumps(report_json(report, roots), indent=1),
        "report.html": render_html(report, roots),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="replace")


def _log_size(pid: int) -> int | None:
    """Bytes in the regular files that a process writes its output to; None when it has none."""
    total, some = 0, False
    for number in (1, 2):
        try:
            facts = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode):
            total, some = total + facts.st_size, True
    return total if some else None
