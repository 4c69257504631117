"""What must hold whatever happens to a training. Pure: lines in, sentences about what is wrong out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass
class ReplicaChecks:
    """Of replica mode: `take` lines as they come, `wrong` is what was found."""

    wrong: list[str] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)  # step -> of the state after it
    members: int = 0  # of the newest step
    _last: dict[int, int] = field(default_factory=dict)  # process -> its last committed step
    _tries: dict[tuple[int, int, int], dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    _seats: dict[tuple[int, int], dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    #: step -> (quorum before it, quorum after it, size before it) of those who committed it
    _commits: dict[int, set[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(set))

    def take(self, rows: Iterable[Row]) -> None:
        """Lines of one process, in their order."""
        for row in rows:
            if row["kind"] == "try" and row["place"] is not None:
                self._try(row)
            elif row["kind"] == "commit":
                self._commit(row)

    def _try(self, row: Row) -> None:
        self._tries[row["step"], row["quorum"], row["size"]][row["place"]] = row["replica"]
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
        self._commits[step - 1].add((row["quorum"], row["now"], row["size"]))

    def finish(self) -> None:
        """What can be told when no line is missing any more."""
        steps = sorted(self.hashes)
        if steps and steps != list(range(1, steps[-1] + 1)):
            missing = sorted(set(range(1, steps[-1] + 1)) - set(steps))
            self.wrong.append(f"steps were lost: {missing[:10]}")
        for of, ways in self._commits.items():
            if max(before for before, _, _ in ways) > min(after for _, after, _ in ways):
                self.wrong.append(f"step {of} was committed in two quorums: {sorted(ways)}")
            if len(ways) > 1 or any(before != after for before, after, _ in ways):
                continue  # members changed within the step: shares are those of before, or of after
            ((quorum, _, size),) = ways
            seen = set(self._tries[of, quorum, size])
            if seen != set(range(size)):
                self.wrong.append(
                    f"step {of}: samples of places {sorted(set(range(size)) - seen)} are missing"
                )


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
