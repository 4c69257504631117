"""What must hold whatever happens to a training. Pure: lines in, sentences about what is wrong out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
BATCH = 24  # samples of a step; the share of place p of n is p, p + n, p + 2n, ...


@dataclass
class ReplicaChecks:
    """Of replica mode: `take` lines as they come, `wrong` is what was found."""

    wrong: list[str] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)  # step -> of the state after it
    members: int = 0  # of the newest step
    _last: dict[int, int] = field(default_factory=dict)  # process -> its last committed step
    changed: Changed = field(default_factory=lambda: Changed())
    #: (step, quorum, size) -> place -> process that began the step there
    _tries: dict[tuple[int, int, int], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _seats: dict[tuple[int, int], dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    #: step -> process -> its commit
    _commits: dict[int, dict[int, Row]] = field(default_factory=lambda: defaultdict(dict))

    def take(self, rows: Iterable[Row]) -> None:
        """Lines of one process, in their order."""
        for row in rows:
            if row["kind"] == "try" and row["place"] is not None:
                self._try(row)
            elif row["kind"] == "commit":
                self._commit(row)

    def _try(self, row: Row) -> None:
        self._tries[row["step"], row["quorum"], row["size"]][row["place"]] = row["pid"]
        seats = self._seats[row["quorum"], row["size"]]
        if seats.setdefault(row["place"], row["replica"]) != row["replica"]:
            self.wrong.append(f"two quorums of number {row['quorum']}: place {row['place']} is taken twice")

    def _commit(self, row: Row) -> None:
        step, last = row["step"], self._last.get(row["pid"])
        if step >= max(self.hashes, default=0):
            self.members = row["size"]
        if self.hashes.setdefault(step, row["hash"]) != row["hash"]:
            self.wrong.append(f"step {step}: {row['replica']} has another state than the rest")
        self._last[row["pid"]] = step
        if row["place"] is None:
            return  # it has taken the state of the others: no step of its own
        if last is not None and step != last + 1:
            self.wrong.append(f"{row['replica']} committed step {step} after step {last}")
        self._commits[step - 1][row["pid"]] = row

    def finish(self) -> None:
        """What can be told when no line is missing any more."""
        steps = sorted(self.hashes)
        if steps and steps != list(range(1, steps[-1] + 1)):
            missing = sorted(set(range(1, steps[-1] + 1)) - set(steps))
            self.wrong.append(f"steps were lost: {missing[:10]}")
        for step, commits in self._commits.items():
            self._samples(step, commits)

    def _samples(self, step: int, commits: dict[int, Row]) -> None:
        """Of one step: all who applied it summed in one group, and who is in that group gave its share once."""
        groups = {(row["summed"][0], row["summed"][2]) for row in commits.values()}
        if len(groups) > 1:
            self.wrong.append(f"step {step} was summed in several groups: {sorted(groups)}")
            return
        ((number, size),) = groups
        given = [row["summed"][1] for row in commits.values()]
        if len(set(given)) != len(given) or None in given:
            self.wrong.append(f"step {step}: places {given} of quorum {number}: one is taken twice")
        began = {key: places for key, places in self._tries.items() if key[0] == step}
        lost = {pid for places in began.values() for pid in places.values()} - set(commits)
        if size - len(given) > len(lost):
            self.wrong.append(
                f"step {step}: {size} gave their samples, only {len(given)} + {len(lost)} began it"
            )
        shares = [(row["quorum"], row["size"], row["place"]) for row in commits.values()]
        if {share[:2] for share in shares} == {(number, size)}:
            missing = set(range(size)) - set(self._tries[step, number, size])
            if missing:
                self.wrong.append(f"step {step}: samples of places {sorted(missing)} are missing")
        else:
            self.changed.add(shares)


@dataclass
class Changed:
    """Steps within which members changed: how much of their batches was left out, or used twice."""

    steps: int = 0
    samples: int = 0
    left_out: int = 0
    twice: int = 0

    def add(self, shares: Iterable[tuple[int, int, int]]) -> None:
        """One step, by the (quorum, size, place) of the share that each of its members took."""
        used = Counter(sample for _, size, place in shares for sample in range(place, BATCH, size))
        self.steps += 1
        self.samples += BATCH
        self.left_out += BATCH - len(used)
        self.twice += used.total() - len(used)


@dataclass
class JobChecks:
    """Of whole-job mode: a repeated step has the same state, and a restored state is one that was there."""

    wrong: list[str] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    restores: int = 0
    _last: dict[int, int] = field(default_factory=dict)

    def take(self, rows: Iterable[Row]) -> None:
        """Lines of one process, in their order."""
        for row in rows:
            step, last = row.get("step", 0), self._last.get(row["pid"])
            if (
                row["kind"] in ("step", "restored")
                and self.hashes.setdefault(step, row["hash"]) != row["hash"]
            ):
                self.wrong.append(f"step {step}: rank {row['replica']} has another state ({row['kind']})")
            self.restores += row["kind"] == "restored"
            if row["kind"] == "start" and self.hashes and max(self.hashes) > 40:
                self.wrong.append(f"training began anew after step {max(self.hashes)}")
            if row["kind"] == "step" and last is not None and step != last + 1:
                self.wrong.append(f"rank {row['replica']} made step {step} after step {last}")
            self._last[row["pid"]] = step

    def finish(self) -> None:
        """Steps are contiguous over all lives."""
        steps = sorted(self.hashes)
        if steps and steps[-1] - steps[0] + 1 != len(steps):
            self.wrong.append("steps were lost")
