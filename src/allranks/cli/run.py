"""`allranks run`: torchrun's command line, plus recording, watching, and replicas that outlive each other."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.channel.token import write_token
from allranks.cli.embedded import embed_lighthouse
from allranks.cli.job_file import FLAGS as FLAGS_OF_FILE
from allranks.cli.job_file import (
    heartbeats,
    manager_timeout_s,
    notice_options,
    policy_options,
    read_settings,
    take_defaults,
)
from allranks.elastic.world import ElasticTrainingConfig, need_etcd_v2, obey_timeout
from allranks.errors import InputError
from allranks.launch.command_line import arrange, flag_value, from_environment, has_flag
from allranks.launch.environment import JobEnvironment, job_token
from allranks.launch.slurm import replicas_of_node
from allranks.model.nodes import AGENT

EPILOG = """\
Every flag of torchrun is accepted (--nnodes, --nproc-per-node, --rdzv-backend c10d|etcd-v2|etcd-v3|static,
--rdzv-endpoint, --rdzv-id, --rdzv-conf, --standalone, --max-restarts, --log-dir, --tee, -m, --no-python ...).

examples:
  allranks run --standalone --nproc-per-node 8 train.py            any script; a failure restarts the job
  allranks run --replicas 4 train_ddp.py                           scripts with a Manager; survivors never stop
  allranks run --replicas 2 --nproc-per-replica 4 train_hsdp.py    replicas of several ranks
  allranks run --config job.yaml train.py                          everything from one file
"""

#: our flags -> takes a value. The rest of the words before the script is torchrun's.
FLAGS = {
    "--config": True, "--job": True, "--replicas": True, "--nproc-per-replica": True, "--min-replicas": True,
    "--first-replica": True, "--total-replicas": True, "--lighthouse": True, "--no-lighthouse": False,
    "--bind": True, "--no-record": False, "--no-watch": False, "--incidents": True, "--recovery": True,
    "--notice-s": True, "--webhook": True, "--incident-store": True, "--quiet": False, "--verbose": False, "--snapshots": False,
    "--fresh": False,
    "--no-snapshots": False, "--no-spares": False,
    "-h": False, "--help": False,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.usage = "allranks run [our flags] [torchrun flags] SCRIPT ARGS…"
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="job configuration (YAML); flags win over it"
    )
    parser.add_argument(
        "--job", metavar="ID", help="name of the job (default: $ALLRANKS_JOB_ID, --rdzv-id, else made up)"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="replica mode: N replicas on this node, each restarted alone",
    )
    parser.add_argument(
        "--nproc-per-replica", type=int, default=1, metavar="M", help="ranks of one replica (%(default)s)"
    )
    parser.add_argument("--min-replicas", type=int, metavar="K", help="fewest replicas that may train (1)")
    parser.add_argument(
        "--first-replica",
        type=int,
        metavar="I",
        help="number of this node's first replica (0; under srun by the node's number)",
    )
    parser.add_argument(
        "--total-replicas",
        type=int,
        metavar="T",
        help="replicas over all nodes (this node's; under srun all)",
    )
    parser.add_argument(
        "--lighthouse", metavar="HOST:PORT", help="join this lighthouse instead of starting one here"
    )
    parser.add_argument("--no-lighthouse", action="store_true", help="start none (whole-job mode only)")
    parser.add_argument(
        "--bind",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where the lighthouse started here listens (%(default)s)",
    )
    parser.add_argument("--no-record", action="store_true", help="ranks keep no black box")
    parser.add_argument("--no-watch", action="store_true", help="do not look for hangs")
    parser.add_argument(
        "--incidents", type=Path, metavar="DIR", help="where incident folders go (./allranks-incidents)"
    )
    parser.add_argument(
        "--incident-store", metavar="URL", help="copy incident folders there too (s3://BUCKET/PREFIX, gs://…)"
    )
    parser.add_argument(
        "--recovery",
        choices=["on", "dry-run", "collect", "off"],
        help="what to do about a hang (replica mode: on; else dry-run)",
    )
    parser.add_argument("--notice-s", type=float, metavar="S", help="least silence that is looked at (10)")
    parser.add_argument(
        "--webhook",
        action="append",
        default=[],
        metavar="URL",
        help="POST incidents there; slack:URL for Slack (repeatable)",
    )
    parser.add_argument(
        "--snapshots",
        action="store_true",
        default=None,
        help="keep memory snapshots in this agent, for restarts without disk (whole-job mode: the default)",
    )
    parser.add_argument("--no-snapshots", dest="snapshots", action="store_false", help="keep none")
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start from scratch: checkpoints found at the first restore are set aside (nothing is deleted)",
    )
    parser.add_argument(
        "--no-spares",
        action="store_true",
        help="no warm processes for restarts (they have imported torch, and use memory)",
    )
    parser.add_argument("--quiet", action="store_true", help="ranks' output only to their log files")
    parser.add_argument("--verbose", action="store_true", help="log every decision")
    parser.add_argument("theirs", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def arrange_words(words: Sequence[str]) -> list[str]:
    """Puts our flags first, so that argparse needs to know nothing of torchrun's."""
    mine, theirs, script = arrange(words[1:], FLAGS)
    return [words[0], *mine, "--", *theirs, "--", *script]


def main(args: argparse.Namespace) -> int:
    """Runs the job to its end and returns its exit code."""
    words = list(args.theirs)
    if words and words[0] == "--":
        words = words[1:]
    split = words.index("--") if "--" in words else len(words)
    torchrun, script = words[:split], words[split + 1 :]
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO, stream=sys.stderr,
        format="[allranks %(asctime)s] %(message)s", datefmt="%H:%M:%S",
    )  # fmt: skip
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines of ranks go out whole, whoever else writes there
    settings = _settings(args)
    script = take_defaults(args, settings, script)
    if not script:
        raise InputError(
            "no script was given", hint="allranks run --standalone --nproc-per-node 2 train.py (see --help)"
        )
    with ExitStack() as stack:
        return _run(args, settings, torchrun, script, stack)


def _run(
    args: argparse.Namespace,
    settings: dict[str, Any],
    torchrun: list[str],
    script: list[str],
    stack: ExitStack,
) -> int:
    from allranks.blackbox.files import MAX_LEFT_BYTES, remove_finished
    from allranks.incidents.job_overview import TOKEN_FILE, set_aside_earlier, write_job
    from allranks.watch.timed_stacks import start_timed_stacks, stop_timed_stacks

    replica_mode = args.replicas is not None
    if replica_mode:
        first, total = replicas_of_node(os.environ, args.replicas)
        args.first_replica = first if args.first_replica is None else args.first_replica
        args.total_replicas = args.total_replicas or total
    torchrun = [*from_environment(os.environ, torchrun), *torchrun]
    job = find_job_name(args.job, os.environ, torchrun, settings, script[0])
    torchrun = obey_timeout([*_torchrun_from(settings, torchrun), *torchrun])
    need_etcd_v2(flag_value(torchrun, "--rdzv-backend"))
    token = job_token(os.environ)
    folder = _folder(job)
    set_aside_earlier(folder)
    removed = remove_finished(keep=folder)
    if removed:
        _say(
            f"removed the black boxes of {len(removed)} finished jobs: they took more than {MAX_LEFT_BYTES >> 20} MiB"
        )
    _start_fresh(args, folder, replica_mode)
    write_token(folder / TOKEN_FILE, token)
    lighthouse = _lighthouse(args, settings, token, replica_mode, stack, job)
    keep = args.snapshots if args.snapshots is not None else not replica_mode
    snapshots = _snapshot_keeper(token, torchrun, stack) if keep else ""
    environment = JobEnvironment(job, token, lighthouse, folder, snapshots, not args.no_record)
    incidents = args.incidents or Path("allranks-incidents")
    log_dir = flag_value(torchrun, "--log-dir") or str(folder / "logs")
    write_job(
        folder,
        {"job": job, "lighthouse": lighthouse, "incidents": str(incidents.absolute()), "pid": os.getpid()},
    )
    _say(f"job {job}: black boxes in {folder}, logs in {log_dir}, job token in {folder / TOKEN_FILE}")
    collector = start_timed_stacks(settings.get("debug") or {}, folder, log_dir)
    if collector is not None:
        stack.callback(stop_timed_stacks, collector)
    if replica_mode:
        return _run_replicas(args, settings, script, torchrun, environment, incidents, Path(log_dir), stack)
    _need_script(script, torchrun)
    return _run_whole(args, settings, [*torchrun, *script], environment, incidents, log_dir, stack)


def _folder(job: str) -> Path:
    """Where this job's black boxes, logs and token go: ALLRANKS_DIR, or the default when that cannot be used."""
    from allranks.blackbox.files import usable_folder

    wanted = os.environ.get("ALLRANKS_DIR")
    try:
        folder, problem = usable_folder(Path(wanted) if wanted else None, job)
    except OSError as error:
        hint = "Set ALLRANKS_DIR to a folder of yours with room for 2 MB per rank."
        raise InputError(str(error), hint=hint) from error
    if problem:
        _say(
            f"{problem}; {folder} is used instead (set ALLRANKS_DIR to a folder of yours with room for 2 MB per rank)"
        )
    return folder


def _run_whole(
    args: argparse.Namespace, settings: dict[str, Any], words: list[str], environment: JobEnvironment,
    incidents: Path, log_dir: str, stack: ExitStack,
) -> int:  # fmt: skip
    from allranks.launch.node_agent import NodeAgent
    from allranks.launch.whole_job import Launch, launch

    watch = (
        None
        if args.no_watch or args.no_record
        else _watch(args, settings, environment, incidents, "whole_job", stack, _elastic(words))
    )
    client = _client(environment, stack)
    company = _company(client, environment)
    agent = NodeAgent(watch, client, peers=company, holds_lighthouse=_given_lighthouse(args) == "")
    agent.start()
    stack.callback(agent.close)
    variables = environment.variables()
    job = Launch(tuple(words), variables, not args.no_record, log_dir, args.quiet, not args.no_spares)
    if watch is not None:
        job = replace(job, on_stop=watch.pipeline.explained.add, why_not_again=agent.why_not_again)
    return launch(job)


def _run_replicas(
    args: argparse.Namespace, settings: dict[str, Any], script: list[str], torchrun: list[str],
    environment: JobEnvironment, incidents: Path, log_dir: Path, stack: ExitStack,
) -> int:  # fmt: skip
    from allranks.launch.node_agent import NodeAgent
    from allranks.supervise.replicas import ReplicaOptions, Supervisor
    from allranks.supervise.restarts import RestartOptions

    if args.replicas < 1 or args.nproc_per_replica < 1:
        raise InputError("--replicas and --nproc-per-replica must be at least 1")
    _need_script(script, torchrun)
    restarts = flag_value(torchrun, "--max-restarts") or str(
        (settings.get("elastic") or {}).get("max_restarts", 100)
    )
    options = ReplicaOptions(
        command=_rank_command(script, torchrun, environment.record),
        replicas=args.replicas,
        ranks_per_replica=args.nproc_per_replica,
        first_replica=args.first_replica,
        total_replicas=args.total_replicas,
        environment={
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # survivors outlast the watch's patience with the rank that they wait for
            "ALLRANKS_QUORUM_TIMEOUT_S": os.environ.get("ALLRANKS_QUORUM_TIMEOUT_S", "600"),
            **environment.variables(),
        },
        restarts=RestartOptions(max_restarts=int(restarts)),
        log_folder=log_dir,
        quiet=args.quiet,
    )
    supervisor = Supervisor(options)
    watch = (
        None
        if args.no_watch or args.no_record
        else _watch(args, settings, environment, incidents, "replica", stack)
    )
    client = _client(environment, stack)
    company = _company(client, environment)
    agent = NodeAgent(watch, client, supervisor, company, holds_lighthouse=_given_lighthouse(args) == "")
    agent.start()
    stack.callback(agent.close)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        previous = signal.signal(number, supervisor.note_signal)
        stack.callback(signal.signal, number, previous)
    return supervisor.run()


def _start_fresh(args: argparse.Namespace, folder: Path, replica_mode: bool) -> None:
    """Tells the ranks of --fresh; the first restore of this run obeys it, and later ones do not."""
    if not args.fresh:
        return
    if replica_mode and args.lighthouse:
        raise InputError(
            "--fresh is not for replicas of several nodes: a node that joins later would set the others' checkpoints aside",
            hint="once, before the first node starts: allranks checkpoint set-aside STORE",
        )
    from allranks.checkpoint.group import FRESH_VARIABLE, MARK

    (folder / MARK).unlink(missing_ok=True)
    os.environ[FRESH_VARIABLE] = "1"


def _need_script(script: list[str], torchrun: list[str]) -> None:
    """One sentence now instead of a traceback of every rank."""
    if not has_flag(torchrun, "--module", "-m", "--no-python") and not Path(script[0]).exists():
        raise InputError(
            f"there is no script {script[0]}",
            hint=f"The path counts from {Path.cwd()}. For a module: allranks run -m MODULE.",
        )


def _rank_command(script: list[str], torchrun: list[str], record: bool) -> tuple[str, ...]:
    if has_flag(torchrun, "--no-python"):
        return tuple(script)
    module = ["-m"] if has_flag(torchrun, "--module", "-m") else []
    entry = ["-m", "allranks.launch.rank_entry"] if record else []
    return (sys.executable, "-u", *entry, *module, *script)


def _watch(
    args: argparse.Namespace,
    settings: dict[str, Any],
    environment: JobEnvironment,
    incidents: Path,
    mode: Any,
    stack: ExitStack,
    may_leave: bool = False,
) -> Any:
    from allranks.incidents.loop import Watch
    from allranks.incidents.pipeline import WatchOptions

    recovery = settings.get("recovery") or {}
    retry_s = manager_timeout_s(os.environ) if mode == "replica" else None
    assert environment.folder is not None
    watch = Watch(
        WatchOptions(
            folder=environment.folder, incidents=incidents, job=environment.job, node=socket.gethostname(), mode=mode,
            ranks_per_replica=args.nproc_per_replica, replicas=args.total_replicas or args.replicas or 1,
            notice=notice_options(args.notice_s, settings, retry_s), policy=policy_options(args.recovery, settings),
            webhooks=tuple(args.webhook or recovery.get("webhooks") or ()), may_leave=may_leave,
        )
    )  # fmt: skip
    store = args.incident_store or recovery.get("incident_store")
    if store:
        from allranks.checkpoint.stores.object_store import ObjectBlobs
        from allranks.checkpoint.stores.store import StoreSpec
        from allranks.incidents.publish import IncidentUploader

        keeper = IncidentUploader(ObjectBlobs(StoreSpec(str(store))))
        keeper.start()
        stack.callback(keeper.close)
        watch.copy_to(keeper.keep)
    return watch


def _lighthouse(
    args: argparse.Namespace,
    settings: dict[str, Any],
    token: str,
    replica_mode: bool,
    stack: ExitStack,
    job: str,
) -> str:
    """The address of the lighthouse to use; starts one in this process unless told otherwise."""
    given = _given_lighthouse(args)
    if given:
        return given
    if args.no_lighthouse:
        if replica_mode:
            raise InputError(
                "replicas need a lighthouse",
                hint="Leave out --no-lighthouse, or pass --lighthouse HOST:PORT.",
            )
        return ""
    replicas = args.total_replicas or args.replicas or 0
    return embed_lighthouse(args.bind, token, args.min_replicas, replicas, settings, stack, job)


def _given_lighthouse(args: argparse.Namespace) -> str:
    return str(args.lighthouse or os.environ.get("ALLRANKS_LIGHTHOUSE", ""))


def _client(environment: JobEnvironment, stack: ExitStack) -> Any:
    """The agent's own connection to the lighthouse; None when there is none or it is away."""
    if not environment.lighthouse:
        return None
    from allranks.errors import AllranksError
    from allranks.lighthouse.client.client import Client, ClientOptions

    options = ClientOptions(
        addresses=tuple(environment.lighthouse.split(",")), token=environment.token,
        replica=f"{AGENT}{socket.gethostname()}-{os.getpid()}", node=socket.gethostname(), role="observer", beacon=False,
    )  # fmt: skip
    client = Client(options)
    try:
        client.start(timeout_s=5.0)
    except AllranksError as error:
        logging.getLogger("allranks.agent").warning("no lighthouse: %s", error)
        return None
    stack.callback(client.close)
    return client


def _elastic(words: list[str]) -> bool:
    """Whether the job can go on with fewer nodes than it has: --nnodes MIN:MAX."""
    low, _, high = (flag_value(words, "--nnodes") or "1").partition(":")
    return high not in ("", low)


def _company(client: Any, environment: JobEnvironment) -> Any:
    """The agents of other nodes, reached through the lighthouse."""
    if client is None:
        return None
    from allranks.incidents.peers import PeerAgents

    return PeerAgents(client, environment.token)


def _snapshot_keeper(token: str, torchrun: list[str], stack: ExitStack) -> str:
    """Starts this node's keeper of memory snapshots and returns its address. Ranks of other nodes use it too."""
    from allranks.checkpoint.stores.snapshot_server import SnapshotServer

    alone = has_flag(torchrun, "--standalone") or flag_value(torchrun, "--nnodes") in (None, "1", "1:1")
    host = flag_value(torchrun, "--local-addr") or ("127.0.0.1" if alone else "0.0.0.0")
    server = SnapshotServer(token=token, bind=f"{host}:0")
    server.start()
    stack.callback(server.close)
    return str(server.address)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The job configuration as plain data, checked as a whole; {} without one."""
    return {} if args.config is None else read_settings(args.config)


def find_job_name(
    given: str | None,
    environment: Mapping[str, str],
    torchrun: list[str],
    settings: dict[str, Any],
    script: str,
) -> str:
    """--job, $ALLRANKS_JOB_ID, the rendezvous id, else a name of its own.

    A job file always has a rendezvous id. Its default names a job only where nodes meet somewhere and must agree.
    """
    elastic = settings.get("elastic") or {}
    meets = elastic.get("rdzv_endpoint") or has_flag(torchrun, "--rdzv-endpoint")
    default = elastic.get("rdzv_id") == ElasticTrainingConfig.rdzv_id and not meets
    return (
        given
        or environment.get("ALLRANKS_JOB_ID")
        or flag_value(torchrun, "--rdzv-id")
        or ("" if default else elastic.get("rdzv_id"))
        or f"{Path(script).stem}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"
    )


def _torchrun_from(settings: dict[str, Any], given: list[str]) -> list[str]:
    """torchrun's flags from the `elastic` section, where the command line has none."""
    elastic = settings.get("elastic") or {}
    if not elastic:
        return []
    words: list[str] = []
    if not has_flag(given, "--nnodes", "--standalone"):
        words += ["--nnodes", f"{elastic['min_nodes']}:{elastic['max_nodes']}"]
        nowhere = elastic["rdzv_backend"] == "c10d" and not elastic["rdzv_endpoint"]
        if elastic["max_nodes"] == 1 and nowhere and not has_flag(given, "--rdzv-endpoint", "--rdzv-backend"):
            words.append("--standalone")  # a free port: two jobs on one machine never meet
    for key, flag in FLAGS_OF_FILE.items():
        if elastic.get(key) not in (None, "") and not has_flag(given, flag):
            words += [flag, str(elastic[key])]
    if not has_flag(given, "--rdzv-conf"):
        words += ["--rdzv-conf", heartbeats(settings)]
    return words


def _say(text: str) -> None:
    print(f"[allranks] {text}", file=sys.stderr, flush=True)
