"""Whole-job mode: torchrun's own command line and elastic agent, with our defaults and our rank entry.

Runs in the agent; the only part of it that imports torch. As with torchrun, any failure restarts all ranks. We add
recording, reliable restarts, prefixed logs and errors with a fix.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import traceback
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.channel.frames import outward_address, resolves
from allranks.errors import InputError, require
from allranks.launch import torchrun_patches as patches
from allranks.launch.rank_entry import FILE
from allranks.launch.spares import Spares
from allranks.launch.torchrun_patches import LaunchError
from allranks.model.parsing import printable

if TYPE_CHECKING:
    from allranks.launch.node_agent import NodeAgent

log = logging.getLogger("allranks.agent")

# torch 2.13 shares one TCPStore over all rounds, and workers do not prefix keys by attempt: restarts are flaky
# (6 of 17 succeeded) and scale-up always failed. Without sharing: 11 of 11 and 4 of 4.
_FIXES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# torchrun waits 30 s for late nodes and 15 s for dead ones, while GPUs are idle. With less than 5 s for dead ones, nodes
# of a heavily loaded machine counted as dead.
_RENDEZVOUS_DEFAULTS = {"last_call_timeout": "2", "keep_alive_interval": "1", "keep_alive_max_attempt": "5"}
# A keep-alive costs the agent 5 ms of CPU, and a single node needs none.
_ALONE_DEFAULTS = {"last_call_timeout": "2", "keep_alive_interval": "60"}


@dataclass(frozen=True)
class Launch:
    """One torchrun launch: its command line, and the environment of its ranks."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    record: bool = True
    log_dir: str | None = None  # None: no log files
    quiet: bool = False  # ranks' output only to their log files
    spares: bool = True  # keep warm processes where a restart is possible
    node: NodeAgent | None = None  # is notified of ranks that start, end and fail


def launch(job: Launch) -> int:
    """Runs the job under torchrun's agent; returns the exit code."""
    require("torch", feature="allranks run", extra="torch")
    os.environ.update({**_FIXES, **os.environ, **job.environment, "ALLRANKS_AGENT_PID": str(os.getpid())})
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = torchrun.parse_args(list(job.argv))
    if _has_several_ranks(args):
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its seven-line warning
    script = str(args.training_script)
    args = prepare(args, job)
    spares = Spares() if job.spares and job.record and may_restart(args) else None
    replaced = patches.TorchrunPatches(job.node, may_restart(args), grace(args), spares)
    try:
        if is_hosted_by_agent(args):
            patches.refuse_other_server(str(args.rdzv_endpoint))
            limit_s = float(_parse_conf(args.rdzv_conf).get("read_timeout", 60))  # torchrun's
            find_host(args, time.monotonic() + limit_s, f"nothing listens there after {limit_s:g} s")
        with replaced.in_place():
            run_until_done(args, replaced)
    except ChildFailedError as error:
        print(str(error).replace(f"{FILE} FAILED", f"{script} FAILED"), file=sys.stderr)
        return _child_code(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 130
    except LaunchError:
        raise
    except Exception as error:
        log.debug("launch failed:\n%s", traceback.format_exc())
        raise explain(error, endpoint=str(args.rdzv_endpoint), run_id=str(args.rdzv_id)) from error
    return 0


def is_hosted_by_agent(args: Namespace) -> bool:
    """Whether one of the agents hosts the rendezvous, which is then lost with it."""
    tcp = _parse_conf(args.rdzv_conf).get("store_type", "tcp") == "tcp"
    return args.rdzv_backend == "c10d" and not args.standalone and tcp


def grace(args: Namespace) -> int | None:
    """Seconds between SIGTERM and SIGKILL; None: not set by the user."""
    given = getattr(args, "shutdown_timeout", None)
    given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") if given is None else given
    return None if given is None else int(given)


def find_host(args: Namespace, deadline: float, why: str) -> None:
    """Waits until the endpoint has a host, which this node may become (--rdzv-conf is_host: is); LaunchError at the deadline
    (monotonic)."""
    itself = _parse_conf(args.rdzv_conf).get("is_host", "").lower() in ("1", "true", "t", "yes", "y")
    if not (itself or patches.wait_for_host(str(args.rdzv_endpoint), deadline)):
        raise patches.no_server(str(args.rdzv_endpoint), why)


def run_until_done(args: Namespace, replaced: patches.TorchrunPatches) -> None:
    """Runs the job. When the host of a c10d rendezvous is lost, this agent keeps its snapshots and waits for a new host.

    The new host is another agent on that machine, or the restarted node. torchrun would end every agent.
    """
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    deadline, held = 0.0, 0
    while True:
        try:
            torchrun.run(args)
            return
        except (RendezvousConnectionError, DistNetworkError, DistStoreError) as error:
            if replaced.held > held:
                deadline, held = time.monotonic() + patches.AWAY_S, replaced.held
            if not (is_hosted_by_agent(args) and may_restart(args)) or time.monotonic() > deadline:
                raise
            log.warning(
                "the host of the rendezvous at %s is lost (%s): waiting for a new one for %.0f s",
                args.rdzv_endpoint, error, deadline - time.monotonic(),
            )  # fmt: skip
        find_host(args, deadline, f"its host was lost {patches.AWAY_S:g} s ago")


def may_restart(args: Namespace) -> bool:
    """Whether torchrun's agent may ever start ranks twice: after a failure, or when nodes come and go."""
    low, _, high = str(args.nnodes).partition(":")
    return int(args.max_restarts) > 0 or (high not in ("", low))


def _has_several_ranks(args: Namespace) -> bool:
    """Whether this node has several ranks: a single one uses all cores."""
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(args.nproc_per_node)) > 1
    except ValueError:  # torchrun reports it
        return False


def prepare(args: Namespace, job: Launch) -> Namespace:
    """Puts our rank entry before the user's script, and sets our defaults."""
    namespace = vars(args)
    conf = _parse_conf(namespace.get("rdzv_conf") or "")
    alone = bool(namespace.get("standalone") or str(namespace.get("nnodes")) in ("1", "1:1"))
    namespace["local_addr"] = _own_address(namespace.get("local_addr"), alone)
    if namespace.get("rdzv_backend") == "static" and alone and may_restart(args) and not args.standalone:
        # its store is shared by all attempts: restarted ranks may find addresses of dead ones
        port = args.master_port  # None: torch takes a free one and c10d by itself
        if endpoint := args.rdzv_endpoint or (port and f"{args.master_addr}:{port}"):
            namespace.update(rdzv_backend="c10d", rdzv_endpoint=endpoint)
            conf.setdefault("is_host", "1")
    if namespace.get("rdzv_backend") != "static" or namespace.get("standalone"):
        conf = {**(_ALONE_DEFAULTS if alone else _RENDEZVOUS_DEFAULTS), **conf}
        namespace["rdzv_conf"] = ",".join(f"{key}={value}" for key, value in conf.items())
    if (
        namespace.get("tee") in (None, "0")
        and namespace.get("redirects") in (None, "0")
        and (job.quiet or job.log_dir)
    ):
        namespace["redirects" if job.quiet else "tee"] = "3"
        namespace["log_dir"] = namespace.get("log_dir") or job.log_dir
    if job.record and not namespace.get("no_python") and not namespace.get("run_path"):
        module = ["-m"] if namespace.get("module") else []
        script, rest = namespace["training_script"], namespace["training_script_args"]
        namespace["training_script"], namespace["module"] = FILE, False
        namespace["training_script_args"] = [*module, script, *rest]
    return args


def _own_address(given: str | None, alone: bool) -> str | None:
    """--local-addr, or a MASTER_ADDR if the host name does not resolve; None: torchrun uses the host name."""
    name = printable(socket.gethostname(), 64)
    if given or resolves(socket.gethostname()):
        return given
    if alone and not resolves("localhost"):  # used by torchrun --standalone
        raise LaunchError(
            f"neither localhost nor the host name {name} resolves",
            hint="Add the line `127.0.0.1 localhost` to /etc/hosts.",
        )
    instead = "localhost" if alone else outward_address()
    fix = "add the name to /etc/hosts, or pass --local-addr"
    log.warning("the host name %s does not resolve: ranks use %s instead (%s)", name, instead, fix)
    return instead


def explain(error: Exception, *, endpoint: str, run_id: str) -> LaunchError:
    """A launch failure with a readable message and a hint."""
    name, text = type(error).__name__, str(error)
    endpoint = ",".join(one.rpartition("@")[2] for one in endpoint.split(","))  # without user:password@
    cause = f"{text} {error.__cause__ or ''}".lower()
    if "address already in use" in cause or "eaddrinuse" in cause:
        return patches.port_in_use(endpoint, text)
    if name == "RendezvousConnectionError" or "connection refused" in cause:
        return patches.no_server(endpoint, text)
    if name in {"RendezvousTimeoutError", "TimeoutError"}:
        return LaunchError(
            f"the rendezvous {run_id!r} at {endpoint} was not complete in time"
            + (f": {text}" if text else ""),
            hint="Fewer nodes than --nnodes requires have joined. Check that every node uses the same "
            "--rdzv-id and --rdzv-endpoint, or lower the minimum (--nnodes MIN:MAX).",
        )
    if name == "RendezvousClosedError":
        return LaunchError(
            f"the rendezvous {run_id!r} is closed: an earlier run ended it, or its keys are stale",
            hint="Use a new --rdzv-id, or remove the old keys (`allranks doctor` lists stale ones).",
        )
    if name == "RendezvousStateError":
        return LaunchError(
            f"the rendezvous state of {run_id!r} at {endpoint} cannot be read: {text}",
            hint="Another job may use the same --rdzv-id. Use a new one.",
        )
    if isinstance(error, ModuleNotFoundError) and error.name == "etcd":
        return LaunchError(
            "torchrun's etcd-v2 rendezvous needs the package python-etcd",
            hint="Use --rdzv-backend etcd-v3, which needs no package, or pip install python-etcd.",
        )
    if isinstance(error, UnicodeError):  # Python cannot look up a name with a label of 64 characters
        return LaunchError(
            f"torchrun cannot use the host name {printable(socket.gethostname(), 64)}: {text}",
            hint="Give the host a shorter name (hostnamectl set-hostname, docker --hostname).",
        )
    if isinstance(error, ValueError):
        return LaunchError(f"torchrun refused the command line: {text}", hint="See `allranks run --help`.")
    return LaunchError(f"the launch failed: {name}: {text}")


def _child_code(error: object) -> int:
    """1 for a failure, 128 + signal when the first failing rank was killed by one."""
    _, failure = error.get_first_failure()  # type: ignore[attr-defined]
    code = int(failure.exitcode)
    return 128 - code if code < 0 else 1


def _parse_conf(text: str) -> dict[str, str]:
    pairs = [part.split("=", 1) for part in text.split(",") if part.strip()]
    wrong = [part for part in pairs if len(part) != 2]
    if wrong:
        raise InputError(f"--rdzv-conf needs key=value pairs, not {'='.join(wrong[0])!r}")
    return {key.strip(): value.strip() for key, value in pairs}
