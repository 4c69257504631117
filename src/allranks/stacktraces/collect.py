"""Samples live ranks, least intrusive first: marks, /proc, NCCL RAS, py-spy without stopping anybody, again after
a pause; only then native stacks of suspects, and debuggers where they were asked for.

Runs outside the ranks. The first passes stop no process and send no signal; every tool has its own limit; a
process that cannot be read is a note in the capture.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.blackbox.header import process_state
from allranks.errors import ConfigurationError, why
from allranks.model.formatting import count
from allranks.model.stacks import (
    IDLE_CHILD,
    Capture,
    ProcessCapture,
    RankMarks,
    RankState,
    RasReply,
    Snapshot,
    StackFrame,
    StacksReport,
    ThreadFacts,
    ThreadStack,
    is_user_file,
)
from allranks.stacktraces import debuggers, ras
from allranks.stacktraces.boxes import read_marks
from allranks.stacktraces.classify import classify
from allranks.stacktraces.debuggers import ask_faulthandler, debug_with_gdb, dump_gpu_core
from allranks.stacktraces.extras import with_lock_holders
from allranks.stacktraces.find import MAX_CHILDREN, Target, make_target
from allranks.stacktraces.procfs import descendants, facts_of, read_entry, read_facts, renumber
from allranks.stacktraces.source import idle_loop, polled
from allranks.stacktraces.tasks import chain_of_program, read_tasks
from allranks.stacktraces.views import LOOP, POLLS


@dataclass(frozen=True)
class CollectOptions:
    """How to sample. Times in seconds."""

    rounds: int = 2
    interval_s: float = 1.0  # between two rounds
    native: str = "suspects"  # "suspects", "all" or "never"
    gdb: bool = False  # where py-spy fails
    cuda_gdb: bool = False
    faulthandler_signal: int | None = None  # only sent to a process that catches it
    gpu_core_dump: bool = False  # fatal to the process
    ras_address: str = ""  # "": NCCL_RAS_ADDR of the ranks, else the default
    workers: int = 0  # 0: as many as this machine bears
    raw_folder: Path | None = None  # stacks and what the tools printed are kept here as text
    timeout_guard_s: float = 30.0  # no debugger this close to a collective's timeout
    pyspy: str = ""  # "": found
    pyspy_limit_s: float = debuggers.PYSPY_LIMIT_S  # of one run of py-spy

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.interval_s < 0:
            raise ConfigurationError("rounds must be 1 or more, and the interval 0 or more")
        if self.native not in ("suspects", "all", "never"):
            raise ConfigurationError(f"native is suspects, all or never, not {self.native!r}")


@dataclass
class ProcessSamples:
    """One process while it is sampled."""

    target: Target
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    native: tuple[ThreadStack, ...] = ()
    kernels: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    inner: dict[int, int] = field(default_factory=dict)  # thread ids in a PID namespace -> ids here

    def note(self, text: str) -> None:
        """Keeps a finding once."""
        if text and text not in self.notes:
            self.notes.append(text)

    def freeze(self, host: str) -> ProcessCapture:
        """The finished capture of this process."""
        t, snapshots = self.target, tuple(self.snapshots[number] for number in sorted(self.snapshots))
        seen = (snapshots, self.native, self.kernels, tuple(self.notes))
        return ProcessCapture(t.rank, t.child, t.pid, host, t.title, *seen, t.parallel)


def collect(
    targets: Sequence[Target],
    options: CollectOptions | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Capture:
    """Samples the targets and returns all that was seen; `say` gets a line for people now and then."""
    settings = options or CollectOptions()
    collection = _Collection(targets, settings, say)
    with ThreadPoolExecutor(settings.workers or min(8, 2 * (os.cpu_count() or 1)), "allranks-stacks") as pool:
        for number in range(1, settings.rounds + 1):
            if number > 1:
                time.sleep(settings.interval_s)
            collection.sample(number, pool)
        collection.inspect(pool)
    return collection.finish()


class _Collection:
    """The state of one collection. Constructors only store; `sample` and `inspect` do the work."""

    def __init__(
        self, targets: Sequence[Target], options: CollectOptions, say: Callable[[str], None]
    ) -> None:
        self.options = options
        self.say = say
        self.host = socket.gethostname()
        self.cases = [ProcessSamples(target) for target in targets]
        self.marks: dict[int, RankMarks] = {}
        self.ras: list[RasReply] = []
        self.notes: list[str] = []
        self.pyspy = options.pyspy or debuggers.find_pyspy()
        self.sources = SourceLines()

    def sample(self, number: int, pool: ThreadPoolExecutor) -> None:
        """One round that disturbs nobody."""
        if number > 1:
            self._find_new_children()
        for case in self.cases:
            self._read_marks(case)
        facts = list(pool.map(self._read_facts, self.cases, [number] * len(self.cases)))
        self._ask_ras()
        stacks = list(pool.map(self._read_stacks, self.cases, [number] * len(self.cases)))
        for case, (at, threads), found in zip(self.cases, facts, stacks, strict=True):
            if threads or found:
                case.snapshots[number] = Snapshot(number, at, found, threads)

    def inspect(self, pool: ThreadPoolExecutor) -> None:
        """What stops a process for a moment, or longer: only suspects, only when asked."""
        for case in self.cases:
            self._add_tasks(case)
        self._keep_stacks()
        if self.options.native != "never" and self.pyspy:
            chosen = self._suspects()
            if chosen:
                self.say(f"native stacks of {count(len(chosen), 'process', 'processes')}")
            list(pool.map(self._read_native, chosen))
        if self.options.faulthandler_signal is not None:
            for case in self.cases:
                self._ask_faulthandler(case, self.options.faulthandler_signal)
        if self.options.gdb or self.options.cuda_gdb:
            for case in self._debugged():
                self.say(f"{'cuda-gdb' if self.options.cuda_gdb else 'gdb'} on process {case.target.pid}")
                self._debug(case)
        if self.options.gpu_core_dump:
            for case in self.cases:
                if case.target.child is None:
                    case.note(dump_gpu_core(case.target))

    def finish(self) -> Capture:
        """The capture of everything seen."""
        worlds = [case.target.world_size for case in self.cases if case.target.world_size]
        if not self.pyspy:
            self.notes.append("py-spy was not found: only /proc was read. pip install py-spy")
        return Capture(
            processes=tuple(case.freeze(self.host) for case in self.cases),
            marks=tuple(self.marks[rank] for rank in sorted(self.marks)),
            ras=tuple(self.ras),
            world_size=max(worlds, default=None),
            notes=tuple(self.notes),
        )

    def _find_new_children(self) -> None:
        """DataLoader workers that were started after the processes were chosen."""
        known = {case.target.pid for case in self.cases}
        for case in [one for one in self.cases if one.target.child is None]:
            rank = case.target.rank
            mine = [c.target.child for c in self.cases if c.target.rank == rank]
            number = 1 + max((child for child in mine if child is not None), default=-1)
            for pid in descendants(case.target.pid):
                entry = read_entry(pid) if pid not in known and pid != os.getpid() else None
                if entry is not None and number < MAX_CHILDREN:
                    known.add(pid)
                    self.cases.append(ProcessSamples(make_target(entry, rank, number)))
                    number += 1

    # one process at a time

    def _read_marks(self, case: ProcessSamples) -> None:
        target = case.target
        if target.child is None and target.box is not None:
            found = read_marks(target.box, target.rank, time.time())
            if found is not None:
                self.marks[target.rank] = found

    def _read_facts(self, case: ProcessSamples, number: int) -> tuple[float | None, tuple[ThreadFacts, ...]]:
        target = case.target
        try:
            entry = read_entry(target.pid) if target.start_ticks else None
            if entry is not None and entry.start_ticks != target.start_ticks:
                raise ProcessLookupError(f"process {target.pid} ended and its number is used by another one")
            facts = facts_of(read_facts(target.pid))
        except OSError as error:
            if target.child is None or not isinstance(error, (FileNotFoundError, ProcessLookupError)):
                ended = isinstance(error, FileNotFoundError | ProcessLookupError)
                why = "ended meanwhile" if ended else f"could not be read: {error}"
                case.note(f"process {target.pid} {why}")  # children come and go
            return None, ()
        case.inner.update(facts.inner)
        hidden = facts.threads and not any(thread.syscall for thread in facts.threads)
        if hidden and facts.threads[0].state not in "ZX":
            obstacle = debuggers.ptrace_obstacle(target.pid)
            case.note(f"system calls of process {target.pid} are not readable ({obstacle})")
        return facts.at_s, with_lock_holders(target.pid, facts.threads)

    def _read_stacks(self, case: ProcessSamples, number: int) -> tuple[ThreadStack, ...]:
        target = case.target
        if not self.pyspy or not target.python or process_state(target.pid) in ("", "Z", "X"):
            return ()
        run = debuggers.run_pyspy(self.pyspy, target.pid, limit_s=self.options.pyspy_limit_s)
        if run.problem:
            case.note(run.problem)
            return ()
        stacks = _parse(case, run.output)
        return renumber(self.sources.attach(stacks, target.pid), case.inner)

    def _add_tasks(self, case: ProcessSamples) -> None:
        """Puts the suspended coroutine of the program on top of its idle event loop, where the stack of the thread ends."""
        last = case.snapshots.get(max(case.snapshots, default=0))
        state = classify(Capture((replace(case.freeze(self.host), rank=0, child=None),))).ranks[0]
        if last is None or not last.stacks or state.cause != "event_loop_idle" or state.thread:
            return
        chain = chain_of_program([frames for frames, _ in read_tasks(case.target.pid)], state.stack)
        for number, shot in case.snapshots.items():
            ended = [one for one in shot.stacks if one.frames == state.stack]
            tasks = [replace(one, frames=(*chain, *one.frames)) for one in ended]
            others = [one for one in shot.stacks if one not in ended]
            stacks = self.sources.attach((*tasks, *others), case.target.pid)
            case.snapshots[number] = replace(shot, stacks=stacks)

    def _suspects(self) -> list[ProcessSamples]:
        able = [c for c in self.cases if c.target.python and any(s.stacks for s in c.snapshots.values())]
        if self.options.native == "all":
            return able
        capture = Capture(tuple(case.freeze(self.host) for case in self.cases))
        wanted = choose_suspects(classify(capture))
        return [case for case in able if (case.target.rank, case.target.child) in wanted]

    def _read_native(self, case: ProcessSamples) -> None:
        """Native frames; a stopped or uninterruptible process would hang the tool, so it is left alone."""
        if not self.pyspy or process_state(case.target.pid) not in ("R", "S"):
            return
        run = debuggers.run_pyspy(self.pyspy, case.target.pid, native=True, limit_s=debuggers.NATIVE_LIMIT_S)
        if run.problem:
            case.note(f"no native frames: {run.problem}")
            return
        case.native = renumber(_parse(case, run.output), case.inner)

    def _ask_faulthandler(self, case: ProcessSamples, number: int) -> None:
        stacks, problem = ask_faulthandler(case.target.pid, number)
        case.note(problem)
        if stacks and not any(snapshot.stacks for snapshot in case.snapshots.values()):
            last = max(case.snapshots, default=1)
            shot = case.snapshots.get(last, Snapshot(last))
            case.snapshots[last] = replace(shot, stacks=stacks)

    def _debugged(self) -> list[ProcessSamples]:
        """All ranks for cuda-gdb; for gdb only those that py-spy could not read."""
        if self.options.cuda_gdb:
            return [case for case in self.cases if case.target.child is None]
        return [c for c in self.cases if c.target.python and not any(s.stacks for s in c.snapshots.values())]

    def _debug(self, case: ProcessSamples) -> None:
        found = debug_with_gdb(case.target, self.options.cuda_gdb, self.options.timeout_guard_s)
        case.note(found.problem)
        case.native = case.native or found.stacks
        case.kernels = found.kernels
        if text := found.text or found.problem:  # also that it was refused or took too long
            kind = "cudagdb" if self.options.cuda_gdb else "gdb"
            self._keep_file(f"{kind}_{self.host}_{case.target.pid}.txt", text)

    def _ask_ras(self) -> None:
        """Twice over the rounds: what both answers say is not momentary."""
        address = self.options.ras_address or next(
            (c.target.environ["NCCL_RAS_ADDR"] for c in self.cases if c.target.environ.get("NCCL_RAS_ADDR")),
            ras.DEFAULT_ADDRESS,
        )
        pids = [case.target.pid for case in self.cases if case.target.child is None]
        reply = ras.ask(address, of=() if self.options.ras_address else pids)
        if reply is not None:
            self.ras.append(reply)
            self._keep_file(f"ras.s{len(self.ras)}.txt", reply.text)

    # what people read; machines read the bundle

    def _keep_file(self, name: str, text: str) -> None:
        folder = self.options.raw_folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            note = f"{name} could not be written: {why(error)}"
            if note not in self.notes:
                self.notes.append(note)

    def _keep_stacks(self) -> None:
        """The newest stacks of each process, in the layout of py-spy."""
        for case in self.cases:
            if (shot := case.snapshots.get(max(case.snapshots, default=0))) and shot.stacks:
                pid, title = case.target.pid, case.target.title
                text = debuggers.format_text(pid, title, shot.stacks)
                self._keep_file(f"pyspy_{self.host}_{pid}.txt", text)


def _parse(case: ProcessSamples, output: str) -> tuple[ThreadStack, ...]:
    """What py-spy printed."""
    try:
        return debuggers.parse_json(output)
    except (ValueError, RecursionError) as error:
        case.note(f"py-spy printed something unreadable: {str(error)[:100]}")
        return ()


MAX_BYTES = 4 << 20
MAX_FRAMES = 3  # of the user's own, innermost


class SourceLines:
    """A cache of source files. A file changed since the process read it gives a wrong line: it is a hint only."""

    def __init__(self) -> None:
        self._files: dict[str, list[str]] = {}
        self._lock = threading.Lock()

    def attach(self, stacks: tuple[ThreadStack, ...], pid: int) -> tuple[ThreadStack, ...]:
        """The same stacks, with the text of the user's innermost lines."""
        return tuple(replace(stack, frames=self._frames(stack.frames, pid)) for stack in stacks)

    def _frames(self, frames: tuple[StackFrame, ...], pid: int) -> tuple[StackFrame, ...]:
        done, result = 0, []
        for frame in frames:
            if done < MAX_FRAMES and not frame.native and is_user_file(frame.file):
                done += 1
                frame = replace(frame, source=self._line(frame, pid))
            result.append(frame)
        return tuple(result)

    def text(self, file: str, pid: int) -> str:
        """A whole file as the process sees it; "" when it cannot be read."""
        return "\n".join(self._lines(file, pid))

    def _lines(self, file: str, pid: int) -> list[str]:
        with self._lock:
            if file not in self._files:
                self._files[file] = self._read(file, pid)
            return self._files[file]

    def _line(self, frame: StackFrame, pid: int) -> str:
        lines = self._lines(frame.file, pid)
        line = lines[frame.line - 1].strip()[:200] if 0 < frame.line <= len(lines) else ""
        text = "\n".join(lines) if line else ""
        loop = idle_loop(text, frame.line)
        line = f"{line}{LOOP}{loop}" if loop else line
        test = polled(text, frame.line) if "sleep(" in line else ""
        return f"{line}{POLLS}{test[:200]}" if test else line

    def _read(self, file: str, pid: int) -> list[str]:
        if not file.startswith("/"):
            return []
        try:
            path = Path(f"/proc/{pid}/root{file}")
            if path.stat().st_size > MAX_BYTES or not path.is_file():
                return []
            return path.read_bytes().decode("utf-8", "replace").splitlines()
        except OSError:
            return []


MAX_SUSPECTS = 16
#: Causes that Python frames and /proc have settled: native frames would add nothing.
_SETTLED_TEXT = (
    "stopped d_state healthy dataloader_wait stdin_wait subprocess_wait child_process_wait "
    "file_lock_wait pipe_write_blocked rendezvous_wait gone"
)
_SETTLED = frozenset(_SETTLED_TEXT.split())


def choose_suspects(report: StacksReport) -> set[tuple[int, int | None]]:
    """(rank, child) pairs: the culprits, the doubtful, and one of each group that waits alike."""
    chosen: dict[tuple[int, int | None], None] = {}
    for rank in report.culprits:
        state = report.ranks[rank]
        if state.cause not in _SETTLED:
            chosen.setdefault((rank, None))
        for child in state.children:
            if child.cause not in _SETTLED and child.cause not in IDLE_CHILD:
                chosen.setdefault((rank, child.child))
    seen: set[tuple[str, str]] = set()
    for rank, state in report.ranks.items():
        site = (state.cause, state.where)
        if _doubtful(state) and site not in seen:
            seen.add(site)
            chosen.setdefault((rank, None))
    return set(list(chosen)[:MAX_SUSPECTS])


def _doubtful(state: RankState) -> bool:
    """Whether the pattern that matched was a weak one, or the wait has a hidden inside."""
    return state.confidence < 0.85 or (state.cause == "collective_wait" and "_engine_run" in state.evidence)
