"""A small cluster for the tests: a lighthouse process and replicas of one rank each, all forked."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import logging
import os
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here instead of in every fork

from allranks.drill.ranks import Outcome, Ranks
from allranks.drill.ranks import signal as mark
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer

from .faults import Fault, FaultPlan, inject

LIMIT_S = 120.0  # only hanging reaches it


@dataclass(frozen=True)
class Job:
    """What a replica trains, and when it stops.

    `script` is the course of the number of participants; the replica stops after `stay` steps at its last
    entry. The course is part of the healed state, so all members stop at the same step.
    """

    script: tuple[int, ...] = (2,)
    stay: int = 3
    min_replicas: int = 1
    asynchronous: bool = True
    width: int = 16
    adam: bool = True
    own_weights: bool = False  # every replica starts with other weights: only healing makes them equal
    faults: tuple[Fault, ...] = ()
    arm_at: int = 0  # faults are armed once that many take part; 0: at once
    timeout_s: float = 40.0
    pause_s: float = 0.0  # computing time of a step
    until_told: bool = False  # stops when told, instead of by the script
    timed: bool = False  # writes when each committed step began and ended to NAME.times
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Course:
    """How far the script has come; healed with the rest."""

    at: int = 0
    count: int = 0
    losses: dict[int, float] = field(default_factory=dict)

    def note(self, participants: int, script: tuple[int, ...]) -> None:
        if self.count and self.at + 1 < len(script) and participants == script[self.at + 1]:
            self.at, self.count = self.at + 1, 0
        if participants == script[self.at]:
            self.count += 1

    def done(self, job: Job) -> bool:
        return self.at == len(job.script) - 1 and self.count >= job.stay


class LighthouseProcess:
    """A lighthouse in a forked child of its own."""

    def __init__(
        self, options: Options, port: int = 0, host: str = "127.0.0.1", token: str = "", log: str = ""
    ) -> None:
        self.options, self.port, self.host, self.token, self.log = options, port, host, token, log
        self.address = ""
        self.pid = 0

    def __enter__(self) -> LighthouseProcess:
        return self if self.pid else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> LighthouseProcess:
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read_end)
            server = ServerOptions(host=self.host, port=self.port, token=self.token)
            _serve(self.options, server, write_end, self.log)
        os.close(write_end)
        with os.fdopen(read_end) as said:
            self.address = said.readline().strip()
        assert self.address, "the lighthouse did not start"
        self.port = int(self.address.rpartition(":")[2])
        return self

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0


def _serve(options: Options, server: ServerOptions, write_end: int, log_file: str) -> None:
    gc.freeze()  # as in the ranks: the parent's garbage is not ours
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if os.environ.get("ALLRANKS_TEST_LOG"):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s lighthouse %(message)s", force=True)
    if log_file:
        logging.basicConfig(level=logging.DEBUG, filename=log_file, force=True)
    try:
        lighthouse = Lighthouse(options, server).start()
        os.write(write_end, f"{lighthouse.address}\n".encode())
        os.close(write_end)
        while True:
            time.sleep(3600)
    finally:
        os._exit(1)


@dataclass
class Cluster:
    """Replicas by name. Leaving the block kills what is left."""

    lighthouse: LighthouseProcess
    job: Job
    replicas: dict[str, Ranks] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._tell_why()
        for ranks in self.replicas.values():
            ranks.close()
        self.folder.cleanup()

    def _tell_why(self) -> None:
        """After a failure: what each replica logged, and where those are that still run."""
        for ranks in self.replicas.values():
            ranks.kill(0, signal.SIGUSR1)
        time.sleep(1.0)  # they write their stacks; the test has failed already
        for path in sorted(Path(self.folder.name).glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            print("\n".join([f"== {path.stem}", *lines[-200:]]), file=sys.stderr)

    def start(self, *names: str, job: Job | None = None) -> None:
        for name in names:
            args = (self.lighthouse.address, name, job or self.job, self.folder.name)
            ranks = Ranks(self.function or train, 1, args=args, backend=None)
            ranks.start()
            self.replicas[name] = ranks

    def pid(self, name: str) -> int:
        return self.replicas[name].pids[0]

    def wait_for(self, mark: str, *names: str) -> None:
        for name in names:
            self.replicas[name].wait_for(mark, timeout_s=LIMIT_S)

    def progress(self, name: str) -> int:
        """The last step that a replica has committed."""
        path = Path(self.folder.name) / name
        lines = path.read_text().split() if path.exists() else []
        return int(lines[-1]) if lines else 0

    def wait_for_progress(self, name: str, step: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.progress(name) < step:
            assert time.monotonic() < deadline, f"{name} stands at step {self.progress(name)}, wanted {step}"
            time.sleep(0.01)

    def killed(self, *names: str) -> None:
        """Waits until the planned faults of these replicas fired and they are dead of them."""
        self.wait_for("fired kill", *names)
        for name in names:
            assert self.end(name).exit_code == -signal.SIGKILL

    def tell_to_stop(self) -> None:
        """Replicas with `until_told` stop at the step at which all have heard it."""
        (Path(self.folder.name) / "stop").touch()

    def end(self, name: str) -> Outcome:
        """Waits for one replica, however it ends."""
        ranks = self.replicas.pop(name)
        outcome = ranks.join(LIMIT_S)[0]
        ranks.close()
        return outcome

    def results(self) -> dict[str, Result]:
        """Waits for all that are left; none may have failed."""
        outcomes = {name: self.end(name) for name in sorted(self.replicas)}
        for name, outcome in outcomes.items():
            assert outcome.exit_code == 0, f"{name} exited {outcome.exit_code}: {outcome.error}"
        return {name: outcome.value for name, outcome in outcomes.items()}


@dataclass(frozen=True)
class Result:
    """How a replica ended."""

    step: int
    state: str  # fingerprint of parameters and optimizer state
    losses: dict[int, float]
    failed_steps: int
    quorum: int
    batches: int
    fired: int


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Equal only if every bit of parameters and optimizer state is."""
    digest = hashlib.sha256()
    for name, p in sorted(model.state_dict().items()):
        digest.update(name.encode() + p.contiguous().numpy().tobytes())
    for index, state in sorted(optimizer.state_dict()["state"].items()):
        for key, value in sorted(state.items()):
            raw = (
                value.contiguous().numpy().tobytes()
                if isinstance(value, torch.Tensor)
                else repr(value).encode()
            )
            digest.update(f"{index}{key}".encode() + raw)
    return digest.hexdigest()[:16]


def batch(step: int, width: int) -> torch.Tensor:
    """The same for every replica: so the mean over two replicas is what one alone would compute."""
    return torch.randn(8, width, generator=torch.Generator().manual_seed(1000 + step))


def build(job: Job) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(
        torch.nn.Linear(job.width, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)
    )
    kind = torch.optim.AdamW if job.adam else torch.optim.SGD
    return model, kind(model.parameters(), lr=0.01)


def train(rank: int, world: int, address: str, name: str, job: Job, folder: str) -> Result:
    """One replica: joins, trains, survives, stops when the script is through. `a.1` and `a.2` are processes of replica a."""
    said = open(f"{folder}/{name}-{os.getpid()}.log", "w")  # noqa: SIM115
    stream = None if os.environ.get("ALLRANKS_TEST_LOG") else said
    logging.basicConfig(
        level=logging.DEBUG, format=f"%(asctime)s {name} %(message)s", stream=stream, force=True
    )
    faulthandler.register(signal.SIGUSR1, file=said)
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(name.encode()) if job.own_weights else 7)
    model, inner = build(job)
    course = Course()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        course.at, course.count = state["course"][:2]
        course.losses = dict(state["course"][2])

    def save() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": inner.state_dict(),
            "course": [course.at, course.count, course.losses],
        }

    manager = Manager(
        load_state_dict=load, state_dict=save, min_replica_size=job.min_replicas, rank=0, world_size=1,
        lighthouse_addr=address, replica_id=name.partition(".")[0], use_async_quorum=job.asynchronous, timeout=job.timeout_s,
        quorum_timeout=job.timeout_s, connect_timeout=job.timeout_s, **job.options,
    )  # fmt: skip
    injector = inject(manager, FaultPlan(), on_fire=lambda fault: mark(f"fired {fault.kind}"))
    own = [replace(fault) for fault in job.faults if fault.replica == name]
    if not job.arm_at:
        injector.left.extend(own)
    ddp = DistributedDataParallel(manager, model, bucket_cap_mb=0.002)
    optimizer = Optimizer(manager, inner)
    progress = open(f"{folder}/{name}", "a")  # noqa: SIM115
    times = open(f"{folder}/{name}.times", "a") if job.timed else None  # noqa: SIM115
    failed = 0
    stop = False
    while not stop:
        began = time.monotonic()
        optimizer.zero_grad()
        step = manager.current_step()
        loss = ddp(batch(step, job.width)).square().mean()
        if job.pause_s:
            time.sleep(job.pause_s)
        loss.backward()
        told = torch.tensor([float(Path(folder, "stop").exists())])
        if job.until_told:
            manager.allreduce(told, reduce_op=torch.distributed.ReduceOp.SUM).wait()
        participants = manager.num_participants()
        counted = manager.is_participating()
        if optimizer.step():
            if times is not None:
                times.write(f"{began} {time.monotonic()}\n")
                times.flush()
            course.note(participants, job.script)
            stop = bool(told.item()) if job.until_told else course.done(job)
            if counted:
                course.losses[step] = loss.item()
            if course.count:
                mark(f"act {course.at}")
            progress.write(f"{manager.current_step()}\n")
            progress.flush()
            if job.arm_at and participants >= job.arm_at and own:
                injector.left.extend(own)
                own = []
        else:
            failed += 1
    result = Result(
        manager.current_step(), fingerprint(model, inner), course.losses, failed, manager.quorum_id(),
        manager.batches_committed(), len(injector.fired),
    )  # fmt: skip
    manager.shutdown()
    return result


def alone(rank: int, world: int, job: Job, steps: int) -> tuple[str, dict[int, float]]:
    """The undisturbed run: one process, no manager, the same initial parameters and batches."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model, inner = build(job)
    losses = {}
    for step in range(steps):
        inner.zero_grad()
        loss = model(batch(step, job.width)).square().mean()
        loss.backward()
        inner.step()
        losses[step] = loss.item()
    return fingerprint(model, inner), losses


def undisturbed(job: Job, steps: int) -> tuple[str, dict[int, float]]:
    """`alone` in a process of its own."""
    with Ranks(alone, 1, args=(job, steps), backend=None) as ranks:
        found: tuple[str, dict[int, float]] = ranks.values(LIMIT_S)[0]
        return found
