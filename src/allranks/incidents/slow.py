"""Opens an incident for a rank that became slow, with evidence and an action of the policy. Runs in the agent, on a thread.

The ledger notices slow ranks (ledger/slow.py). Evidence: stack samples of the rank, clocks of its GPU, pauses by garbage
collection.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.blackbox.phases import GC, PhaseMark
from allranks.errors import AllranksError
from allranks.incidents.folder import IncidentFolder
from allranks.incidents.pipeline import IncidentPipeline
from allranks.incidents.policy import HangFacts, PolicyState, decide_slow
from allranks.model.diagnosis import Moment
from allranks.model.files import write_atomically
from allranks.model.formatting import count, duration
from allranks.model.stacks import StackFrame
from allranks.stacktraces import CollectOptions, Selection, collect, find_targets
from allranks.stacktraces.gpus import query_clocks
from allranks.stacktraces.views import place, where
from allranks.watch.samples import RankSample, read_samples

log = logging.getLogger("allranks.agent")

SAMPLES, PROFILE = 5, 40  # stack samples for a report, and for a profile
PAUSE_S = 0.2  # between two samples
LATELY_S = 300.0


@dataclass
class SlowRanks:
    """Opens an incident for each rank that is reported as slow."""

    pipeline: IncidentPipeline
    policy: PolicyState = field(default_factory=PolicyState)

    def note(self, rank: int, began: float, sentence: str) -> None:
        """Starts the examination of a slow rank. On the watch's thread: quick."""
        noticed = time.time()
        self.pipeline.start(lambda: self._examine(rank, began, noticed, sentence), "allranks-slow")

    def _examine(self, rank: int, began: float, noticed: float, sentence: str) -> None:
        options = self.pipeline.options
        samples = read_samples(options.folder)
        own = next((sample for sample in samples if sample.rank == rank and sample.alive), None)
        if own is None:
            return
        opened = self.pipeline.open("slow", sentence, samples, ranks=(rank,))
        opened.update(Moment("became slow", began), Moment("noticed", noticed, sentence))
        rounds = PROFILE if options.policy.on_slow == "profile" else SAMPLES
        lines = [*self._sample_stacks(own, opened, rounds), *query_clocks(own.pid)]
        lines += describe_pauses(own.phases, time.time())
        opened.update(Moment("evidence", time.time(), "; ".join(lines) or "nothing could be read"))
        members = tuple(sorted({options.replica_of(s.rank) for s in samples if s.alive}))
        case = HangFacts(
            options.mode, "slow", (rank,), 1.0, options.ranks_per_replica, options.replicas, members
        )
        now = time.monotonic()
        action = decide_slow(now, case, self.policy, options.policy, options.may_leave)
        if self.pipeline.acts(action):
            self.policy = self.policy.after(now, action.replica, options.policy.window_s)
            self.pipeline.act(opened, action)
        else:
            opened.update(action=action)
        opened.update(closed=time.time())
        self.pipeline.publisher.publish(opened)

    def _sample_stacks(self, own: RankSample, opened: IncidentFolder, rounds: int) -> list[str]:
        """The most frequent lines of the rank; writes all stacks into the incident's folder."""
        chosen = Selection(pids=(own.pid,), box_folders=(self.pipeline.options.folder,))
        try:
            found = collect(find_targets(chosen), CollectOptions(rounds, PAUSE_S, native="never")).processes
        except (OSError, ValueError, AllranksError) as error:
            log.info("%s: stacks could not be read: %s", opened.current.id, error)
            found = ()
        shots = [shot for process in found if process.pid == own.pid for shot in process.snapshots]
        stacks = [stack.frames for shot in shots for stack in shot.stacks if stack.tid == own.pid]
        write_stacks(opened.path / "slow_stacks.txt", stacks)
        return describe_places(stacks)


def write_stacks(path: Path, stacks: Sequence[Sequence[StackFrame]]) -> None:
    """Writes one line per stack, outermost frame first, with its count: the format of flame graph tools."""
    lines = Counter(";".join(place(frame) for frame in reversed(frames)) for frames in stacks)
    write_atomically(path, "".join(f"{line} {number}\n" for line, number in lines.most_common()))


def describe_places(stacks: Sequence[Sequence[StackFrame]]) -> list[str]:
    """ "in 4 of 5 samples at data.py:31 in load_batch"."""
    places = Counter(line for frames in stacks if (line := where(frames)))
    return [f"in {number} of {len(stacks)} samples at {line}" for line, number in places.most_common(2)]


def describe_pauses(phases: Sequence[PhaseMark], now: float) -> list[str]:
    """Pauses by garbage collection in the last minutes."""
    recent = [m for m in phases if m.name == GC and m.end_ns and m.end_ns / 1e9 > now - LATELY_S]
    took = sum(mark.end_ns - mark.begin_ns for mark in recent) / 1e9
    return [f"garbage collection: {count(len(recent), 'long pause')}, {duration(took)}"] if recent else []
