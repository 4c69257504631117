"""Counts of soak runs, their table, and the summary that docs/performance.md is made from.

python -m tests.soak.table RESULT… [--keep benchmarks/results/soak.json]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from tests.soak.faults import STREAMS

Key = tuple[str, str]  # kind of process, fault


@dataclass
class Result:
    """Of one run, or of several together."""

    seeds: list[int] = field(default_factory=list)
    seconds: float = 0.0
    absent: Counter[Key] = field(default_factory=Counter)  # there was no such process, or we are not root
    recovered_s: dict[Key, list[float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    restores: int = 0
    reported: int = 0
    # of steps within which members changed, see checks.Changed
    changed: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, key: Key, seconds: float) -> None:
        """One fault after which the training continued."""
        self.recovered_s.setdefault(key, []).append(round(seconds, 2))

    def tried(self) -> Iterable[tuple[Key, int]]:
        """How often each fault came up, done or not."""
        keys = {**self.recovered_s, **self.absent}
        return [(key, len(self.recovered_s.get(key, ())) + self.absent[key]) for key in keys]

    def merge(self, other: Result) -> None:
        """Adds another run."""
        self.seeds += other.seeds
        self.seconds += other.seconds
        self.absent += other.absent
        for key, times in other.recovered_s.items():
            self.recovered_s.setdefault(key, []).extend(times)
        self.steps = dict(Counter(self.steps) + Counter(other.steps))
        self.restores += other.restores
        self.reported += other.reported
        self.changed = dict(Counter(self.changed) + Counter(other.changed))
        self.wrong += other.wrong

    def write(self, path: Path) -> None:
        """As JSON."""
        row = {**vars(self), "absent": _flat(self.absent), "recovered_s": _flat(self.recovered_s)}
        path.write_text(json.dumps(row))

    @classmethod
    def read(cls, path: Path) -> Result:
        row = json.loads(path.read_text())
        absent = Counter({_key(key): count for key, count in row["absent"].items()})
        recovered_s = {_key(key): times for key, times in row["recovered_s"].items()}
        return cls(**{**row, "absent": absent, "recovered_s": recovered_s})

    def table(self) -> str:
        """Markdown."""
        lines = [
            "| process | fault | times | recovery, median | slowest |",
            "|---|---|---:|---:|---:|",
        ]
        for kind, fault in (
            (k, f) for kinds in STREAMS.values() for k, faults in kinds.items() for f in faults
        ):
            times = sorted(self.recovered_s.get((kind, fault), ()))
            shown = f"{times[len(times) // 2]:.1f} s | {times[-1]:.1f} s" if times else "– | –"
            lines.append(f"| {kind} | {fault} | {len(times)} | {shown} |")
        total = sum(map(len, self.recovered_s.values()))
        absent = f", {self.absent.total()} could not be done" if self.absent else ""
        found = f"{len(self.wrong)} violations." if self.wrong else "no violation."
        steps = self.steps
        return "\n".join(lines) + (
            f"\n\n{total} faults{absent} in {self.seconds / 60:.0f} minutes ({_seeds(self.seeds)}); "
            f"{steps.get('replicas', 0):,} steps of the replicas and {steps.get('job', 0):,} of the whole job, "
            f"{self.restores} restores; {self.reported} faults that had to be reported by rank; {found}{self._shares()}"
        )

    def summary(self) -> dict[str, object]:
        """The numbers that are kept."""
        samples = self.changed.get("samples") or 1
        return {
            "faults": sum(map(len, self.recovered_s.values())),
            "not_possible": self.absent.total(),
            "minutes": round(self.seconds / 60),
            "seeds": self.seeds,
            "steps_of_replicas": self.steps.get("replicas", 0),
            "steps_of_whole_job": self.steps.get("job", 0),
            "restores": self.restores,
            "reported": self.reported,
            "violations": len(self.wrong),
            "steps_with_changes": self.changed.get("steps", 0),
            "left_out_percent": round(100 * self.changed.get("left_out", 0) / samples, 1),
            "twice_percent": round(100 * self.changed.get("twice", 0) / samples, 1),
            "recovery": {
                " ".join(key): {
                    "times": len(times),
                    "median_s": sorted(times)[len(times) // 2],
                    "slowest_s": max(times),
                }
                for key, times in self.recovered_s.items()
            },
        }

    def _shares(self) -> str:
        if not (steps := self.changed.get("steps")):
            return ""
        left_out, twice = (
            100 * self.changed.get(key, 0) / self.changed["samples"] for key in ("left_out", "twice")
        )
        return (
            f" Within {steps:,} steps members changed: {left_out:.0f} % of the samples of these were left out, "
            f"{twice:.1f} % used twice; in all others every sample was used once."
        )


def _seeds(seeds: list[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def _flat(counts: Mapping[Key, object]) -> dict[str, object]:
    return {" ".join(key): value for key, value in counts.items()}


def _key(text: str) -> Key:
    kind, _, fault = text.partition(" ")
    return kind, fault


def main() -> None:
    """Prints the table of several runs, and keeps their summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--keep", type=Path, help="write the summary there")
    args = parser.parse_args()
    whole = Result()
    for path in args.results:
        whole.merge(Result.read(path))
    print(whole.table())
    if args.keep:
        kept = {"command": "make soak", "date": str(date.today()), "name": "soak", "numbers": whole.summary()}
        args.keep.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
