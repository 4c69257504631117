"""`allranks run`: torchrun's command line, plus recording, hang detection, and replicas that survive each other's failures."""

from __future__ import annotations

import argparse
import importlib.util
import io
import logging
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from allranks.cli.parser import read_flags, takes_value, words_after
from allranks.cli.run_job import (
    OF_ELASTIC,
    NodeJob,
    RunFlags,
    Settings,
    configured_tiers,
    describe_protection,
    embed_lighthouse,
    heartbeats,
    read_settings,
    refuse_taken_numbers,
    start_agent,
    start_snapshot_server,
    start_watch,
    webhook_addresses,
    with_job_file,
)
from allranks.cli.terminal import note
from allranks.errors import InputError, MissingExtra
from allranks.launch.command_line import (
    JobEnvironment,
    arrange,
    check,
    flag_value,
    from_environment,
    has_flag,
    job_token,
)

EPILOG = """\
Every flag of torchrun is accepted: --nnodes, --nproc-per-node, --standalone,
--rdzv-backend c10d|etcd-v2|etcd-v3|static, --rdzv-endpoint, --rdzv-id,
--rdzv-conf, --max-restarts, --log-dir, --tee, -m, --no-python ...
"""

MIN_OPEN_FILES = 256
#: Exit codes of a job that was stopped by a signal and has not failed.
STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
#: our flags -> whether they take a value. The other words before the script are torchrun's.
OURS = {**takes_value(RunFlags), "-h": False, "--help": False}
FLAGS = (RunFlags,)


USAGE = "allranks run [our flags] [torchrun flags] SCRIPT ARGS…"


def arrange_words(words: Sequence[str]) -> list[str]:
    """Puts our flags first, so that argparse does not need torchrun's."""
    mine, theirs, script = arrange(words[1:], OURS)
    return [words[0], *mine, "--", *theirs, "--", *script]


def main(args: argparse.Namespace) -> int:
    """Runs the job to its end and returns its exit code."""
    words = words_after(args)
    split = words.index("--") if "--" in words else len(words)
    torchrun, script = words[:split], words[split + 1 :]
    check(torchrun, OURS)
    options = read_flags(RunFlags, args)
    settings = read_settings(options.config) if options.config else {}
    options, script = with_job_file(options, args, settings, script)
    in_file = (settings.get("recovery") or {}).get("webhooks") or ()
    options = replace(options, webhook=webhook_addresses(options.webhook, in_file, os.environ))
    # the level is set for our logger only: lines of torch and other libraries are not shown
    logging.basicConfig(stream=sys.stderr, format="[allranks %(asctime)s] %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("allranks").setLevel(logging.DEBUG if options.verbose else logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines of ranks stay whole when several processes write
    if options.record and importlib.util.find_spec("torch") is None:
        raise MissingExtra("allranks run", "torch")
    if not script:
        hint = "allranks run --standalone --nproc-per-node 2 train.py (see --help)"
        raise InputError("no script was given", hint=hint)
    _need_open_files()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, every exit code would be 0
    with ExitStack() as stack:
        return _run(options, settings, torchrun, script, stack)


def _need_open_files() -> None:
    """Raises the soft limit if it is too low for a job; InputError if that is not allowed."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (1 << 20 if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < MIN_OPEN_FILES <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_OPEN_FILES, limits[1]))
    elif soft < MIN_OPEN_FILES:
        raise InputError(
            f"only {soft} files may be open at once (ulimit -n): a job needs {MIN_OPEN_FILES}",
            hint="Raise the hard limit (limits.conf, docker --ulimit nofile=65536), then start again.",
        )


def _run(
    options: RunFlags, settings: Settings, torchrun: list[str], script: list[str], stack: ExitStack
) -> int:
    from allranks.channel.keys import write_token
    from allranks.elastic.world import need_etcd_v2, obey_timeout
    from allranks.incidents.job_overview import TOKEN_FILE, set_aside_earlier, write_job
    from allranks.launch.slurm import replicas_of_node
    from allranks.watch import timed_stacks

    if options.replicas:
        first, total = replicas_of_node(os.environ, options.replicas)
        first = first if options.first_replica is None else options.first_replica
        options = replace(options, first_replica=first, total_replicas=options.total_replicas or total)
    torchrun = [*from_environment(os.environ, torchrun), *torchrun]
    name = find_job_name(options.job, os.environ, torchrun, settings, script[0])
    torchrun = obey_timeout([*_torchrun_from(settings, torchrun), *torchrun])
    need_etcd_v2(flag_value(torchrun, "--rdzv-backend"))
    # checked before anything is started: one error message instead of a traceback of every rank
    if not has_flag(torchrun, "--module", "-m", "--no-python") and not Path(script[0]).exists():
        hint = f"The path counts from {Path.cwd()}. For a module: allranks run -m MODULE."
        raise InputError(f"there is no script {script[0]}", hint=hint)
    token = job_token(os.environ)
    folder = _folder(name, options.record)
    set_aside_earlier(folder)
    _start_fresh(options, folder)
    write_token(folder / TOKEN_FILE, token)
    lighthouse = _lighthouse(options, settings, token, stack, name, folder)
    keep = options.snapshots if options.snapshots is not None else not options.replicas
    snapshots = start_snapshot_server(token, torchrun, stack) if keep else ""
    environment = JobEnvironment(name, token, lighthouse, folder, snapshots, options.record)
    incidents = _incidents(options.incidents, folder)
    found = _logs(flag_value(torchrun, "--log-dir"), folder, stack)
    log_dir = str(found or folder / "logs")
    facts = {
        "job": name, "lighthouse": lighthouse, "incidents": str(incidents.absolute()), "logs": str(Path(log_dir).absolute()),
    }  # fmt: skip
    write_job(folder, {**facts, "pid": os.getpid()})
    logs = "" if found == folder / "logs" else f"; logs in {log_dir}" if found else "; no room for logs"
    _say(f"job {name}: black boxes{'' if logs else ', logs'} and job token in {folder}{logs}")
    if lighthouse and not options.lighthouse and may_have_several_nodes(torchrun):
        _say(ALONE)
    _say(describe_protection(options, settings))
    stack.enter_context(timed_stacks(settings.get("debug") or {}, folder, log_dir))
    job = NodeJob(options, settings, environment, folder, incidents, log_dir, stack)
    if options.replicas:
        return _run_replicas(job, script, torchrun)
    return _run_whole(job, [*torchrun, *script], str(found) if found else None)


def _logs(given: str | None, folder: Path, stack: ExitStack) -> Path | None:
    """The folder for the output of ranks. Files in a folder that the user has not chosen are truncated when they grow."""
    from allranks.supervise.logs import LogTrimmer, find_room

    if given:
        return Path(given)
    found = find_room(folder)
    if found is not None:
        trimmer = LogTrimmer(found)
        trimmer.start()
        stack.callback(trimmer.close)
    return found


def _say(*lines: str) -> None:
    for text in lines:
        note(f"[allranks] {text}")


def _incidents(wanted: Path | None, folder: Path) -> Path:
    """The folder for incidents: below the black boxes if the wanted one cannot be written, or another user could add links.

    In a folder like /tmp it is created at once, before another user can create it.
    """
    chosen = wanted or Path("allranks-incidents")
    whole = chosen.absolute()
    nearest = next(path for path in (whole, *whole.parents) if os.path.exists(path))
    problem = "" if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK) else "cannot be written"
    if not problem and nearest.stat().st_mode & stat.S_IWOTH:
        with suppress(OSError):
            whole.mkdir(mode=0o755, parents=True)
    if not problem and (theirs := _of_another(whole)) is not None:
        nearest, problem = theirs, "belongs to another user or can be changed by others"
    if not problem:
        return chosen
    instead = folder / "incidents"
    _say(f"incidents go to {instead}, since {nearest} {problem}: --incidents DIR sets another folder")
    return instead


def _of_another(folder: Path) -> Path | None:
    """The part of a path by which another user could redirect writes; None if there is none.

    Root checks the whole path; other users trust the owners of folders above the parent (a project, a home).
    """
    parts = [path for path in (folder, *folder.parents) if os.path.lexists(path)]
    for path in parts if os.getuid() == 0 else [p for p in parts if p in (folder, folder.parent)]:
        facts = path.lstat()
        if facts.st_uid not in (0, os.getuid()):
            return path
        loose = stat.S_ISDIR(facts.st_mode) and facts.st_mode & stat.S_IWOTH
        if loose and not facts.st_mode & stat.S_ISVTX:
            return path
    return None


def _folder(job: str, record: bool) -> Path:
    """The folder for this job's black boxes, logs and token: ALLRANKS_DIR, or the default if that cannot be used."""
    from allranks.blackbox.files import MAX_LEFT_BYTES, remove_finished, usable_folder

    wanted = os.environ.get("ALLRANKS_DIR")
    try:
        folder, problem = usable_folder(Path(wanted) if wanted else None, job, record)
    except OSError as error:
        limit = ", raise the limit of file sizes (ulimit -f)" if "too large" in str(error) else ""
        hint = f"Set ALLRANKS_DIR to a folder of yours with room for 2 MB per rank{limit}, or start with --no-record."
        raise InputError(str(error), hint=hint) from error
    if problem:
        _say(f"{problem}; using {folder} instead. Set ALLRANKS_DIR to a folder with room for 2 MB per rank.")
    if removed := remove_finished(keep=folder):
        room = MAX_LEFT_BYTES >> 20
        _say(f"removed the black boxes of {len(removed)} finished jobs: they took more than {room} MiB")
    return folder


def _run_whole(job: NodeJob, words: list[str], log_dir: str | None) -> int:
    """Without `log_dir` ranks write to the terminal themselves."""
    from allranks.launch.whole_job import Launch, launch

    low, _, high = (flag_value(words, "--nnodes") or "1").partition(":")
    elastic = high not in ("", low)  # the job can continue with fewer nodes
    with ExitStack() as stack:  # ends the watch, so that its verdict is final
        job = replace(job, stack=stack)
        watch = start_watch(job, "whole_job", elastic)
        agent = start_agent(job, watch)
        options, variables = job.options, job.environment.variables()
        code = launch(
            Launch(tuple(words), variables, options.record, log_dir, options.quiet, options.spares, agent)
        )
    if code in STOPPED:
        _say(_stopped(code - 128, job.folder))
    if watch is None or code == 0 or (code in STOPPED and not watch.hung_at_end):
        return code
    if watch.pipeline.publisher.last:
        _say(watch.pipeline.publisher.last)  # below torchrun's report, which does not name a line
    return code


def _run_replicas(job: NodeJob, script: list[str], torchrun: list[str]) -> int:
    from allranks.launch.rank_entry import FILE
    from allranks.supervise.replicas import ReplicaOptions, Supervisor
    from allranks.supervise.restarts import RestartOptions

    options = job.options
    elastic = job.settings.get("elastic") or {}
    restarts = flag_value(torchrun, "--max-restarts") or str(elastic.get("max_restarts", 100))
    module = ["-m"] if has_flag(torchrun, "--module", "-m") else []
    entry = [FILE] if job.environment.record else []
    plain = has_flag(torchrun, "--no-python")
    command = tuple(script) if plain else (sys.executable, "-u", *entry, *module, *script)
    supervisor = Supervisor(
        ReplicaOptions(
            command=command,
            replicas=options.replicas or 1,
            ranks_per_replica=options.nproc_per_replica,
            first_replica=options.first_replica or 0,
            total_replicas=options.total_replicas,
            environment={
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                # survivors wait longer for a quorum than the watch waits for the rank that is missing
                "ALLRANKS_QUORUM_TIMEOUT_S": os.environ.get("ALLRANKS_QUORUM_TIMEOUT_S", "600"),
                **_state_loss(job),
                **job.environment.variables(),
            },
            restarts=RestartOptions(max_restarts=int(restarts)),
            log_folder=Path(job.log_dir),
            quiet=options.quiet,
        )
    )
    last: list[str] = []
    job.stack.callback(lambda: _say(*last))  # after the last lines of the parts
    agent = start_agent(job, start_watch(job, "replica"), supervisor)
    if agent.client is not None and options.lighthouse:
        first = options.first_replica or 0
        refuse_taken_numbers(agent.client, range(first, first + (options.replicas or 1)))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        previous = signal.signal(number, supervisor.note_signal)
        job.stack.callback(signal.signal, number, previous)
    code = supervisor.run()
    if code in STOPPED:
        last.append(_stopped(code - 128, job.folder))
    return code


def _stopped(number: int, folder: Path) -> str:
    """ "Stopped by Ctrl-C at step 11,500.", with the last step mark of any rank."""
    from allranks.watch.samples import read_samples

    cause = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    step = max((sample.step for sample in read_samples(folder)), default=-1)
    return f"Stopped by {cause}{f' at step {step:,}' if step >= 0 else ''}."


def _state_loss(job: NodeJob) -> dict[str, str]:
    """The managers' action when all holders of the state are gone; by default they stop if checkpoints are configured."""
    wanted = job.options.on_state_loss or ("stop" if configured_tiers(job.settings) else "")
    return {"ALLRANKS_ON_STATE_LOSS": wanted} if wanted else {}


def _start_fresh(options: RunFlags, folder: Path) -> None:
    """Passes --fresh to the ranks; only the first restore of this run applies it."""
    if not options.fresh:
        return
    if options.replicas and options.lighthouse:
        raise InputError(
            "--fresh does not work with replicas on several nodes: a node that joins later would set the others' "
            "checkpoints aside",
            hint="Once, before the first node starts: allranks checkpoint set-aside STORE",
        )
    from allranks.checkpoint.group import FRESH_VARIABLE, MARK

    (folder / MARK).unlink(missing_ok=True)
    os.environ[FRESH_VARIABLE] = "1"


def _lighthouse(
    options: RunFlags, settings: Settings, token: str, stack: ExitStack, job: str, folder: Path
) -> str:
    """The address of the lighthouse; starts one in this process unless an address is given."""
    if options.lighthouse:
        return options.lighthouse
    if not options.start_lighthouse and options.replicas:
        hint = "Leave out --no-lighthouse, or pass --lighthouse HOST:PORT."
        raise InputError("replicas need a lighthouse", hint=hint)
    if not options.start_lighthouse:
        return ""
    replicas = options.total_replicas or options.replicas or 0
    return embed_lighthouse(options.bind, token, options.min_replicas, replicas, settings, stack, job, folder)


ALONE = (
    "this node judges hangs by its own ranks only. For one verdict over all nodes start `allranks lighthouse --bind ADDRESS:29510` once, "
    "and set ALLRANKS_LIGHTHOUSE=ADDRESS:29510 and the same ALLRANKS_TOKEN on every node"
)


def may_have_several_nodes(words: list[str]) -> bool:
    """Whether torchrun's flags allow more nodes than this one."""
    return (flag_value(words, "--nnodes") or "1").rpartition(":")[2] not in ("0", "1")


def find_job_name(
    given: str, environment: Mapping[str, str], torchrun: list[str], settings: Settings, script: str
) -> str:
    """--job, $ALLRANKS_JOB_ID, the rendezvous id, else a generated name.

    A job file always has a rendezvous id. Its default is used only if nodes share a rendezvous and need the same name.
    """
    from allranks.elastic.world import ElasticTrainingConfig

    elastic = settings.get("elastic") or {}
    meets = elastic.get("rdzv_endpoint") or has_flag(torchrun, "--rdzv-endpoint")
    default = elastic.get("rdzv_id") == ElasticTrainingConfig.rdzv_id and not meets
    name = (
        given
        or environment.get("ALLRANKS_JOB_ID")
        or flag_value(torchrun, "--rdzv-id")
        or ("" if default else elastic.get("rdzv_id"))
        or f"{Path(script).stem}-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"
    )
    return str(name).encode(errors="replace").decode()  # without surrogates of the C locale, for JSON


def _torchrun_from(settings: Settings, given: list[str]) -> list[str]:
    """torchrun's flags from the `elastic` section, unless the command line has them."""
    elastic = settings.get("elastic") or {}
    if not elastic:
        return []
    words: list[str] = []
    if not has_flag(given, "--nnodes", "--standalone"):
        words += ["--nnodes", f"{elastic['min_nodes']}:{elastic['max_nodes']}"]
        nowhere = elastic["rdzv_backend"] == "c10d" and not elastic["rdzv_endpoint"]
        if elastic["max_nodes"] == 1 and nowhere and not has_flag(given, "--rdzv-endpoint", "--rdzv-backend"):
            words.append("--standalone")  # a free port: two jobs on one machine never share a rendezvous
    for key, flag in OF_ELASTIC.items():
        if elastic.get(key) not in (None, "") and not has_flag(given, flag):
            words += [flag, str(elastic[key])]
    if not has_flag(given, "--rdzv-conf"):
        words += ["--rdzv-conf", heartbeats(settings)]
    return words
