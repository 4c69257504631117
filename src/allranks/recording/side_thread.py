"""The side thread of a recorder, which checks for completed calls, and handlers for exit, exception and fork.

Runs in the rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from allranks.blackbox.layout import wakeup_address
from allranks.model.files import write_atomically
from allranks.model.parsing import without_secrets
from allranks.model.stacks import is_user_file
from allranks.recording.calls import ErrorGuard
from allranks.recording.dump import native_dumps
from allranks.recording.writer import warn_once

if TYPE_CHECKING:
    from allranks.recording.recorder import Recorder

MAX_TIMEOUT_DUMPS = 3  # later timeouts are usually consequences of the first
_WORKER = re.compile(
    r"Caught \w+ in (?P<who>.*?)\.\nOriginal Traceback \(most recent call last\):\n(?P<trace>.*)", re.S
)
_FRAME = re.compile(r'^  File "(.+?)", line (\d+)', re.M)
MAX_ERROR = 64 << 10  # characters of an error that are parsed
#: A prefix such as "[/build/gloo/pair.cc:553] ".
_SOURCE_LINE = re.compile(r"^(\[[^\]\s]*:\d+\]\s*)+")
_recorders: weakref.WeakSet[Any] = weakref.WeakSet()


class SideThread:
    """The part of a recorder that runs outside the training step. `start()` and `stop()` own the thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._guard = ErrorGuard(
            lambda error: print(f"allranks: error in an exit handler: {error!r}", file=sys.stderr)
        )
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._timeouts = 0
        self._dumped = threading.Event()  # set when the first dump of a timeout is on disk
        self._previous_hook: Any = None

    def start(self) -> None:
        _recorders.add(self._recorder)
        assert self._recorder.writer is not None
        if "timeout" in self._recorder.options.dump_on:
            self._recorder.writer.on_timeout = self._timed_out
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="allranks-recorder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and removes the handlers."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        _recorders.discard(self._recorder)

    # -- thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._recorder.options.poll_s):
                writer = self._recorder.writer
                if writer is None:
                    return
                writer.sweep(everything=True)
        except Exception as error:  # a thread's entry
            if not sys.is_finalizing():
                warn_once(f"the completion of some calls is recorded late: {error!r}; training continues")

    # -- exits --------------------------------------------------------------------------------------------------

    def _at_exit(self) -> None:
        self._guard(self._close)

    def _close(self) -> None:
        recorder = self._recorder
        if not recorder.active_process:
            return
        if "exit" in recorder.options.dump_on:
            self._dump("exit")
        recorder.close("exit")

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._guard(self._note_exception, kind, error, trace)
        self._previous_hook(kind, error, trace)

    def _note_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if recorder.active and recorder.box is not None:
            text = without_secrets(_SOURCE_LINE.sub("", str(error).strip()[:MAX_ERROR]))
            line, text = _of_worker(text) or (user_line(trace), text)
            place = f" ({line})" if line else ""
            closed = f"exception: {kind.__name__}{place}: {text}".removesuffix(": ")
            recorder.box.mark_closed(closed, time.time_ns())
            wake_agent()
            if "exception" in recorder.options.dump_on and not issubclass(kind, KeyboardInterrupt):
                self._dump("exception")

    def _timed_out(self, first: bool) -> None:
        """Writes a dump for the first timeouts; another thread with the same timeout waits until it is on disk."""
        if not first:
            self._dumped.wait(timeout=5.0)
            return
        self._timeouts += 1
        if self._timeouts <= MAX_TIMEOUT_DUMPS:
            self._dump("timeout")
            self._dumped.set()

    def _dump(self, reason: str) -> None:
        """Writes a dump; errors, such as a full disk or interpreter shutdown, are only printed."""

        def dump() -> None:
            write_native(self._recorder.dump_file(reason=reason), self._recorder.rank)

        ErrorGuard(lambda error: print(f"allranks: no dump on {reason}: {error}", file=sys.stderr))(dump)


def user_line(at: TracebackType | FrameType | None) -> str:
    """ "train.py:44": the innermost line of the user's code in a traceback or stack; "" if there is none."""
    stack = [*traceback.walk_stack(at)][::-1] if isinstance(at, FrameType) else traceback.walk_tb(at)
    return _innermost((frame.f_code.co_filename, line) for frame, line in stack)


def _innermost(lines: Iterable[tuple[str, int]]) -> str:
    place = ""
    for file, line in lines:
        if is_user_file(file):
            place = f"{os.path.basename(file)}:{line}"
    return place


def _of_worker(text: str) -> tuple[str, str] | None:
    """(line, text) of an exception in a DataLoader worker, which torch re-raises in the rank as text with a traceback."""
    found = _WORKER.match(text)
    if found is None:
        return None
    frames = [(file, int(line)) for file, line in _FRAME.findall(found["trace"])]
    message = re.split(r"^ .*\n", found["trace"], flags=re.M)[-1].strip().partition(": ")[2]
    return _innermost(frames), f"{message} (in {found['who']})".lstrip()


def describe_exit(error: SystemExit | KeyboardInterrupt) -> str:
    """ "exit code 3 (sys.exit at train.py:44): TEXT", with the text of sys.exit or of the exception being handled.

    "" for code 0; an interrupt is described as an exception.
    """
    if isinstance(error, KeyboardInterrupt):
        return f"exception: KeyboardInterrupt ({user_line(error.__traceback__)})"
    code, handled = error.code, error.__context__
    if not code:
        return ""
    status, text = (code & 0xFF, "") if isinstance(code, int) else (1, str(code))
    if isinstance(handled, Exception):
        text = f"{text} after {type(handled).__name__}: {_SOURCE_LINE.sub('', str(handled))}".lstrip()
    line, text = user_line(error.__traceback__), without_secrets(text[:MAX_ERROR])
    return f"exit code {status}{f' (sys.exit at {line})' if line else ''}{f': {text}' if text else ''}"


def wake_agent() -> None:
    """Makes the agent read the box now: exit handlers may take seconds before the process exits."""
    agent = os.environ.get("ALLRANKS_AGENT_PID", "")
    if agent.isdigit():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(b"!", wakeup_address(int(agent)))


def write_native(dump: Path, rank: int) -> None:
    """Writes torch's own rings next to our dump, each in its own folder: NAME.nccl/rank_R, NAME.fr/rank_R."""
    for source, data in native_dumps().items():
        folder = dump.parent.with_name(f"{dump.parent.name}.{source.replace(os.sep, '_')}")
        write_atomically(folder / f"rank_{max(rank, 0)}", data)


def _in_child() -> None:
    """Disables recording in a forked child, such as a DataLoader worker."""
    for recorder in list(_recorders):
        recorder.abandon_in_child()
    _recorders.clear()


os.register_at_fork(after_in_child=_in_child)
