"""Ray Train: records, watches and diagnoses its workers, and replaces a worker that hangs.

    from allranks.integrations.ray import TorchTrainer      # instead of ray.train.torch's

The driver starts a watching actor on each node (no CPU, no torch), which reads only the black boxes of the training workers. On
a hang it keeps the evidence, reports the rank and the line, and ends that worker. Then `FailureConfig(max_failures=...)`
restarts the worker group, and training continues from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import ray
import ray.train
import ray.train.torch

from allranks import recording as record
from allranks.blackbox.files import usable_folder
from allranks.incidents.job_overview import write_job
from allranks.incidents.loop import Watch
from allranks.incidents.peers import PeerAgents
from allranks.incidents.pipeline import WatchOptions
from allranks.incidents.policy import PolicyOptions
from allranks.incidents.publish import check_address
from allranks.launch.command_line import job_token
from allranks.launch.node_agent import NodeAgent
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.model.cluster import AGENT
from allranks.watch.silence import NoticeOptions

P = ParamSpec("P")
R = TypeVar("R")
NEW_NODES_S = 5.0  # between two checks for new nodes in the cluster


@dataclass(frozen=True)
class RayWatch:
    """Options of the watch over one training."""

    incidents: Path = field(default_factory=lambda: Path("allranks-incidents"))  # shared by all nodes
    recovery: bool = True  # end a worker that hangs; False: only report it
    notice_s: float = 10.0  # shortest silence that is examined
    pause_s: float = 1800.0  # how long a report with a checkpoint may take
    webhooks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for address in self.webhooks:
            check_address(address)


class TorchTrainer(ray.train.torch.TorchTrainer):
    """Ray's TorchTrainer with recorded workers; `watch=None` records only."""

    def __init__(
        self,
        train_loop_per_worker: Callable[..., object],
        *args: object,
        watch: RayWatch | None = RayWatch(),
        **named: object,
    ) -> None:
        run_config = named.get("run_config")
        name = getattr(run_config, "name", None) or f"ray-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"
        self.job, self.watch = str(name), watch
        pause_s = watch.pause_s if watch is not None else RayWatch.pause_s
        super().__init__(recorded(train_loop_per_worker, self.job, pause_s), *args, **named)

    def fit(self) -> ray.train.Result:
        """Trains as Ray does, and watches the workers."""
        with watching(self.job, self.watch) if self.watch is not None else contextlib.nullcontext():
            return super().fit()


# ---- in a worker ----


def recorded(train_loop: Callable[P, R], job: str, pause_s: float = RayWatch.pause_s) -> Callable[P, R]:
    """Adds recording to a training function; for Ray trainers other than TorchTrainer."""

    @functools.wraps(train_loop)
    def recorded_loop(*args: P.args, **named: P.kwargs) -> R:
        # imported here because Ray sends functions of scripts to the workers by value
        from allranks.integrations.ray import run_recorded

        return run_recorded(train_loop, job, pause_s, args, named)

    return recorded_loop


def run_recorded(
    train_loop: Callable[..., R], job: str, pause_s: float, args: tuple[object, ...], named: dict[str, object]
) -> R:
    """Runs the training function in the worker's training thread."""
    recorder = record.record(job=job, folder=node_folder(job))
    try:
        with _announced_reports(pause_s):
            result = train_loop(*args, **named)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # stores the line in the black box
        raise
    recorder.close("exit")  # Ray ends the process without running exit handlers
    return result


@contextlib.contextmanager
def _announced_reports(pause_s: float) -> Iterator[None]:
    """Announces `ray.train.report` as a pause, since it uploads a checkpoint while the other workers wait."""
    plain = ray.train.report

    @functools.wraps(plain)
    def report(*args: object, **named: object) -> None:
        with record.expect("report", up_to_s=pause_s):
            plain(*args, **named)

    ray.train.report = report
    try:
        yield
    finally:
        ray.train.report = plain


def node_folder(job: str) -> Path:
    """The folder of the black boxes of this Ray node; two Ray nodes on one machine have two folders."""
    node = ray.get_runtime_context().get_node_id()
    return usable_folder(None, f"{job}-{node[:8]}")[0]


# ---- in the driver ----


@contextlib.contextmanager
def watching(job: str, options: RayWatch | None = None) -> Iterator[None]:
    """Watches the workers of this job on every node of the Ray cluster, including nodes that join later."""
    if not ray.is_initialized():
        ray.init()
    token = job_token(os.environ)
    with ExitStack() as stack:
        server = ServerOptions(host="0.0.0.0", port=0, token=token, job=job)
        lighthouse = stack.enter_context(Lighthouse(Options(), server))
        address = f"{ray.util.get_node_ip_address()}:{lighthouse.address.rpartition(':')[2]}"
        watch = _Cluster(job, options or RayWatch(), address, token)
        stack.callback(watch.close)
        watch.start()
        yield


class _Cluster:
    """Keeps one watching actor on every node of the cluster."""

    def __init__(self, job: str, options: RayWatch, lighthouse: str, token: str) -> None:
        self.job, self.options, self.lighthouse, self.token = job, options, lighthouse, token
        self._actors: dict[str, ray.actor.ActorHandle] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="allranks-ray-nodes", daemon=True)

    def start(self) -> None:
        self._add_nodes()
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        ended = [actor.close.remote() for actor in self._actors.values()]
        ray.wait(ended, num_returns=len(ended), timeout=60.0)
        for actor in self._actors.values():
            ray.kill(actor)

    def _run(self) -> None:
        while not self._stop.wait(NEW_NODES_S):
            self._add_nodes()

    def _add_nodes(self) -> None:
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        for node in alive:
            if node not in self._actors:
                where = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
                actor = ray.remote(NodeWatch).options(num_cpus=0, scheduling_strategy=where)
                folder = self.options.incidents.absolute()
                self._actors[node] = actor.remote(
                    self.job, self.options, str(folder), self.lighthouse, self.token
                )


# ---- in the watching actor of a node ----


class NodeWatch:
    """A Ray actor: the agent of `allranks run`, for the black boxes of Ray's workers."""

    def __init__(self, job: str, options: RayWatch, incidents: str, lighthouse: str, token: str) -> None:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="[allranks] %(message)s")
        folder, node = node_folder(job), socket.gethostname()
        name = f"{AGENT}{node}-{os.getpid()}"
        self._client = Client(
            ClientOptions((lighthouse,), token, name, node=node, role="observer", beacon=False)
        )
        self._client.start(timeout_s=10.0)
        watch = Watch(
            WatchOptions(
                folder=folder,
                incidents=Path(incidents),
                job=job,
                node=node,
                notice=NoticeOptions(floor_s=options.notice_s, asked=options.notice_s != RayWatch.notice_s),
                policy=PolicyOptions(enabled=options.recovery),
                webhooks=options.webhooks,
            )
        )
        facts = {"job": job, "lighthouse": lighthouse, "incidents": incidents, "pid": os.getpid()}
        write_job(folder, facts)
        self._agent = NodeAgent(watch, self._client, peers=PeerAgents(self._client, token))
        self._agent.start()

    def close(self) -> None:
        self._agent.close()
        self._client.close()
