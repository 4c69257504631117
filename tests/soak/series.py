"""Many cases of one scenario, each from a seed of its own:

    python -m tests.soak.series NAME [--count 100] [--seed 0] [--jobs 2] [--limit SECONDS] [--output FOLDER]

owners: two processes of one replica name. partitions: cuts between 3 to 6 replicas (needs root, ip and nft). sequences: freezes,
deaths and returns. model: the state machine of the lighthouse, about 1,200 events in each case.

Writes one JSON line per case into FOLDER/NAME.jsonl as it ends, and the log of each failed case beside it. What is not finished
when the time is over counts as not run. Exit 0 when no case failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from allranks.launch.rank_entry import die_with_parent

sys.path.insert(0, str(Path(__file__).parent.parent))  # as pytest does

#: name -> function of a seed, which raises when something is wrong and returns what is worth noting
SERIES = {
    "owners": "manager.test_owners:play",
    "partitions": "manager.test_partitions:play",
    "sequences": "manager.test_lost_holders:play",
    "model": "lighthouse.test_model:play_many",
}
CASE_S = 300.0  # of one case
END_S = 10.0  # of its end when the time is over


@dataclass
class Case:
    """One seed in a process of its own."""

    seed: int
    log: Path
    pid: int = 0
    began: float = field(default_factory=time.monotonic)

    def start(self, play: Callable[[int], dict[str, object]]) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent(parent)
            self._play(play)

    def _play(self, play: Callable[[int], dict[str, object]]) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        row: dict[str, object] = {"ok": True}
        try:
            row |= play(self.seed)
        except BaseException as error:  # whatever it is, it is the result of this case
            traceback.print_exc()
            row = {"ok": False, "wrong": f"{type(error).__name__}: {str(error)[:600]}"}
        self.log.with_suffix(".json").write_text(json.dumps(row))
        sys.stdout.flush()
        os._exit(0)

    def result(self) -> dict[str, Any] | None:
        """How it ended; None while it runs."""
        late = time.monotonic() - self.began > CASE_S
        if late:
            self.kill()
        if not late and os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            return None
        path = self.log.with_suffix(".json")
        wrong = f"no end in {CASE_S:.0f} s" if late else "its process died"
        row = json.loads(path.read_text()) if path.exists() else {"ok": False, "wrong": wrong}
        path.unlink(missing_ok=True)
        if row["ok"]:
            self.log.unlink()
        return {"seed": self.seed, "seconds": round(time.monotonic() - self.began, 1), **row}

    def kill(self) -> None:
        """As Ctrl-C does, so that it takes down what it has built; then for good."""
        os.kill(self.pid, signal.SIGINT)
        deadline = time.monotonic() + END_S
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.05)


def run(name: str, seeds: range, jobs: int, end: float, folder: Path, out: IO[str]) -> tuple[int, int]:
    """Plays the seeds, `jobs` at a time; how many ended, and how many failed."""
    module, _, function = SERIES[name].partition(":")
    play = getattr(importlib.import_module(module), function)
    waiting, running, ended, failed = list(seeds), list[Case](), 0, 0
    while waiting or running:
        if time.monotonic() > end:
            for case in running:
                case.kill()
            break
        while waiting and len(running) < jobs:
            seed = waiting.pop(0)
            case = Case(seed, folder / f"{name}-{seed}.log")
            case.start(play)
            running.append(case)
        for case in list(running):
            if (row := case.result()) is not None:
                running.remove(case)
                ended, failed = ended + 1, failed + (not row["ok"])
                print(json.dumps({"series": name, **row}), file=out, flush=True)
                print(f"{name} {json.dumps(row)}"[:400], flush=True)
        time.sleep(0.02)
    return ended, failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SERIES)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=86400.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, default=None, metavar="FOLDER")
    args = parser.parse_args()
    end = time.monotonic() + args.limit
    folder = args.output or Path(tempfile.mkdtemp(prefix="allranks-series-"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{args.name}.jsonl").open("a") as out:
        ended, failed = run(args.name, range(args.seed, args.seed + args.count), args.jobs, end, folder, out)
    print(f"{args.name}: {ended} of {args.count} cases ended, {failed} failed; {folder}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
