"""What the ledger costs in a rank and in the agent, for benchmarks/goodput.py: one real job in which it is switched off in
every second stretch of time, by the clock.

    _goodput_costs.py agent FOLDER RANKS STRETCHES    `allranks run` of the ranks, its ledger switched on and off
    _goodput_costs.py rank FOLDER STRETCHES           one rank: computes and makes CALLS collectives in each step

Everything is CPU time, which other work on the machine changes little. A ledger's part of a rank is the mark of garbage
collections; its part of an agent is `LedgerKeeper.observe`.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

STRETCH_S = 10.0  # comparing ranks is due twice in it
CALLS, WARM = 20, 3  # collectives in a step, so that the box is full; stretches that are not counted


@dataclass
class Stretches:
    """CPU seconds, and how much was done for them, in each stretch that was seen from its beginning to its end."""

    spent: list[tuple[bool, float, float]] = field(default_factory=list)  # on, CPU seconds, steps or seconds
    now: int = -1
    _from: tuple[float, float] | None = None

    def turn(self, done: float) -> bool:
        """Call often; whether the ledger is on from here on. `done`: steps or seconds so far."""
        stretch, cpu = int(time.time() // STRETCH_S), time.process_time()
        if stretch != self.now:
            if self._from is not None and done > self._from[1]:
                self.spent.append((self.now % 2 == 0, cpu - self._from[0], done - self._from[1]))
            self._from = (cpu, done) if self.now >= 0 else None  # the first is not whole
            self.now = stretch
        return stretch % 2 == 0


def run_rank(folder: Path, stretches: int) -> None:
    import torch
    import torch.distributed as dist

    import allranks
    from allranks.blackbox import phases

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen, over, matrix, step = Stretches(), torch.zeros(1), torch.eye(128), 0
    while True:
        marked = phases._collected in gc.callbacks
        if seen.turn(step) != marked:
            (gc.callbacks.remove if marked else gc.callbacks.append)(phases._collected)
        allranks.step(step)
        for _ in range(CALLS):
            matrix = matrix @ matrix
            dist.all_reduce(matrix.clone())
        gc.collect(2) if step % 50 == 0 else None
        step += 1
        over[0] = len(seen.spent) >= stretches
        dist.all_reduce(over)
        if over[0]:
            break
        time.sleep(0.05)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen.spent))
    dist.destroy_process_group()


def run_agent(folder: Path, ranks: int, stretches: int) -> int:
    from allranks.cli import main
    from allranks.ledger.agent import LedgerKeeper

    seen, ordinary = Stretches(), LedgerKeeper.observe

    def observe(
        keeper: LedgerKeeper, samples: Sequence[object], running: Sequence[int], now: float | None = None
    ) -> None:
        if seen.turn(time.monotonic()):
            ordinary(keeper, samples, running, now)  # type: ignore[arg-type]

    LedgerKeeper.observe = observe  # type: ignore[method-assign, assignment]
    job = ["run", "--job", "cost", "--standalone", "--no-spares", "--nproc-per-node", str(ranks)]
    code = main([*job, __file__, "rank", str(folder), str(stretches)])
    (folder / "agent.json").write_text(json.dumps(seen.spent))
    return code


def _pairs(spent: Sequence[tuple[bool, float, float]]) -> list[tuple[float, float]]:
    """CPU per step (or second) with the ledger on, and off right after or before."""
    spent = spent[WARM:]
    found = []
    for (first, cpu, done), (second, cpu2, done2) in zip(spent[::2], spent[1::2], strict=False):
        assert first != second
        values = (cpu / done, cpu2 / done2)
        found.append(values if first else values[::-1])
    return found


def _spread(values: Sequence[float]) -> dict[str, object]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"pairs": len(values), "median": round(middle, 6), "quartiles": [round(low, 6), round(high, 6)]}


def measure(folder: Path, ranks: int, stretches: int) -> dict[str, object]:
    """CPU of a rank with the ledger over CPU without it; share of a core of the agent for one rank."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ALLRANKS_HISTORY": "off",
    }
    environment |= {"ALLRANKS_DIR": str(folder / "boxes")}
    words = [sys.executable, __file__, "agent", str(folder), str(ranks), str(stretches)]
    with (folder / "run.log").open("w") as log:
        subprocess.run(words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    read = [json.loads((folder / f"rank{n}.json").read_text()) for n in range(ranks)]
    ratios = [on / off for spent in read for on, off in _pairs(spent)]
    of_agent = _pairs(json.loads((folder / "agent.json").read_text()))
    return {
        "rank_cpu_on_over_off": _spread(ratios),
        "agent_share_of_a_core_per_rank": _spread([(on - off) / ranks for on, off in of_agent]),
        "agent_without_ledger_share_of_a_core_per_rank": round(statistics.median(off for _, off in of_agent) / ranks, 6),
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        raise SystemExit(run_agent(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    run_rank(Path(sys.argv[2]), int(sys.argv[3]))
