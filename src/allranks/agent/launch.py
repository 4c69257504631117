"""Whole-job mode: torchrun's own command line and elastic agent, with our defaults and our rank entry.

Runs in the agent; the only part of it that imports torch. A failure anywhere restarts all ranks (that is
torchrun's way); what we add is recording, restarts that work, prefixed logs and errors that name the cure.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import traceback
from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta

from allranks.agent.meeting import meeting_again
from allranks.agent.spares import RANK_MODULE, Spares, serving
from allranks.errors import AllranksError, InputError, require

log = logging.getLogger("allranks.agent")

# torch 2.13 keeps one TCPStore over all rounds while workers no longer prefix their keys by attempt:
# restarts are flaky (6 of 17 clean) and scale-up always fails. Without sharing: 11 of 11 and 4 of 4.
_CURE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# torchrun waits 30 s for late nodes and 15 s for dead ones; both are measured in idle GPUs. With fewer than 5 s for
# dead ones, nodes of a heavily loaded machine were taken for dead.
_RENDEZVOUS_DEFAULTS = {"last_call_timeout": "2", "keep_alive_interval": "1", "keep_alive_max_attempt": "5"}


class LaunchError(AllranksError):
    """The job could not be started, or its rendezvous failed."""


@dataclass(frozen=True)
class Launch:
    """One torchrun launch: its command line, and what ranks are told."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    record: bool = True
    log_dir: str | None = None
    spares: bool = True  # keep warm processes where a restart is possible


def launch(job: Launch) -> int:
    """Runs the job under torchrun's agent to its end and returns the exit code."""
    require("torch", feature="allranks run", extra="torch")
    os.environ.update({**_CURE, **job.environment, "ALLRANKS_AGENT_PID": str(os.getpid())})
    os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[rank ${rank}] ")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = prepare(torchrun.parse_args(list(job.argv)), record=job.record, log_dir=job.log_dir)
    if args.rdzv_backend == "c10d" and not args.standalone:
        refuse_stranger(str(args.rdzv_endpoint))
    try:
        spares = Spares() if job.spares and job.record and may_restart(args) else None
        with serving(spares), meeting_again():
            torchrun.run(args)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return _child_code(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        log.debug("launch failed:\n%s", traceback.format_exc())
        raise explain(error, endpoint=str(args.rdzv_endpoint), run_id=str(args.rdzv_id)) from error
    return 0


def may_restart(args: Namespace) -> bool:
    """Whether torchrun's agent may ever start ranks twice: after a failure, or when nodes come and go."""
    low, _, high = str(args.nnodes).partition(":")
    return int(args.max_restarts) > 0 or (high not in ("", low))


def prepare(args: Namespace, *, record: bool, log_dir: str | None) -> Namespace:
    """Puts our rank entry before the user's script, and our defaults where the user chose none."""
    namespace = vars(args)
    conf = _parse_conf(namespace.get("rdzv_conf") or "")
    if namespace.get("rdzv_backend") != "static" or namespace.get("standalone"):
        conf = {**_RENDEZVOUS_DEFAULTS, **conf}
        namespace["rdzv_conf"] = ",".join(f"{key}={value}" for key, value in conf.items())
    if namespace.get("tee") in (None, "0") and namespace.get("redirects") in (None, "0"):
        namespace["tee"] = "3"
        namespace["log_dir"] = namespace.get("log_dir") or log_dir
    if record and not namespace.get("no_python") and not namespace.get("run_path"):
        module = ["-m"] if namespace.get("module") else []
        script, rest = namespace["training_script"], namespace["training_script_args"]
        namespace["training_script"], namespace["module"] = RANK_MODULE, True
        namespace["training_script_args"] = [*module, script, *rest]
    return args


def refuse_stranger(endpoint: str, wait_s: float = 10.0) -> None:
    """LaunchError if this node's rendezvous port is held by something that is no rendezvous store.

    torch would connect to it and wait without limit for an answer. Another agent's store answers at once.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or _can_listen(host.strip("[]"), int(port)):
        return
    import torch.distributed as dist

    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):  # refused or closed: not a store either
            dist.TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=wait_s))
            answered.set()

    asking = threading.Thread(target=ask, name="allranks-ask-endpoint", daemon=True)
    asking.start()
    asking.join(wait_s)
    if not answered.is_set():
        raise _port_in_use(endpoint, "what listens there is not a rendezvous store")


def _can_listen(host: str, port: int) -> bool:
    """Whether the port is free, or not ours to judge (another machine's address)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _port_in_use(endpoint: str, text: str) -> LaunchError:
    return LaunchError(
        f"the rendezvous port of {endpoint or 'this node'} is in use: {text}",
        hint="Find who holds it (ss -ltnp), or choose another with --rdzv-endpoint HOST:PORT "
        "(port 0 with --standalone takes a free one).",
    )


def explain(error: Exception, *, endpoint: str, run_id: str) -> LaunchError:
    """A launch failure in words, with the cure."""
    name, text = type(error).__name__, str(error)
    cause = f"{text} {error.__cause__ or ''}".lower()
    if "address already in use" in cause or "eaddrinuse" in cause:
        return _port_in_use(endpoint, text)
    if name == "RendezvousConnectionError" or "connection refused" in cause:
        return LaunchError(
            f"no rendezvous server answers at {endpoint}: {text}",
            hint="Is etcd running? `allranks etcd status`, `allranks etcd start`. For c10d, the node that "
            "hosts the endpoint must be started too, and the name must resolve to it.",
        )
    if name in {"RendezvousTimeoutError", "TimeoutError"}:
        return LaunchError(
            f"the rendezvous {run_id!r} at {endpoint} was not complete in time: {text}",
            hint="Fewer nodes than --nnodes asks for have joined. Check that every node uses the same "
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
        raise InputError(f"--rdzv-conf wants key=value pairs, got {'='.join(wrong[0])!r}")
    return {key.strip(): value.strip() for key, value in pairs}
