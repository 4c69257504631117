"""The recorder of one process: opens the box, hooks torch, follows completions, marks the box as closed. Runs in the rank.

If recording is impossible (no space, no permission), `start()` warns once and does not affect the training. The box stays on
disk after `close()` and after any death of the process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import allranks
from allranks.blackbox import phases
from allranks.blackbox.file_writer import Box
from allranks.blackbox.files import fallback_folder, job_folder, remove_earlier, remove_old, room_for_box
from allranks.blackbox.layout import Item, file_name, job_prefix
from allranks.errors import NotRecording, require
from allranks.model.parsing import without_secrets
from allranks.model.trace import Rendezvous
from allranks.recording.auto import Finder
from allranks.recording.calls import ErrorGuard
from allranks.recording.options import TORCH_ERRORS, RecorderOptions
from allranks.recording.side_thread import SideThread, describe_exit, wake_agent
from allranks.recording.writer import CallWriter, GroupState, fill_header, warn_once

P = ParamSpec("P")


def _guarded(method: Callable[Concatenate[Recorder, P], None]) -> Callable[Concatenate[Recorder, P], None]:
    """For methods that the program calls: does nothing without a recorder; an error of ours is logged once and ignored."""

    @functools.wraps(method)
    def call(self: Recorder, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.active:
            self._guard(functools.partial(method, self, *args, **kwargs))

    return call


class Recorder:
    """Records the collectives of this process. `start()` and `close()` own the file, the hook and the side thread."""

    def __init__(self, options: RecorderOptions) -> None:
        self.options = options
        self.pid = os.getpid()
        self.box: Box | None = None
        self.writer: CallWriter | None = None
        self._hook: Any = None
        self._watch: SideThread | None = None
        self._facts: dict[str, object] = {}
        self._rank = options.rank
        self._guard = ErrorGuard(self._warn)  # around methods that the program calls
        self._warned: set[str] = set()
        self._first = 0  # number of the phase "first step"
        self._steps = 0
        self._work: tuple[int, float, float] | None = None  # the current step, its tokens and operations
        self._named = 0  # number of the phase that the program named

    # -- start and close ----------------------------------------------------------------------------------------

    def start(self) -> Recorder:
        """Starts recording and returns itself. `active` is False if the box cannot be created."""
        if self.box is not None or not self.options.enabled:
            return self
        if not self.options.late:
            require("torch", feature="recording", extra="torch")
        self._try(self._start)
        return self

    def _try(self, step: Callable[[], None]) -> None:
        """Runs a step of the start; on an error recording is disabled."""
        try:
            step()
        except NotRecording as error:  # the same for all ranks of the node: one of them warns
            if self.options.local_rank <= 0:
                warn_once(f"recording disabled: {error}; training continues")
            self._guard(self.close, "could not start")
        except Exception as error:  # for example an unknown version of torch
            fix = _descriptor_fix(error)
            why = f"{type(error).__name__}: {error}"
            warn_once(f"recording disabled: {why}{'; ' if fix else ''}{fix}; training continues")
            self._guard(self.close, "could not start")

    def _start(self) -> None:
        self.box = self._open_box()
        if self.box is None:
            return
        self._fill_header(self.box)
        self.writer = CallWriter(self.box, self.options)
        phases.attach(self.box)
        if self.options.late and "torch" not in sys.modules:
            sys.meta_path.insert(0, Finder("torch", lambda _: self._try(self._hook_torch)))
        else:
            self._hook_torch()
        self._watch = SideThread(self)
        self._watch.start()

    def _hook_torch(self) -> None:
        if self.box is None or not self.active:
            return  # closed meanwhile, or in a forked child
        from allranks.recording.hook import Hook

        self._facts = {**self._facts, "versions": _versions()}
        self.box.append(Item.META, self._facts)
        self._hook = Hook(self._installed, self._disable, self._on_group_created, self._on_rendezvous)
        self._hook.install()

    def close(self, how: str = "closed") -> None:
        """Stops recording and unhooks torch; the file stays, marked with `how`."""
        hook, watch, writer = self._hook, self._watch, self.writer
        self._hook = self._watch = None
        if hook is not None:
            self._guard(hook.uninstall)
        if watch is not None:
            self._guard(watch.stop)
        if writer is not None:
            if self.active_process:
                self._guard(self._last_sweep, writer)
            writer.pending.clear()
            self.writer = None
        if self.box is not None and self.active_process:
            self._guard(self.box.mark_closed, how, time.time_ns())

    @_guarded
    def note_exit(self, error: SystemExit | KeyboardInterrupt) -> None:
        """Records that the program exits by sys.exit with a code other than 0, or by Ctrl-C."""
        if text := describe_exit(error):
            self._installed.box.mark_closed(text, time.time_ns())
            wake_agent()

    def _last_sweep(self, writer: CallWriter) -> None:
        """Notes the last completions: gloo wakes the waiting program shortly before its work is completed."""
        for _ in range(10):
            writer.sweep(everything=True)
            if not writer.pending and not writer.markers:
                return
            time.sleep(0.002)

    def abandon_in_child(self) -> None:
        """Called in a forked child: drops all state without touching the parent's file."""
        if self._hook is not None:
            self._hook.silence()
        self._hook = self._watch = self.writer = None
        phases.attach(None)

    @property
    def active(self) -> bool:
        """Whether calls are being recorded in this process."""
        return self.writer is not None and self.active_process

    @property
    def _installed(self) -> CallWriter:
        """The writer, which must exist."""
        assert self.writer is not None
        return self.writer

    @property
    def active_process(self) -> bool:
        """False in a forked child, because the box belongs to the parent."""
        return os.getpid() == self.pid

    @property
    def path(self) -> Path | None:
        """The black box file; None if recording could not start."""
        return self.box.path if self.box is not None else None

    @property
    def rank(self) -> int:
        """Global rank; -1 while unknown."""
        return self._rank

    # -- called by the program ----------------------------------------------------------------------------------

    @_guarded
    def step(
        self,
        number: int,
        label: str | None = None,
        loss: float | None = None,
        tokens: float | None = None,
        flops: float | None = None,
    ) -> None:
        """Marks the start of training step `number`. `label` is recorded with the following calls."""
        writer = self._installed
        number = operator.index(number)
        if label is not None:
            writer.label = writer.box.intern(Item.NAME, label) if label else 0
        writer.ring.set_step(number, writer.label)
        if loss is not None:
            writer.box.set_floats(loss=float(loss))
        writer.box.set(step_ns=time.time_ns(), step=number)
        if self._steps < 2:
            self._steps += 1
            if self._steps == 1:
                self._first = phases.begin(phases.FIRST)
            else:
                phases.end(self._first)
        if tokens is not None or flops is not None:
            self._count(writer.box, number, tokens, flops)

    def _count(self, box: Box, number: int, tokens: float | None, flops: float | None) -> None:
        """Writes the sums of the last complete step into the box; before that, those of the first mark."""
        given = (number, float(tokens or 0), float(flops or 0))
        before = self._work or given
        if before[0] != number or not self._work:
            box.set_floats(tokens=before[1], flops=before[2])
            self._work = given
        else:
            self._work = (number, before[1] + given[1], before[2] + given[2])

    @contextlib.contextmanager
    def expect(self, phase: str, up_to_s: float) -> Iterator[None]:
        """Declares that this rank may make no progress for up to `up_to_s` seconds, and why."""
        before = self._guard(self._declare, phase, up_to_s)
        number = self._guard(phases.begin, phase)
        try:
            yield
        finally:
            self._guard(phases.end, number or 0)
            if self.active and before is not None:
                until_ns, named = before
                box = self._installed.box
                self._guard(lambda: box.set(expect_until_ns=until_ns, phase=named, step_ns=time.time_ns()))

    def _declare(self, phase: str, up_to_s: float) -> tuple[int, int] | None:
        """Writes a declaration; returns the previous one (time, phase)."""
        if not self.active:
            return None
        box = self._installed.box
        before = box.get("expect_until_ns"), box.get("phase")
        until_ns = time.time_ns() + int(up_to_s * 1e9)
        box.set(phase=box.intern(Item.NAME, phase), expect_until_ns=until_ns)
        return before

    @_guarded
    def announce(self, phase: str, up_to_s: float) -> None:
        """As `expect`, without an end: for the last phase of a program."""
        self._declare(phase, up_to_s)
        phases.begin(phase)

    @_guarded
    def phase(self, name: str) -> None:
        """Sets the name of the current phase ("train", "eval"); "" for none."""
        box = self._installed.box
        box.set(phase=box.intern(Item.NAME, name) if name else 0)
        phases.end(self._named)
        self._named = phases.begin(name) if name not in ("", "train", "training") else 0

    @_guarded
    def given_up(self, works: Iterable[object], error: Exception) -> None:
        """See CallWriter.given_up."""
        self._installed.given_up(works, error)

    def _warn(self, error: BaseException) -> None:
        """Warns once per kind of error in a call of the program."""
        text = f"{type(error).__name__}: {error}"
        if text not in self._warned and len(self._warned) < 10:
            self._warned.add(text)
            warn_once(f"a call of the recorder failed and is ignored: {text}; training continues")

    # -- dumps --------------------------------------------------------------------------------------------------

    def dump_json(self, include_completed: bool = True, include_collectives: bool = True) -> str:
        """The recorded calls as PyTorch 2.10 JSON text."""
        from allranks.recording.dump import dump_bytes

        content = {"include_completed": include_completed, "include_collectives": include_collectives}
        return dump_bytes(self._box_path(), "json", **content).decode()

    def dump_file(
        self,
        path: str | os.PathLike[str] | None = None,
        format: str = "pickle",
        include_completed: bool = True,
        reason: str = "asked",
        include_collectives: bool = True,
        include_stack_traces: bool = True,
    ) -> Path:
        """Writes the recorded calls to a file and returns its path: "pickle", "json" (PyTorch 2.10) or "box"."""
        from allranks.recording.dump import dump_file

        return dump_file(
            self._box_path(),
            path,
            format,
            self.options,
            reason,
            include_completed=include_completed,
            include_collectives=include_collectives,
            include_stack_traces=include_stack_traces,
        )

    def _box_path(self) -> Path:
        if self.box is None:
            raise NotRecording("nothing is recorded in this process")
        if self.writer is not None and self.active_process:
            self.writer.sweep(everything=True)
        return self.box.path

    # -- internals ----------------------------------------------------------------------------------------------

    def _open_box(self) -> Box | None:
        """A new box in the wanted folder, or in the temporary folder if the default one is full."""
        options = self.options
        name = file_name(options.job, options.attempt, options.rank, self.pid)
        if options.folder is None:
            with contextlib.suppress(OSError):  # recording matters more than tidying up
                remove_old()
        folders = (
            [options.folder] if options.folder else [job_folder(options.job), fallback_folder(options.job)]
        )
        # the name is taken by an earlier recorder of this process, or of a process with the same pid
        names = (name, name.replace(".box", f".{time.time_ns():x}.box"))
        problem: OSError | None = None
        for path in (folder / name for folder in folders for name in names):
            try:
                box = Box(path, options.capacity, options.heap_bytes)
                box.open()
            except OSError as error:
                problem = error
                continue
            with contextlib.suppress(OSError):
                remove_earlier(path.parent, job_prefix(options.job), options.rank)
            return box
        room = room_for_box(options.capacity, options.heap_bytes) >> 20
        folder_fix = (
            f"set ALLRANKS_DIR to a folder that you can write to, with {room} MB of room for each rank"
        )
        warn_once(
            f"recording disabled: no black box in {folders[0]}: {problem}; training continues. "
            f"Fix: {_descriptor_fix(problem) or folder_fix}"
        )
        return None

    def _fill_header(self, box: Box) -> None:
        words = without_secrets("\0".join(word[:8192] for word in sys.argv[:20])).split("\0")
        argv = [word[:200] for word in words]  # truncated last: half a secret would not be recognized
        self._facts = fill_header(box, self.options, versions=_versions(), argv=argv)

    def _on_group_created(self, state: GroupState) -> None:
        """Takes rank, world size and backend from a group, if the environment did not have them."""
        assert self.box is not None
        if not self._facts["backend"] and state.backend:
            versions = _versions(state.backend)
            self._facts = {**self._facts, "backend": state.backend, "versions": versions}
            self.box.append(Item.META, self._facts)
        import torch.distributed as dist

        if dist.is_initialized():
            self._set_rank(dist.get_rank(), dist.get_world_size())

    def _on_rendezvous(self, rank: int, rendezvous: Rendezvous) -> None:
        """Called when init_process_group starts. Replicas have their own addresses, which are not recorded."""
        assert self.box is not None
        if not os.environ.get("ALLRANKS_RANK"):
            self._facts = {**self._facts, "rendezvous": list(vars(rendezvous).values())}
            self.box.append(Item.META, self._facts)
        self._set_rank(rank, rendezvous.world_size or -1)

    def _set_rank(self, rank: int, world_size: int) -> None:
        """Sets rank and world size; -1 unknown. In replica mode the supervisor sets them, because groups inside each
        replica count from 0."""
        assert self.box is not None
        if os.environ.get("ALLRANKS_RANK"):
            return
        if world_size >= 0:
            self.box.set(world_size=world_size)
        if rank >= 0 and rank != self._rank:
            self._rank = rank
            self.box.set(rank=rank)
            self._rename(self.box)

    def _rename(self, box: Box) -> None:
        """Renames the file when the rank becomes known. If that fails, the old name stays."""
        self.options = replace(self.options, rank=self._rank)
        wanted = box.path.with_name(file_name(self.options.job, self.options.attempt, self._rank, self.pid))
        if wanted != box.path and not wanted.exists():
            try:
                box.path.rename(wanted)
                box.path = wanted
            except OSError:
                pass

    def _disable(self, error: BaseException) -> None:
        """Disables recording after an error of our own, with one warning."""
        if self._hook is not None and self._hook.writer is not None:
            self._hook.silence()
            warn_once(f"recording disabled after an error of its own: {error!r}; training continues")


def _descriptor_fix(error: BaseException | None) -> str:
    """The fix for an error caused by the limit of open files; "" for other errors."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    return ""


def _versions(backend: str = "") -> dict[str, str]:
    """Versions of the libraries in use."""
    found = {"allranks": allranks.__version__, "python": sys.version.split()[0]}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        if "nccl" in backend:
            with contextlib.suppress(*TORCH_ERRORS):  # a CPU build has none
                found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found
