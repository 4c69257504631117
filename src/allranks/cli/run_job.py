"""The parts of `allranks run`: its flags, its options from the job file, and the services that it starts next to the ranks:
lighthouse, watch, agent, snapshot server. Runs in the agent's process.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.cli.terminal import note
from allranks.errors import AllranksError, InputError
from allranks.launch.command_line import JobEnvironment, flag_value, has_flag
from allranks.model.options import check_options, key_of, meanings, option

if TYPE_CHECKING:
    from allranks.incidents.loop import Watch
    from allranks.incidents.policy import Mode, PolicyOptions
    from allranks.launch.node_agent import NodeAgent
    from allranks.ledger.agent import LedgerKeeper
    from allranks.lighthouse.client.client import Client
    from allranks.supervise.replicas import Supervisor
    from allranks.watch.silence import NoticeOptions


Settings = Mapping[str, Any]  # the job file as plain data; {} without a job file
_HEARD_S = 0.3  # a process that is heard this long after our start is alive
_TAKEN_S = 10.0  # the lighthouse removes a dead process within this time


@dataclass(frozen=True)
class RunFlags:
    config: Path | None = option(None, "job configuration (YAML); flags win over it", metavar="FILE")
    job: str = option(
        "", "name of the job (default: $ALLRANKS_JOB_ID, --rdzv-id, else generated)", metavar="ID"
    )
    replicas: int | None = option(
        None, "replica mode: this many replicas on this node, each restarted alone", at_least=1
    )
    nproc_per_replica: int = option(1, "ranks of one replica", metavar="M", at_least=1)
    min_replicas: int | None = option(
        None,
        "fewest replicas that may train (default: 1)",
        metavar="K",
        at_least=1,
        key="lighthouse.min_replicas",
    )
    first_replica: int | None = option(
        None,
        "number of this node's first replica (default: 0; under srun by the node's number)",
        metavar="I",
        at_least=0,
    )
    total_replicas: int | None = option(
        None, "replicas of all nodes (default: this node's; under srun all)", metavar="T", at_least=1
    )
    lighthouse: str = option(
        "",
        "join this lighthouse instead of starting one here",
        metavar="HOST:PORT",
        environment="ALLRANKS_LIGHTHOUSE",
        key="lighthouse.address",
    )
    start_lighthouse: bool = option(True, "start a lighthouse (whole-job mode only)", flags="--no-lighthouse")
    bind: str = option(
        "127.0.0.1:0",
        "where the lighthouse started here listens; a fixed port lets Prometheus scrape its /metrics",
        metavar="HOST:PORT",
        key="lighthouse.bind",
    )
    record: bool = option(True, "keep a black box of every rank", flags="--no-record", key="debug.record")
    watch: bool = option(True, "detect hangs", flags="--no-watch", key="debug.watch")
    incidents: Path | None = option(
        None, "folder of the incidents (default: ./allranks-incidents)", metavar="DIR", key="debug.incidents"
    )
    incident_store: str = option(
        "",
        "copy incident folders there too (s3://BUCKET/PREFIX, gs://…)",
        metavar="URL",
        key="recovery.incident_store",
    )
    recovery: str | None = option(
        None,
        "what to do about a hang: act (evict or restart), only report the action, only collect evidence, nothing (default in replica mode: on, else dry-run)",
        choices=("on", "dry-run", "collect", "off"),
    )
    notice_s: float | None = option(
        None,
        "shortest silence that is investigated (default: 10)",
        unit="s",
        above=0,
        key="recovery.notice_s",
    )
    webhook: tuple[str, ...] = option(
        (),
        "POST incidents there; also slack:URL, tensorboard:DIR, wandb:PROJECT, otlp:URL; repeatable; or $ALLRANKS_WEBHOOK, which `ps` does not show",
        metavar="URL",
    )
    snapshots: bool | None = option(
        None, "keep memory snapshots in this agent, for restarts without disk (whole-job mode: the default)"
    )
    fresh: bool = option(
        False,
        "start from scratch: move checkpoints found at the first restore aside (nothing is deleted)",
        key="checkpoint.fresh",
    )
    on_state_loss: str | None = option(
        None,
        "replica mode: when all replicas that hold the state are gone and no checkpoint was restored, start over from step 0 or stop (default: stop if checkpoints are configured, else restart)",
        choices=("stop", "restart"),
    )
    spares: bool = option(
        True,
        "keep warm processes for restarts (they have imported torch, and use memory)",
        flags="--no-spares",
    )
    quiet: bool = option(False, "write the ranks' output only to their log files")
    verbose: bool = option(False, "log every decision")

    def __post_init__(self) -> None:
        check_options(self)


#: Keys of the `elastic` section -> torchrun's flags.
OF_ELASTIC = {
    "nproc_per_node": "--nproc-per-node",
    "rdzv_backend": "--rdzv-backend",
    "rdzv_endpoint": "--rdzv-endpoint",
    "rdzv_id": "--rdzv-id",
    "max_restarts": "--max-restarts",
}


def read_settings(path: Path) -> Settings:
    """The job file as plain data, checked completely; unused keys are reported."""
    from allranks.elastic.config import check, load_config

    found = load_config(path).to_dict()
    for warning in check(path).warnings:
        note(f"[allranks] {path}: {warning}")
    return found


def chosen_flags(path: Path) -> set[str]:
    """The flags of torchrun that the file sets, without defaults."""
    from allranks.elastic.config import load_config

    flags = {**OF_ELASTIC, "max_nodes": "--nnodes"}
    keys = (key.removeprefix("elastic.") for key in load_config(path).written if key.startswith("elastic."))
    return {flags[key] for key in keys if key in flags}


def with_job_file(
    options: RunFlags, args: argparse.Namespace, settings: Settings, script: list[str]
) -> tuple[RunFlags, list[str]]:
    """The options, from the file where no flag was given, and the script with its arguments."""
    if not settings:
        return options, script
    lighthouse, training = settings["lighthouse"], settings["training"]
    found = {"verbose": settings["debug"]["log_level"] == "debug"}
    found["start_lighthouse"] = bool(lighthouse["embedded"] or lighthouse["address"])
    for one, meaning in meanings(RunFlags):
        section, _, key = meaning.key.partition(".")
        found |= {one.name: settings[section][key]} if key else {}
    taken = {
        name: value for name, value in found.items() if value is not None and getattr(args, name) is None
    }
    if taken.get("incidents"):
        taken["incidents"] = Path(taken["incidents"])
    if not script and training["script"]:
        script = [training["script"], *training["args"]]
    return replace(options, **taken), script


def heartbeats(settings: Settings) -> str:
    """The heartbeats of the `elastic` section as torchrun's --rdzv-conf."""
    from allranks.elastic.world import keep_alive

    return keep_alive(settings["elastic"]["heartbeat_interval"], settings["elastic"]["heartbeat_timeout"])


def options_in(settings: Settings, section: str, options: type) -> dict[str, Any]:
    """The options of a class that a section of the job file sets."""
    written = settings.get(section) or {}
    found = {one.name: written.get(key_of(one)) for one, _ in meanings(options)}
    return {name: value for name, value in found.items() if value is not None}


def policy_options(how: str | None, settings: Settings) -> PolicyOptions:
    """The policy for incidents; `how` is --recovery or None."""
    from allranks.incidents.policy import PolicyOptions

    mode = how or (settings.get("recovery") or {}).get("mode")
    enabled = {"on": True, "dry-run": False, "off": False}.get(mode or "")
    found = PolicyOptions(enabled=enabled, **options_in(settings, "recovery", PolicyOptions))
    return replace(found, on_hang="collect") if mode in ("collect", "off") else found


def manager_timeout_s(environment: Mapping[str, str]) -> float:
    """The time after which managers of this job abort a collective, unless the script sets another.

    Never more than the default, which groups made by the script have in any case.
    """
    from allranks.watch.silence import MANAGER_TIMEOUT_S

    for name in ("ALLRANKS_TIMEOUT_S", "TORCHFT_TIMEOUT_SEC"):
        if text := environment.get(name):
            try:
                return min(MANAGER_TIMEOUT_S, float(text))
            except ValueError:
                raise InputError(f"{name}={text!r} is not a number of seconds") from None
    return MANAGER_TIMEOUT_S


def notice_options(floor_s: float | None, settings: Settings, retry_s: float | None = None) -> NoticeOptions:
    """When silence is investigated. `floor_s` is --notice-s; `retry_s` is the managers' timeout in replica mode."""
    from allranks.watch.silence import NoticeOptions

    found = options_in(settings, "debug", NoticeOptions)
    floor = float(floor_s or found.pop("floor_s", NoticeOptions.floor_s))
    cap = max(float(found.pop("cap_s", NoticeOptions.cap_s)), floor)
    return NoticeOptions(**{**found, "floor_s": floor, "cap_s": cap}, asked=bool(floor_s), retry_s=retry_s)


@dataclass(frozen=True)
class NodeJob:
    options: RunFlags
    settings: Settings  # of the job file
    environment: JobEnvironment
    folder: Path  # black boxes, logs, token
    incidents: Path
    log_dir: str
    stack: ExitStack  # ends everything that was started


def configured_tiers(settings: Settings) -> list[str]:
    """The targets of a job file's checkpoints, except memory."""
    section = settings.get("checkpoint") or {}
    return [str(section[key]) for key in ("nvme_path", "s3_bucket") if section.get(key)]


def describe_protection(options: RunFlags, settings: Settings) -> str:
    """How the state of this job survives the death of processes."""
    tiers = configured_tiers(settings)
    count = options.total_replicas or options.replicas or 0
    copies = f"each of {count} replicas holds the whole state" if count > 1 else ""
    if tiers:
        saved = f"checkpoints go to {' and '.join(tiers)}"
        return f"protection: {copies}; {saved}" if copies else f"protection: {saved}"
    event = "If all die at once" if copies else "If a rank dies"
    lost = f"{event} and the script restores no checkpoint of its own, training starts over from step 0"
    return f"protection: {copies or 'no replicas'}, and no checkpoints in the job file. {lost}"


def embed_lighthouse(
    bind: str,
    token: str,
    min_replicas: int | None,
    replicas: int,
    settings: Settings,
    stack: ExitStack,
    job: str = "",
    folder: Path | None = None,
) -> str:
    """Starts a lighthouse that runs until the stack ends; returns its address. `replicas`: expected number, 0: not known."""
    from allranks.incidents.job_overview import TOKEN_FILE
    from allranks.lighthouse.history import FILE_NAME
    from allranks.lighthouse.options import Options, ServerOptions
    from allranks.lighthouse.server import Lighthouse

    host, _, port = bind.rpartition(":")
    server = ServerOptions(host=host.strip("[]"), port=int(port), token=token, job=job)
    if folder is not None:
        server = replace(server, history=str(folder / FILE_NAME), token_path=str(folder / TOKEN_FILE))
    found = options_in(settings, "lighthouse", Options) | {"min_replicas": min_replicas or 1}
    options = Options(**found, expect_replicas=replicas)
    # without incidents and the address, which this process logs itself
    logging.getLogger("allranks.lighthouse").addFilter(
        lambda line: getattr(line, "event", "") != "incident" and not str(line.msg).startswith("listening on")
    )
    lighthouse = stack.enter_context(Lighthouse(options, server))
    address = str(lighthouse.address)
    note(f"[allranks] lighthouse at {address}, page http://{address}/")
    return address


def webhook_addresses(
    flags: Sequence[str], settings: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, ...]:
    """The webhooks: from the flags, else the job file, else ALLRANKS_WEBHOOK, which `ps` does not show."""
    found = tuple(flags or settings or environment.get("ALLRANKS_WEBHOOK", "").split())
    if found:
        from allranks.incidents.publish import check_address

        for address in found:
            check_address(address)
    return found


def start_watch(job: NodeJob, mode: Mode, may_leave: bool = False) -> Watch | None:
    """The watch over this node's ranks; None without --watch or --record."""
    options = job.options
    if not (options.watch and options.record):
        return None
    from allranks.incidents.loop import Watch
    from allranks.incidents.pipeline import WatchOptions

    retry_s = manager_timeout_s(os.environ) if mode == "replica" else None
    watch = Watch(
        WatchOptions(
            folder=job.folder,
            incidents=job.incidents,
            job=job.environment.job,
            node=os.uname().nodename,
            mode=mode,
            ranks_per_replica=options.nproc_per_replica,
            replicas=options.total_replicas or options.replicas or 1,
            notice=notice_options(options.notice_s, job.settings, retry_s),
            policy=policy_options(options.recovery, job.settings),
            webhooks=options.webhook,
            may_leave=may_leave,
        )
    )
    keep_ledger(job, watch, mode)
    if store := options.incident_store:
        from allranks.checkpoint.stores import StoreSpec
        from allranks.checkpoint.stores.object_store import ObjectBlobs
        from allranks.incidents.publish import IncidentUploader

        uploader = IncidentUploader(ObjectBlobs(StoreSpec(str(store))))
        job.stack.callback(uploader.close)
        watch.pipeline.publisher.upload = uploader.keep
    return watch


def keep_ledger(job: NodeJob, watch: Watch, mode: Mode) -> None:
    """Starts the ledger, next to the incidents."""
    from allranks.ledger.agent import LedgerKeeper
    from allranks.ledger.history import start_history
    from allranks.lighthouse.metrics import SPENT

    keeper = LedgerKeeper(job.incidents, job.environment.job, os.uname().nodename, mode)
    keeper.history = start_history(os.environ)
    keeper.on_slow = lambda change: watch.slow.note(change.rank, change.at, change.sentence)
    keeper.start()
    watch.on_samples, watch.pipeline.publisher.book = keeper.observe, keeper.note
    job.stack.callback(_end_ledger, keeper)
    SPENT.append(keeper.spent)
    job.stack.callback(SPENT.remove, keeper.spent)


def _end_ledger(keeper: LedgerKeeper) -> None:
    """Writes the last rows and a line on the terminal, after the end of the watch."""
    from allranks.ledger.report import end_line

    found = keeper.close()
    if found.ranks:
        note(f"[allranks] {end_line(found)} (allranks goodput {found.job})")


def start_agent(job: NodeJob, watch: Watch | None, supervisor: Supervisor | None = None) -> NodeAgent:
    """Starts the agent of this node, connected to the lighthouse and thereby to the agents of other nodes."""
    from allranks.incidents.peers import PeerAgents
    from allranks.launch.node_agent import NodeAgent

    client = _client(job.environment, job.stack)
    peers = None if client is None else PeerAgents(client, job.environment.token)
    agent = NodeAgent(watch, client, supervisor, peers, holds_lighthouse=not job.options.lighthouse)
    agent.start()
    job.stack.callback(agent.close)
    return agent


def _client(environment: JobEnvironment, stack: ExitStack) -> Client | None:
    """The agent's connection to the lighthouse; None without a lighthouse, or when it does not answer."""
    if not environment.lighthouse:
        return None
    from allranks.lighthouse.client.client import Client, ClientOptions
    from allranks.model.cluster import AGENT

    addresses, host = tuple(environment.lighthouse.split(",")), os.uname().nodename
    name = f"{AGENT}{host}-{os.getpid()}"
    client = Client(ClientOptions(addresses, environment.token, name, host, role="observer", beacon=False))
    try:
        client.start(timeout_s=5.0)
    except AllranksError as error:
        logging.getLogger("allranks.agent").warning(
            "%s. The job runs without a lighthouse: there is no page, and each node judges hangs by its own ranks. Check "
            "--lighthouse and ALLRANKS_LIGHTHOUSE",
            error,
        )
        return None
    stack.callback(client.close)
    return client


def refuse_taken_numbers(client: Client, numbers: range) -> None:
    """InputError when living processes of another `allranks run` have these replicas' names, before any rank is started.

    The lighthouse soon removes processes that were just killed; living ones are heard again.
    """
    from allranks.launch.node_agent import replica_name, replica_number

    wanted, began = {replica_name(number) for number in numbers}, time.monotonic()
    first = None
    while True:
        rows = {row["replica"]: row for row in client.status()["replicas"] if row["ranks"]}
        taken = {name: rows[name]["session"] for name in sorted(wanted & rows.keys())}
        first = taken if first is None else {n: s for n, s in taken.items() if first.get(n) == s}
        if not first:
            return
        alive = [name for name in first if rows[name]["heard_s"] < time.monotonic() - began - _HEARD_S]
        if alive or time.monotonic() - began > _TAKEN_S:
            known = [replica_number(name) for name in rows]
            free = 1 + max(number for number in known if number is not None)
            nodes = ", ".join(sorted({rows[name]["node"] for name in first}))
            raise InputError(
                f"{', '.join(first)} of this job already run on {nodes}",
                hint=f"Every node starts other replicas: add --first-replica {free} here.",
            )
        time.sleep(0.2)


def start_snapshot_server(token: str, torchrun: list[str], stack: ExitStack) -> str:
    """Starts this node's server of memory snapshots and returns its address. Ranks of other nodes use it too."""
    from allranks.checkpoint.stores.peer_store import SnapshotServer

    alone = has_flag(torchrun, "--standalone") or flag_value(torchrun, "--nnodes") in (None, "1", "1:1")
    host = flag_value(torchrun, "--local-addr") or ("127.0.0.1" if alone else "::")
    server = SnapshotServer(token=token, bind=f"[{host}]:0" if ":" in host else f"{host}:0")
    server.start()
    stack.callback(server.close)
    return str(server.address)
