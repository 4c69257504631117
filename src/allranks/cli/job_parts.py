"""What `allranks run` starts around the ranks: lighthouse, watch, agent, snapshot server. In the agent's process."""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.job_file import (
    RunFlags,
    Settings,
    manager_timeout_s,
    notice_options,
    policy_options,
    quorum_times,
)
from allranks.errors import AllranksError
from allranks.launch.command_line import JobEnvironment, flag_value, has_flag
from allranks.model.job import AGENT

if TYPE_CHECKING:  # heavy, and not needed for --help
    from allranks.incidents.loop import Watch
    from allranks.incidents.policy import Mode
    from allranks.launch.node_agent import NodeAgent
    from allranks.lighthouse.client.client import Client
    from allranks.supervise.replicas import Supervisor


@dataclass(frozen=True)
class NodeJob:
    """One run of `allranks run` on this node."""

    options: RunFlags
    settings: Settings  # of the job file
    environment: JobEnvironment
    folder: Path  # black boxes, logs, token
    incidents: Path
    log_dir: str
    stack: ExitStack  # ends what was started


def embed_lighthouse(
    bind: str,
    token: str,
    min_replicas: int | None,
    replicas: int,
    settings: Settings,
    stack: ExitStack,
    job: str = "",
) -> str:
    """Starts a lighthouse until the stack ends, and returns its address. `replicas` are expected; 0: unknown."""
    from allranks.lighthouse.options import Options, ServerOptions
    from allranks.lighthouse.server import Lighthouse
    from allranks.lighthouse.web import http_protocol

    host, _, port = bind.rpartition(":")
    server = ServerOptions(host=host.strip("[]"), port=int(port), token=token, job=job)
    options = Options(min_replicas=min_replicas or 1, expect_replicas=replicas, **quorum_times(settings))
    logging.getLogger("allranks.lighthouse").addFilter(_is_news)
    lighthouse = stack.enter_context(Lighthouse(options, server, http=http_protocol()))
    address = str(lighthouse.address)
    print(f"[allranks] lighthouse at {address}, page http://{address}/", file=sys.stderr, flush=True)
    return address


def _is_news(record: logging.LogRecord) -> bool:
    """Not what this process logs itself: incidents, and the address."""
    return getattr(record, "event", "") != "incident" and not str(record.msg).startswith("listening on")


def start_watch(job: NodeJob, mode: Mode, may_leave: bool = False) -> Watch | None:
    """What detects hangs of this node's ranks; None when nothing is recorded or nobody wants it."""
    options, recovery = job.options, job.settings.get("recovery") or {}
    if not (options.watch and options.record):
        return None
    from allranks.incidents.loop import Watch
    from allranks.incidents.pipeline import WatchOptions
    from allranks.incidents.publish import check_address

    webhooks = tuple(options.webhook or recovery.get("webhooks") or ())
    for address in webhooks:
        check_address(address)
    retry_s = manager_timeout_s(os.environ) if mode == "replica" else None
    watch = Watch(
        WatchOptions(
            folder=job.folder,
            incidents=job.incidents,
            job=job.environment.job,
            node=socket.gethostname(),
            mode=mode,
            ranks_per_replica=options.nproc_per_replica,
            replicas=options.total_replicas or options.replicas or 1,
            notice=notice_options(options.notice_s, job.settings, retry_s),
            policy=policy_options(options.recovery, job.settings),
            webhooks=webhooks,
            may_leave=may_leave,
        )
    )
    if store := options.incident_store or recovery.get("incident_store"):
        from allranks.checkpoint.stores import StoreSpec
        from allranks.checkpoint.stores.object_store import ObjectBlobs
        from allranks.incidents.publish import IncidentUploader

        uploader = IncidentUploader(ObjectBlobs(StoreSpec(str(store))))
        uploader.start()
        job.stack.callback(uploader.close)
        watch.copy_to(uploader.keep)
    return watch


def start_agent(job: NodeJob, watch: Watch | None, supervisor: Supervisor | None = None) -> NodeAgent:
    """The agent of this node, connected to the lighthouse and through it to the agents of other nodes."""
    from allranks.incidents.peers import PeerAgents
    from allranks.launch.node_agent import NodeAgent

    client = _client(job.environment, job.stack)
    peers = None if client is None else PeerAgents(client, job.environment.token)
    agent = NodeAgent(watch, client, supervisor, peers, holds_lighthouse=not job.options.lighthouse)
    agent.start()
    job.stack.callback(agent.close)
    return agent


def _client(environment: JobEnvironment, stack: ExitStack) -> Client | None:
    """The agent's own connection to the lighthouse; None when there is none or it does not answer."""
    if not environment.lighthouse:
        return None
    from allranks.lighthouse.client.client import Client, ClientOptions

    client = Client(
        ClientOptions(
            addresses=tuple(environment.lighthouse.split(",")),
            token=environment.token,
            replica=f"{AGENT}{socket.gethostname()}-{os.getpid()}",
            node=socket.gethostname(),
            role="observer",
            beacon=False,
        )
    )
    try:
        client.start(timeout_s=5.0)
    except AllranksError as error:
        logging.getLogger("allranks.agent").warning("no lighthouse: %s", error)
        return None
    stack.callback(client.close)
    return client


def start_snapshot_server(token: str, torchrun: list[str], stack: ExitStack) -> str:
    """Starts this node's server of memory snapshots and returns its address. Ranks of other nodes use it too."""
    from allranks.checkpoint.stores.snapshot_server import SnapshotServer

    alone = has_flag(torchrun, "--standalone") or flag_value(torchrun, "--nnodes") in (None, "1", "1:1")
    host = flag_value(torchrun, "--local-addr") or ("127.0.0.1" if alone else "0.0.0.0")
    server = SnapshotServer(token=token, bind=f"{host}:0")
    server.start()
    stack.callback(server.close)
    return str(server.address)
