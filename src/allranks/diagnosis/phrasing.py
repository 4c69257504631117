"""Short, exact texts for ranks, lines, calls and times, used by every sentence. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from allranks.diagnosis.job import Job
from allranks.model.formatting import count as count
from allranks.model.formatting import duration
from allranks.model.formatting import ranks_text as ranks_text
from allranks.model.stacks import is_user_file
from allranks.model.trace import Frame

#: Files of torch and of the machinery around a call; not a project of the user's in a folder called torch or accelerate.
_INTERNAL = re.compile(
    r"(?:(?:site|dist)-packages|lib|pytorch)/torch/|(?:^|/)torch/(?:_|overrides\.py|(?:distributed|nn|autograd|utils|optim)/)"
    r"|(?:(?:site|dist)-packages|torchft|accelerate/src)/(?:torchft|accelerate)/|/allranks/recording/|/deepspeed/comm"
    r"|<frozen|/contextlib\.py|/threading\.py|/multiprocessing/|^<|\.so(?![a-z])|\.cpp$"
)

#: Errors that a rank gets because another one has gone.
_SECONDARY = re.compile(
    r"Connection (?:closed|reset|refused)|Broken pipe|[Tt]imed? ?out|aborted|remote (?:worker|process)|ncclRemoteError"
)


def is_secondary(text: str) -> bool:
    """Whether an error is the consequence of another rank's."""
    return _SECONDARY.search(text) is not None


@lru_cache(1 << 14)
def is_internal(frame: Frame) -> bool:
    """Frames of torch and the standard machinery around a call: never where the user looks first."""
    return _INTERNAL.search(frame.file.replace("\\", "/")) is not None


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code; of a library when there is none; None without a stack."""
    own = [frame for frame in frames if not is_internal(frame)]
    outside = [frame for frame in own if is_user_file(frame.file.replace("\\", "/"))]
    best = outside or own or list(frames)
    return best[0] if best else None


def user_frames(frames: Sequence[Frame], limit: int = 6) -> tuple[Frame, ...]:
    """The frames of the user's own code, innermost first; of a library when there are none."""
    own = [frame for frame in frames if not is_internal(frame)]
    outside = [frame for frame in own if is_user_file(frame.file.replace("\\", "/"))]
    return tuple((outside or own or frames)[:limit])


def place(frames: Sequence[Frame]) -> str:
    """ "train.py:44 in sync_stats", or "" when unknown."""
    frame = user_frame(frames)
    if frame is None:
        return ""
    text = f"{frame.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{frame.line}"
    return text if frame.name in ("", "<module>") else f"{text} in {frame.name}"


seconds = duration


def ranks_wait(ranks: Iterable[int]) -> str:
    """ "rank 5 waits", "ranks 0, 2 wait"."""
    ordered = set(ranks)
    return f"{ranks_text(ordered)} wait{'s' if len(ordered) == 1 else ''}"


def who(job: Job, ranks: Iterable[int]) -> str:
    """Ranks with the host of a single one: "rank 5 (node7)"."""
    ordered = sorted(set(ranks))
    hosts = {job.host(rank) for rank in ordered} - {""}
    text = ranks_text(ordered)
    return f"{text} ({hosts.pop()})" if len(hosts) == 1 and len(ordered) <= 8 else text


def count_ranks(number: int) -> str:
    return count(number, "rank")


def call_text(job: Job, rank: int, row: int, seq: int, label: str) -> str:
    """ "all_reduce #1042 of group dp_0"."""
    return f"{job.op(rank, row) or 'collective'} #{seq} of group {label}"


def one_line(text: str, limit: int = 200) -> str:
    """The first line of a text, cut where it is too long for a sentence."""
    first = text.strip().partition("\n")[0].strip()
    return first if len(first) <= limit else f"{first[: limit - 1].rstrip()}…"


def line_in(text: str) -> str:
    """The line of code that a recorded error names: "train.py:9" of "exception: ValueError (train.py:9): …"; else ""."""
    found = re.search(r"\((?:sys\.exit at )?([\w.\-]+\.py:\d+)\)", text)
    return found[1] if found else ""


#: Causes of stacks whose names say little, or too much: a rank that waits for any file is in "checkpoint_io".
_DOING = {
    "checkpoint_io": "file I/O",
    "gil_held_native": "C code that holds the GIL",
    "d_state": "uninterruptible sleep",
}


def doing(cause: str) -> str:
    """What a rank does by its stacks, in brackets behind its line; "" where they do not tell."""
    return f" ({_DOING.get(cause, cause.replace('_', ' '))})" if cause not in ("", "unknown") else ""
