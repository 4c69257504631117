"""`allranks lighthouse`: runs a lighthouse, or controls a running one (status, evict, readmit, collect)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.cli.parser import read_flags, with_heading
from allranks.cli.terminal import answer
from allranks.errors import InputError
from allranks.lighthouse.options import Options, ServerOptions
from allranks.model.formatting import count
from allranks.model.options import argument, option
from allranks.model.parsing import printable

if TYPE_CHECKING:
    from allranks.lighthouse.client.client import Client

_server = partial(option, group="server")


@dataclass(frozen=True)
class LighthouseFlags:
    """Options of the command besides those of the quorum and of the server."""

    action: str = argument("serve", "what to do", choices=("serve", "status", "evict", "readmit", "collect"))
    address: str | None = argument(
        None,
        "name of a job on this node, or HOST:PORT of a running lighthouse (not for serve)",
        metavar="JOB",
    )
    replica: tuple[str, ...] = argument(
        (), "to evict, to readmit, or to collect evidence from", metavar="REPLICA"
    )
    json: bool = option(False, "print one JSON line (serve: once it listens)")
    token_file: str = option(
        "", "file with the job token; or $ALLRANKS_TOKEN, $ALLRANKS_TOKEN_FILE", metavar="FILE"
    )
    reason: str = option("", "why, for evict and collect; kept in the incident")
    bind: str = _server("127.0.0.1:29510", "where to listen; port 0: any free one", metavar="HOST:PORT")
    grpc_bind: str = _server(
        "",
        "also speak torchft's gRPC protocol there; may be the same as --bind. torchft's clients send no job token: "
        "see --no-token and --grpc-open",
        metavar="HOST:PORT",
    )
    grpc_open: bool = _server(
        False, "torchft's clients without the job token may report that they live; they never become members"
    )
    allow_host: tuple[str, ...] = _server(
        (),
        "host name under which the page may be requested, or $ALLRANKS_ALLOW_HOSTS, comma separated",
        metavar="NAME",
    )
    no_token: bool = _server(False, "no authentication (only sensible on loopback)")
    ca: str = _server("", "CA of an https etcd; for status and the like: of a TLS lighthouse", metavar="PEM")
    etcd: str = _server("", "high availability: endpoints of an etcd", metavar="URL,...")
    job: str = _server("job", "name of the job in etcd")
    lease_s: int = _server(3, "how long a dead leader stays leader", unit="s", above=0)
    log_level: str = _server(
        "info", "least level that is logged", choices=("debug", "info", "warning", "error")
    )


FLAGS = (LighthouseFlags, with_heading(Options), with_heading(ServerOptions))


def main(args: argparse.Namespace) -> int:
    """Serves until a signal, or does one action."""
    options = read_flags(LighthouseFlags, args)
    action = options.action
    if action == "serve":
        from allranks.cli.lighthouse_serve import serve

        return serve(options, args)
    if action in ("evict", "readmit") and len(args.replica) != 1:
        raise InputError(
            f"{action} needs a job and one replica",
            hint=f"For example: allranks lighthouse {action} my-job replica-3. `allranks lighthouse status my-job` lists the replicas.",
        )
    client = _connect(options, args)
    try:
        status = client.status()
        if action == "status":
            return _show_status(status, options.json)
        # only present replicas can be evicted
        here = {row["replica"] for row in status["replicas"] if row["state"] != "observer"}
        known = sorted(here if action == "evict" else here | {*status["lost"], *status["evicted"]})
        if unknown := [name for name in args.replica if name not in known]:
            hint = f"Known: {', '.join(known)}." if known else "No replica has joined this lighthouse."
            raise InputError(f"no replica {unknown[0]!r} is known", hint=hint)
        facts, text = _change(client, action, args.replica, options.reason or "requested on the command line")
    finally:
        client.close()
    answer(options.json, facts, text)
    return 0


def _connect(options: LighthouseFlags, args: argparse.Namespace) -> Client:
    """A client with the token of --token-file, of the job's folder, of the environment (read by the client), or of a lighthouse
    on this machine."""
    from allranks.channel.keys import read_token
    from allranks.incidents.job_overview import TOKEN_FILE, lighthouse_of, read_job_token
    from allranks.lighthouse.client.client import Client, ClientOptions

    address, folder = lighthouse_of(args.address)
    tls, token_file, token = read_flags(ServerOptions, args), options.token_file, ""
    if not token_file and folder is not None and read_job_token(folder):
        token_file = str(folder / TOKEN_FILE)
    in_environment = os.environ.get("ALLRANKS_TOKEN") or os.environ.get("ALLRANKS_TOKEN_FILE")
    if token_file:
        token = read_token(Path(token_file))
    elif not in_environment and (left := default_token_file(address)).exists():
        token = read_token(left, own=True)
    who = ClientOptions((address,), token, replica="", role="observer")
    who = replace(who, ca=options.ca, certificate=tls.certificate, key=tls.key)
    return Client(who).start(timeout_s=5.0)


def _change(client: Client, action: str, replicas: list[str], reason: str) -> tuple[dict[str, str], str]:
    """Carries out an action; returns its result as JSON and as text."""
    if action == "collect":
        incident = client.collect(reason, replicas)
        return {"incident": incident}, f"collecting evidence: incident {incident}"
    name = replicas[0]
    if action == "evict":
        client.evict(name, reason)
    else:
        client.readmit(name)
    return {"replica": name, "done": action}, f"{name} {'evicted' if action == 'evict' else 'readmitted'}"


def default_token_file(address: str) -> Path:
    """Where a lighthouse writes a generated token, for commands of the same user on this machine."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/allranks-{os.getuid()}"
    return Path(base) / f"lighthouse-{address.rpartition(':')[2]}.token"


def _show_status(status: dict[str, Any], as_json: bool) -> int:
    """Exit code 0, or 1 when a member is lost, or replicas wait for a quorum without any training."""
    answer(as_json, status, _status_lines(status))
    return int(bool(status["lost"]) or bool(status["waiting"] and not status["quorum"]))


def _status_lines(status: dict[str, Any]) -> Iterator[str]:
    yield printable(status["training"]["sentence"])
    members = count(len((status["quorum"] or {"members": []})["members"]), "member")
    quorum = f"quorum {status['number']} (epoch {status['epoch']}), {members}"
    yield f"{quorum}: {printable(status['reason'])}"
    if status["waiting"]:
        yield f"waiting: {printable(status['waiting'])}"
    for row in status["replicas"]:
        if row["state"] != "observer":  # agents and this command
            step = f"step {row['step']:,}" if row["step"] >= 0 else ""
            who = f"{row['replica']:<24} {row['state']:<10} {row['node']:<20}"
            yield f"  {who} {step:<12} heard {row['heard_s']:.1f} s ago"
