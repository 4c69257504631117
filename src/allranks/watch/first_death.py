"""Which rank died first, and of what. Pure: samples of black boxes and known endings in, deaths out."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from allranks.model.incident import Failure
from allranks.watch.exits import Ending
from allranks.watch.samples import RankSample

#: Ended because somebody asked: Ctrl-C, the launcher's own stop (a restart, a node that comes or goes).
_ASKED = frozenset(
    {0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, 128 + signal.SIGTERM, 128 + signal.SIGINT}
)
_EXCEPTION = re.compile(r"exception: (?P<kind>\w+)(?: \((?P<where>[^()]*:\d+)\))?(?:: ?(?P<text>.*))?", re.S)
#: What a rank says whose peer went before it.
_ECHO = re.compile(
    r"gloo|nccl|Dist(Backend|Network|Store)Error|Connection (closed|reset|refused)|Broken pipe|socket"
    r"|(Read|Write)v? error \[",
    re.I,
)
#: No broken connection raises these, whatever their text names.
_PROGRAM_ERRORS = frozenset(
    [
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "FileNotFoundError",
        "ImportError",
        "IndexError",
        "KeyError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "OverflowError",
        "RecursionError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    ]
)


@dataclass(frozen=True)
class Death:
    """One rank that ended and should not have. `echo`: as it ends when another went first."""

    rank: int
    pid: int
    at: float  # epoch seconds
    reason: str  # "died of SIGKILL", "raised RuntimeError"
    where: str = ""  # the line that raised, "" for a sudden death
    text: str = ""  # of the exception, cut short
    echo: bool = False
    seen: float = 0.0  # epoch seconds: when the agent knew of it; 0 = now

    @property
    def sentence(self) -> str:
        """For the log and the page."""
        return Failure(self.rank, self.reason, self.where, self.text).sentence

    def failure(self, samples: Sequence[RankSample]) -> Failure | None:
        """As the program's own failure, which may come again; None for an echo and for a kill."""
        own = next((s for s in samples if s.pid == self.pid), None)
        if own is None or self.echo or not self.reason.startswith(("raised", "exited")):
            return None
        return Failure(self.rank, self.reason, self.where, self.text, own.step, own.calls_completed)


def find_deaths(
    samples: Sequence[RankSample], endings: Mapping[int, Ending], *, since_ns: int, raised_only: bool = False
) -> list[Death]:
    """The dead among ranks that started at or after `since_ns`; with `raised_only` those who say it themselves."""
    found = []
    for sample in samples:
        if sample.start_ns < since_ns:
            continue
        ending = endings.get(sample.pid)
        if ending is not None and ending.at * 1e9 < sample.start_ns:
            ending = None  # of an earlier process with this pid
        death = _raised(sample) or (None if raised_only else _ended(sample, ending))
        if death is not None:
            found.append(death)
    return found


def find_first(deaths: Collection[Death]) -> Death | None:
    """Whom the others followed: the first that does not only echo another's end; None when there are no deaths."""
    return min(deaths, key=lambda death: (death.echo, death.at, death.rank), default=None)


def _raised(sample: RankSample) -> Death | None:
    said = _EXCEPTION.match(sample.closed)
    if said is None or said["kind"] in ("KeyboardInterrupt", "SystemExit", "SignalException"):
        return None
    text, where = (said["text"] or "").strip(), said["where"] or ""
    at = sample.closed_ns / 1e9
    echo = said["kind"] not in _PROGRAM_ERRORS and bool(_ECHO.search(sample.closed))
    return Death(sample.rank, sample.pid, at, f"raised {said['kind']}", where, text, echo)


def _ended(sample: RankSample, ending: Ending | None) -> Death | None:
    if sample.alive:
        return None
    if ending is None or ending.code is None:
        if sample.closed:
            return None
        at, seen = (ending.at, ending.at) if ending else (sample.last_ns / 1e9, 0.0)
        return Death(sample.rank, sample.pid, at, "exited without shutting down", seen=seen)
    if ending.code in _ASKED:
        return None
    echo = ending.code == -signal.SIGABRT
    return Death(sample.rank, sample.pid, ending.at, ending.words, echo=echo, seen=ending.at)
