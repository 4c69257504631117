"""`allranks lighthouse`: runs a lighthouse, or talks to one that runs (status, evict, readmit, collect)."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.channel.frames import split_address
from allranks.channel.keys import read_token, write_token
from allranks.cli.parser import add_flags, read_flags
from allranks.cli.terminal import answer
from allranks.errors import ConfigurationError, InputError
from allranks.etcd import parse_endpoints
from allranks.lighthouse.connection import calm_collector, raise_open_files
from allranks.lighthouse.election import EtcdOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse, explain_listen, new_event_loop
from allranks.lighthouse.web import http_protocol
from allranks.model.options import option
from allranks.model.parsing import printable

if TYPE_CHECKING:
    from allranks.lighthouse.client.client import Client


ACTIONS = ("serve", "status", "evict", "readmit", "collect")
_server = partial(option, group="server")


@dataclass(frozen=True)
class LighthouseFlags:
    """What the command takes besides the options of the quorum and of the server."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", default="serve", metavar="ACTION", help=f"{', '.join(ACTIONS)} (default: serve)"
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="JOB",
        help="name of a job on this node, or HOST:PORT of a running lighthouse (not for serve)",
    )
    parser.add_argument(
        "replica", nargs="*", metavar="REPLICA", help="to evict, to readmit, or to collect evidence from"
    )
    add_flags(parser, LighthouseFlags)
    add_flags(parser, Options, grouped=True)
    add_flags(parser, ServerOptions, grouped=True)


def main(args: argparse.Namespace) -> int:
    """Serves until a signal, or does one action."""
    action = _action(args.action)
    options = read_flags(LighthouseFlags, args)
    if action == "serve":
        return serve(options, args)
    if action in ("evict", "readmit") and len(args.replica) != 1:
        raise InputError(
            f"{action} needs a job and one replica",
            hint=f"For example: allranks lighthouse {action} my-job replica-3. `allranks lighthouse status my-job` lists the replicas.",
        )
    from allranks.incidents.job_overview import TOKEN_FILE, lighthouse_of, read_job_token

    address, folder = lighthouse_of(args.address)
    token_file = options.token_file
    if not token_file and folder is not None and read_job_token(folder):
        token_file = str(folder / TOKEN_FILE)
    return _act(action, options, read_flags(ServerOptions, args), address, token_file, args.replica)


def _action(given: str) -> str:
    if given not in ACTIONS:
        from difflib import get_close_matches

        near = get_close_matches(given, ACTIONS, n=1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise InputError(f"unknown action {given!r}", hint=f"{meant}One of: {', '.join(ACTIONS)}")
    return given


def _act(
    action: str,
    options: LighthouseFlags,
    tls: ServerOptions,
    address: str,
    token_file: str,
    replicas: list[str],
) -> int:
    from allranks.lighthouse.client.client import Client, ClientOptions

    token, left = "", default_token_file(address)
    if token_file:
        token = read_token(Path(token_file))
    elif not (os.environ.get("ALLRANKS_TOKEN") or os.environ.get("ALLRANKS_TOKEN_FILE")) and left.exists():
        token = read_token(left, own=True)  # those of the environment are read by the client
    who = ClientOptions((address,), token, role="observer", replica="")
    who = replace(who, ca=options.ca, certificate=tls.certificate, key=tls.key)
    client = Client(who).start(timeout_s=5.0)
    try:
        status = client.status()
        if action == "status":
            return _show_status(status, options.json)
        # a replica that the lighthouse does not know is a mistake; only one that is there can be evicted
        here = {row["replica"] for row in status["replicas"] if row["state"] != "observer"}
        known = sorted(here if action == "evict" else here | {*status["lost"], *status["evicted"]})
        if unknown := [name for name in replicas if name not in known]:
            raise InputError(
                f"no replica {unknown[0]!r} is known", hint=f"Known: {', '.join(known) or 'none'}."
            )
        facts, text = _change(client, action, replicas, options.reason or "requested on the command line")
    finally:
        client.close()
    answer(options.json, facts, text)
    return 0


def _change(client: Client, action: str, replicas: list[str], reason: str) -> tuple[dict[str, str], str]:
    """Does it, and returns what was done, for programs and for people."""
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
    """Where a lighthouse leaves the token that it made, for commands of the same user on the same machine."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/allranks-{os.getuid()}"
    return Path(base) / f"lighthouse-{address.rpartition(':')[2]}.token"


def _show_status(status: dict[str, Any], as_json: bool) -> int:
    """Exit 0 when all members are there, 1 when one is lost or nothing trains although replicas wait for a quorum."""
    answer(as_json, status, _status_lines(status))
    return int(bool(status["lost"]) or bool(status["waiting"] and not status["quorum"]))


def _status_lines(status: dict[str, Any]) -> Iterator[str]:
    yield printable(status["training"]["sentence"])
    count = len((status["quorum"] or {"members": []})["members"])
    quorum = f"quorum {status['number']} (epoch {status['epoch']}), {count} members"
    yield f"{quorum}: {printable(status['reason'])}"
    if status["waiting"]:
        yield f"waiting: {printable(status['waiting'])}"
    for row in status["replicas"]:
        if row["state"] != "observer":  # these are agents, and this very command
            step = f"step {row['step']}" if row["step"] >= 0 else ""
            who = f"{row['replica']:<24} {row['state']:<10} {row['node']:<20}"
            yield f"  {who} {step:<12} heard {row['heard_s']:.1f} s ago"


log = logging.getLogger("allranks.lighthouse")

START_GRACE_S = 1.5


def serve(options: LighthouseFlags, args: argparse.Namespace) -> int:
    logging.basicConfig(
        level=options.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    raise_open_files()
    calm_collector()
    token, token_file, fresh = server_token(options)
    if args.start_grace_s is None:  # no replica has a new token yet, so the first quorum need not wait
        args.start_grace_s = 0.0 if fresh else START_GRACE_S
    grpc: list[str] = []
    lighthouse = make_lighthouse(options, args, token, grpc.append)
    try:
        caught = _serve_until_signal(
            lighthouse, lambda: _announce(options, lighthouse, token, token_file, "".join(grpc))
        )
    except OSError as error:
        text, hint = explain_listen(error, options.bind)
        raise InputError(text, hint=hint) from error
    finally:
        # replicas that were there to the last come back to the next lighthouse here, with the same token
        known = lighthouse.service.state.replicas.values() if lighthouse.service else ()
        alone = all(replica.observer for replica in known)
        if token_file is None and lighthouse.address and alone:
            with suppress(OSError):  # it could not be written either
                default_token_file(lighthouse.address).unlink(missing_ok=True)
    return 130 if caught == signal.SIGINT else 0


def _serve_until_signal(lighthouse: Lighthouse, announce: Callable[[], None]) -> int:
    """Returns the first signal."""
    stop = asyncio.Event()
    caught: list[int] = []

    def note(number: int) -> None:
        caught.append(number)
        stop.set()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, note, number)
        await lighthouse.serve(stop, announce)

    loop = new_event_loop()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    return caught[0] if caught else 0


def make_lighthouse(
    options: LighthouseFlags, args: argparse.Namespace, token: str, on_grpc: Callable[[str], None]
) -> Lighthouse:
    """The lighthouse that the command line describes; `on_grpc` gets the address of its gRPC port."""
    host, port = _split(options.bind)
    timeout_s = Options.heartbeat_timeout_s if args.heartbeat_timeout_s is None else args.heartbeat_timeout_s
    grace = {name: min(getattr(Options, name), timeout_s) for name in ("grace_s", "reset_grace_s")}
    server = read_flags(ServerOptions, args, host=host, port=port, token=token, job="")
    endpoints = parse_endpoints(options.etcd) if options.etcd else ()
    etcd = EtcdOptions(endpoints, options.job, options.lease_s, options.ca) if endpoints else None
    protocols, page = [], http_protocol(options.allow_host)
    if options.grpc_bind:
        from allranks.lighthouse.grpc_server import torchft_protocol

        same = options.grpc_bind == options.bind and port
        where = ("", 0) if same else _split(options.grpc_bind)
        protocols.append(torchft_protocol(*where, on_grpc, options.grpc_open))
    return Lighthouse(read_flags(Options, args, **grace), server, etcd=etcd, http=page, protocols=protocols)


def _split(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError as error:
        raise InputError(f"--bind: {error}") from error


def server_token(options: LighthouseFlags) -> tuple[str, Path | None, bool]:
    """(token, its file or None when it still has to be written, whether it was made just now)."""
    if options.no_token:
        return "", None, False
    if not options.token_file and (token := os.environ.get("ALLRANKS_TOKEN")):
        return token, None, False
    if path := options.token_file or os.environ.get("ALLRANKS_TOKEN_FILE"):
        return read_token(Path(path)), Path(path), False
    try:  # that of a lighthouse at this address that was killed: its replicas know no other
        return read_token(default_token_file(options.bind), own=True), None, False
    except ConfigurationError:
        return secrets.token_urlsafe(24), None, True


def _announce(
    options: LighthouseFlags, lighthouse: Lighthouse, token: str, token_file: Path | None, grpc: str
) -> None:
    if not token:  # one that was killed at this port may have left its own, which commands would use
        with suppress(OSError):
            default_token_file(lighthouse.address).unlink()
    if token and token_file is None:
        token_file = default_token_file(lighthouse.address)
        try:
            _leave_token(token_file, token)
        except InputError as error:
            if token != os.environ.get("ALLRANKS_TOKEN"):
                raise
            log.warning("%s: commands on this machine need ALLRANKS_TOKEN too", error)
            token_file = None
    scheme = "https" if lighthouse.server.certificate else "http"
    line = {"address": lighthouse.address, "http": f"{scheme}://{lighthouse.address}"}
    if options.grpc_bind:
        line["grpc"] = grpc
    if token_file is not None:
        line["token_file"] = str(token_file)
    where = f", token in {token_file}" if token_file else ""
    print(json.dumps(line) if options.json else f"lighthouse at {lighthouse.address}{where}", flush=True)


def _leave_token(path: Path, token: str) -> None:
    """For commands of this user; not in a folder that belongs to another user."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own, link_by = path.parent.stat().st_uid == os.getuid(), path.parent.lstat().st_uid
        if not own or link_by not in (0, os.getuid()):
            raise InputError(f"{path.parent} belongs to another user", hint="Give --token-file.")
        write_token(path, token)
    except OSError as error:
        raise InputError(
            f"cannot leave the job token in {path}: {error.strerror or error}",
            hint="Give --token-file or $ALLRANKS_TOKEN, or set $XDG_RUNTIME_DIR to a folder that can be written.",
        ) from error
