"""Starts real `allranks run` agents, follows their job by the files it writes, and ends every one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from proc import gone, parent_of

TRAIN = Path(__file__).parent / "train.py"
LIMIT_S = 300.0  # for hanging only


class Job:
    """One job in one folder: any number of agents, each a "node" with one rank unless told otherwise."""

    def __init__(self, folder: Path, last: int, *flags: str) -> None:
        self.folder = folder
        self.last = last
        self.flags = flags
        self.agents: list[subprocess.Popen[bytes]] = []
        self.logs: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.gate(0)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self.agents:
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        if kind is None:
            self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Neither a rank nor what it had started is alive, some time after the agents."""
        pids = {row[name] for row in self.events() for name in ("pid", "child")}
        deadline = time.monotonic() + LIMIT_S
        while left := [pid for pid in pids if not gone(pid)]:
            assert time.monotonic() < deadline, f"outlived their agents: {left}"
            time.sleep(0.02)

    def add(self) -> subprocess.Popen[bytes]:
        """Starts one more agent."""
        number = len(self.logs)
        self.logs.append(self.folder / f"agent-{number}.log")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ALLRANKS_")}
        environment.update({"ALLRANKS_DIR": str(self.folder / f"box-{number}"), "OMP_NUM_THREADS": "1"})
        with open(self.logs[-1], "wb") as log:
            command = [sys.executable, "-m", "allranks", "run", *self.flags, "--no-lighthouse", "--no-watch"]
            agent = subprocess.Popen(
                [*command, str(TRAIN), str(self.folder), str(self.last)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self.folder,
            )  # fmt: skip
        self.agents.append(agent)
        return agent

    def agent_of(self, ranks: list[dict[str, Any]], rank: int) -> subprocess.Popen[bytes]:
        """The agent that runs a rank."""
        parent = parent_of(next(row["pid"] for row in ranks if row["rank"] == rank))
        return next(agent for agent in self.agents if agent.pid == parent)

    def agent_at(self, endpoint: str) -> subprocess.Popen[bytes]:
        """The agent that listens at host:port."""
        port = int(endpoint.rpartition(":")[2])
        return next(agent for agent in self.agents if port in listening(agent.pid))

    def kill_node(self, agent: subprocess.Popen[bytes], ranks: list[dict[str, Any]]) -> None:
        """kill -9 of an agent; its ranks, and what they have started, must go with it."""
        left = [row[name] for row in ranks if parent_of(row["pid"]) == agent.pid for name in ("pid", "child")]
        assert left, "the killed node has ranks"
        os.kill(agent.pid, signal.SIGKILL)
        agent.wait(60)
        self.agents.remove(agent)
        self.wait("the end of the killed node's ranks", lambda: all(gone(pid) for pid in left))

    def gate(self, step: int) -> None:
        """Lets the job go on up to this step."""
        waiting = self.folder / "gate.new"
        waiting.write_text(str(step))
        waiting.replace(self.folder / "gate")

    def events(self) -> list[dict[str, Any]]:
        """The starts of ranks so far, in order."""
        return _lines(self.folder / "events.jsonl")

    def steps(self) -> list[dict[str, Any]]:
        """The steps finished so far, in order, repeated ones too."""
        return _lines(self.folder / "steps.jsonl")

    def timeline(self) -> list[dict[str, Any]]:
        """What the model has really been through: of a repeated step the last time counts."""
        return [row for _, row in sorted({row["step"]: row for row in self.steps()}.items())]

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        """Waits until something holds and returns it; fails with the agents' output."""
        deadline = time.monotonic() + LIMIT_S
        while not (found := condition()):
            ended = [agent.returncode for agent in self.agents if agent.poll() is not None]
            if time.monotonic() > deadline or len(ended) == len(self.agents):
                raise AssertionError(f"{what}: not seen (agents that ended: {ended})\n{self.output()}")
            time.sleep(0.05)
        return found

    def wait_for_world(self, size: int, after: int = 0) -> list[dict[str, Any]]:
        """Waits until all ranks of a world of this size have started, later than the first `after` events."""

        def found() -> list[dict[str, Any]]:
            rows = [row for row in self.events()[after:] if row["new_world_size"] == size]
            newest = {row["rank"]: row for row in rows}
            return list(newest.values()) if len(newest) == size else []

        return list(self.wait(f"a world of {size}", found))

    def wait_for_step(self, step: int, world: int | None = None) -> dict[str, Any]:
        """Waits until a step of at least this number has finished in a world of that size."""

        def found() -> dict[str, Any] | None:
            rows = [row for row in self.steps() if row["step"] >= step and world in (None, row["world"])]
            return rows[-1] if rows else None

        return dict(self.wait(f"step {step} in a world of {world}", found))

    def wait_for_end(self) -> list[int]:
        """Waits until every agent has ended; their exit codes."""
        deadline = time.monotonic() + LIMIT_S
        try:
            return [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self.output()}") from None

    def output(self) -> str:
        """The end of every agent's output."""
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.logs)


def listening(pid: int) -> set[int]:
    """The TCP ports at which a process listens."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def assert_same_run(job: Job, undisturbed: list[float]) -> None:
    """Every step once in the end, every sample once, and the losses of the run that nothing happened to."""
    from .train import BATCH

    timeline = job.timeline()
    assert [row["step"] for row in timeline] == list(range(1, job.last + 1))
    assert {len(row["samples"]) for row in timeline} == {BATCH}
    assert sorted(number for row in timeline for number in row["samples"]) == list(range(BATCH * job.last))
    assert [row["loss"] for row in timeline] == pytest.approx(undisturbed, rel=0.01)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
