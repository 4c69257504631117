"""`allranks lighthouse`: runs a lighthouse, or talks to one that runs (status, evict, let-in, collect)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.channel.token import read_token, write_token
from allranks.errors import ConfigurationError, InputError
from allranks.model.text import printable

if TYPE_CHECKING:
    from allranks.lighthouse.server import Lighthouse

DEFAULT_BIND = "127.0.0.1:29510"
_START_GRACE_MS = 1500
ACTIONS = ("serve", "status", "evict", "let-in", "collect")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Both spellings of every option: ours with dashes, torchft_lighthouse's with underscores."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  allranks lighthouse --bind 0.0.0.0:29510 --min-replicas 2\n"
        "  allranks lighthouse status 127.0.0.1:29510 --json\n"
        "  allranks lighthouse collect my-job              (by the name of a job of `allranks run` on this node)\n"
        "  allranks lighthouse evict 127.0.0.1:29510 replica-3 --reason 'bad GPU'\n"
        "  allranks lighthouse let-in 127.0.0.1:29510 replica-3"
    )
    parser.add_argument(
        "action", nargs="?", default="serve", metavar="ACTION", help=f"{', '.join(ACTIONS)} (serve)"
    )
    parser.add_argument(
        "address",
        nargs="?",
        help="HOST:PORT of a running lighthouse, or the name of a job on this node (not for serve)",
    )
    parser.add_argument("replica", nargs="*", help="replica to evict or let in; replicas to collect from")
    parser.add_argument("--json", action="store_true", help="print one JSON line (serve: once it listens)")
    parser.add_argument(
        "--token-file", help="file with the job token; or $ALLRANKS_TOKEN, $ALLRANKS_TOKEN_FILE"
    )
    parser.add_argument("--reason", default="", help="why, for evict and collect")
    _quorum_arguments(parser.add_argument_group("quorum"))
    _server_arguments(parser.add_argument_group("server"))


def _quorum_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--min-replicas", "--min_replicas", type=int, default=1, help="fewest members (1)")
    group.add_argument("--max-replicas", type=int, default=0, help="most members; more are spares (no limit)")
    group.add_argument(
        "--multiple-of", type=int, default=1, help="the number of members is a multiple of this (1)"
    )
    group.add_argument(
        "--divides", type=int, default=0, help="the number of members divides this, e.g. a batch size"
    )
    _milliseconds(group, "join-timeout-ms", 60000, "how long those who ask wait for those who do not")
    _milliseconds(group, "quorum-tick-ms", 100, "how often time alone may change a decision")
    _milliseconds(group, "heartbeat-timeout-ms", 5000, "silence after which a replica counts as lost")
    _milliseconds(group, "heartbeat-ms", 0, "how often replicas beat; 0: a fifth of the timeout, at most 1 s")
    _milliseconds(
        group,
        "start-grace-ms",
        _START_GRACE_MS,
        "a new lighthouse waits so long for members of a quorum that trains already; 0 with a token that it made itself",
    )
    _milliseconds(
        group, "stall-ms", 0, "ask for evidence when a member makes no progress for this long; 0: never"
    )


def _server_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--bind", default=DEFAULT_BIND, metavar="HOST:PORT", help=f"port 0: any ({DEFAULT_BIND})"
    )
    group.add_argument(
        "--grpc-bind",
        default="",
        metavar="HOST:PORT",
        help="also speak torchft's gRPC protocol there, without a token; may be the same as --bind",
    )
    group.add_argument("--advertise", default="", metavar="HOST:PORT", help="address that others are told")
    group.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="the page may also be asked for under this host name; or $ALLRANKS_ALLOW_HOSTS, comma separated",
    )  # fmt: skip
    group.add_argument("--no-token", action="store_true", help="let everybody in (only sensible on loopback)")
    group.add_argument("--certificate", default="", metavar="PEM", help="switches TLS on")
    group.add_argument("--key", default="", metavar="PEM", help="key of the certificate, if in another file")
    group.add_argument(
        "--client-ca", default="", metavar="PEM", help="mTLS: clients must show a certificate of it"
    )
    group.add_argument(
        "--ca",
        default="",
        metavar="PEM",
        help="CA of an https etcd; for status and the like: of a TLS lighthouse",
    )
    group.add_argument(
        "--etcd", default="", metavar="URL,...", help="high availability: endpoints of an etcd"
    )
    group.add_argument("--job", default="job", help="name of the job in etcd (job)")
    group.add_argument(
        "--lease-s", type=int, default=3, metavar="S", help="how long a dead leader keeps its place (3)"
    )
    group.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def _milliseconds(group: argparse._ArgumentGroup, name: str, default: int, text: str) -> None:
    group.add_argument(
        f"--{name}",
        f"--{name.replace('-', '_')}",
        type=float,
        default=default,
        metavar="MS",
        help=f"{text} ({default})",
    )


def main(args: argparse.Namespace) -> int:
    """Serves until a signal, or does one action."""
    if args.action not in ACTIONS:
        raise InputError(f"unknown action {args.action!r}", hint=f"One of: {', '.join(ACTIONS)}")
    if args.action == "serve":
        return _serve(args)
    _find_lighthouse(args)
    return _act(args)


# ---- serve ------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    import asyncio
    import logging
    import signal

    from allranks.lighthouse.limits import calm_collector, raise_open_files
    from allranks.lighthouse.server import new_event_loop

    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    raise_open_files()
    calm_collector()
    token, token_file, fresh = _server_token(args)
    if fresh and args.start_grace_ms == _START_GRACE_MS:
        args.start_grace_ms = (
            0.0  # nobody has this token yet, so nobody trains: the first quorum need not wait
        )
    lighthouse = make_lighthouse(args, token)
    stop = asyncio.Event()
    caught: list[int] = []

    def note(number: int) -> None:
        caught.append(number)
        stop.set()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, note, number)
        await lighthouse.serve(stop, lambda: _announce(args, lighthouse, token, token_file))

    loop = new_event_loop()
    try:
        loop.run_until_complete(run())
    except OSError as error:
        raise InputError(f"cannot listen on {args.bind}: {error.strerror or error}") from error
    finally:
        loop.close()
        if token_file is None and lighthouse.address and not _awaited(lighthouse):
            with suppress(OSError):  # it could not be written either
                default_token_file(lighthouse.address).unlink(missing_ok=True)
    return 130 if signal.SIGINT in caught else 0


def _awaited(lighthouse: Lighthouse) -> bool:
    """Whether replicas were there to the last: they come back to the next lighthouse here, with the same token."""
    replicas = lighthouse.service.state.replicas.values() if lighthouse.service else ()
    return any(not replica.observer for replica in replicas)


def make_lighthouse(args: argparse.Namespace, token: str) -> Lighthouse:
    """The lighthouse that the command line describes."""
    from allranks.etcd import parse_endpoints
    from allranks.lighthouse.election import EtcdOptions
    from allranks.lighthouse.options import Options, ServerOptions
    from allranks.lighthouse.server import Lighthouse
    from allranks.lighthouse.web import http_protocol

    host, port = _bind(args.bind)
    options = Options(
        min_replicas=args.min_replicas,
        max_replicas=args.max_replicas,
        multiple_of=args.multiple_of,
        divides=args.divides,
        join_timeout_s=args.join_timeout_ms / 1000,
        heartbeat_timeout_s=args.heartbeat_timeout_ms / 1000,
        heartbeat_s=args.heartbeat_ms / 1000,
        quorum_tick_s=args.quorum_tick_ms / 1000,
        reset_grace_s=min(0.1, args.heartbeat_timeout_ms / 1000),
        grace_s=min(0.002, args.heartbeat_timeout_ms / 1000),
        stall_s=args.stall_ms / 1000,
        start_grace_s=args.start_grace_ms / 1000,
    )
    server = ServerOptions(
        host=host, port=port, token=token, advertise=args.advertise, certificate=args.certificate, key=args.key,
        client_ca=args.client_ca,
    )  # fmt: skip
    etcd = EtcdOptions(parse_endpoints(args.etcd), args.job, args.lease_s, args.ca) if args.etcd else None
    doors, page = [], http_protocol(args.allow_host)
    if args.grpc_bind:
        from allranks.lighthouse.grpc_server import grpc_door

        args.grpc_address = ""
        same = args.grpc_bind == args.bind and port
        where = ("", 0) if same else _bind(args.grpc_bind)
        doors.append(grpc_door(*where, lambda address: setattr(args, "grpc_address", address)))
    return Lighthouse(options, server, etcd=etcd, http=page, doors=doors)


def _bind(text: str) -> tuple[str, int]:
    from allranks.channel.addresses import split_address

    try:
        return split_address(text)
    except ValueError as error:
        raise InputError(f"--bind: {error}") from error


def _server_token(args: argparse.Namespace) -> tuple[str, Path | None, bool]:
    """(token, its file or None when it still has to be written, whether it was made just now)."""
    import secrets

    if args.no_token:
        return "", None, False
    path = args.token_file or os.environ.get("ALLRANKS_TOKEN_FILE")
    if args.token_file is None and (token := os.environ.get("ALLRANKS_TOKEN")):
        return token, None, False
    if path:
        return read_token(Path(path)), Path(path), False
    left = _left_token(default_token_file(args.bind))
    return left or secrets.token_urlsafe(24), None, not left


def _left_token(path: Path) -> str:
    """The token of a lighthouse at this place that was killed: its replicas know no other. "" when there is none."""
    try:
        return read_token(path) if path.lstat().st_uid == os.getuid() else ""
    except (OSError, ConfigurationError):
        return ""


def default_token_file(address: str) -> Path:
    """Where a lighthouse leaves the token that it made, for commands of the same user on the same machine."""
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/allranks-{os.getuid()}"
    return Path(base) / f"lighthouse-{address.rpartition(':')[2]}.token"


def _announce(args: argparse.Namespace, lighthouse: Lighthouse, token: str, token_file: Path | None) -> None:
    if token and token_file is None:
        token_file = default_token_file(lighthouse.address)
        _leave_token(token_file, token)
    scheme = "https" if args.certificate else "http"
    line = {"address": lighthouse.address, "http": f"{scheme}://{lighthouse.address}"}
    if args.grpc_bind:
        line["grpc"] = args.grpc_address
    if token_file is not None:
        line["token_file"] = str(token_file)
    if args.json:
        print(json.dumps(line), flush=True)
    else:
        print(
            f"lighthouse at {lighthouse.address}" + (f", token in {token_file}" if token_file else ""),
            flush=True,
        )


def _leave_token(path: Path, token: str) -> None:
    """For commands of this user; not in a folder that somebody else laid at this well-known place."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid != os.getuid():
            raise InputError(f"{path.parent} belongs to somebody else", hint="Give --token-file.")
        write_token(path, token)
    except OSError as error:
        raise InputError(
            f"cannot leave the job token in {path}: {error.strerror or error}",
            hint="Give --token-file or $ALLRANKS_TOKEN, or set $XDG_RUNTIME_DIR to a folder that can be written.",
        ) from error


# ---- actions on a running one -----------------------------------------------------------------------------


def _act(args: argparse.Namespace) -> int:
    from allranks.lighthouse.client.client import Client, ClientOptions

    options = ClientOptions(
        addresses=(args.address,), token=_client_token(args), role="observer", replica="", ca=args.ca,
        certificate=args.certificate, key=args.key,
    )  # fmt: skip
    client = Client(options).start(timeout_s=5.0)
    try:
        if args.action == "status":
            return _show_status(client.status(), args.json)
        _check_names(args, client.status())
        if args.action == "collect":
            incident = client.collect(args.reason or "asked for on the command line", args.replica)
            print(
                json.dumps({"incident": incident})
                if args.json
                else f"evidence asked for: incident {incident}"
            )
            return 0
        name = args.replica[0]
        if args.action == "evict":
            known = [row["replica"] for row in client.status()["replicas"] if row["state"] != "observer"]
            if name not in known:
                raise InputError(
                    f"there is no replica {name!r}", hint=f"There are: {', '.join(known) or 'none'}"
                )
            client.evict(name, args.reason or "asked for on the command line")
        else:
            client.let_in(name)
        done = "evicted" if args.action == "evict" else "may come in again"
        print(json.dumps({"replica": name, "done": args.action}) if args.json else f"{name} {done}")
        return 0
    finally:
        client.close()


def _find_lighthouse(args: argparse.Namespace) -> None:
    """Address and token of a job that runs on this node, where a name (or nothing) is given instead of an address."""
    host, colon, port = str(args.address or "").rpartition(":")
    if colon and host and port.isdigit():
        return
    from allranks.incidents.job_overview import TOKEN_FILE, find_job, read_job, read_job_token

    folder = find_job(args.address)
    address = str(read_job(folder).get("lighthouse") or "")
    if not address:
        raise InputError(f"job {folder.name} has no lighthouse", hint="Give its address: HOST:PORT.")
    args.address = address.split(",")[0]
    if not args.token_file and read_job_token(folder):
        args.token_file = str(folder / TOKEN_FILE)


def _check_names(args: argparse.Namespace, status: dict[str, Any]) -> None:
    """A replica that nobody knows is a mistake, and not evicted, let in or asked."""
    rows = [row["replica"] for row in status["replicas"] if row["state"] != "observer"]
    known = sorted({*rows, *status["lost"], *status["evicted"]})
    if args.action in ("evict", "let-in") and len(args.replica) != 1:
        raise InputError(f"{args.action} needs one replica", hint=f"Known: {', '.join(known) or 'none'}.")
    for name in args.replica:
        if name not in known:
            raise InputError(f"no replica {name!r} is known", hint=f"Known: {', '.join(known) or 'none'}.")


def _client_token(args: argparse.Namespace) -> str:
    if args.token_file:
        return read_token(Path(args.token_file))
    if os.environ.get("ALLRANKS_TOKEN") or os.environ.get("ALLRANKS_TOKEN_FILE"):
        return ""  # the client reads them
    path = default_token_file(args.address)
    return read_token(path) if path.exists() else ""


def _show_status(status: dict[str, Any], as_json: bool) -> int:
    """Exit 0 when all members are there, 1 when one is lost or nothing trains although somebody asks."""
    fault = bool(status["lost"]) or bool(status["waiting"] and not status["quorum"])
    if as_json:
        print(json.dumps(status))
        return int(fault)
    names = [member["replica"] for member in (status["quorum"] or {"members": []})["members"]]
    print(
        f"quorum {status['number']} (epoch {status['epoch']}), {len(names)} members: {printable(status['reason'])}"
    )
    if status["waiting"]:
        print(f"waiting: {printable(status['waiting'])}")
    for row in status["replicas"]:
        if row["state"] == "observer":  # agents, and this very command
            continue
        step = f"step {row['step']}" if row["step"] >= 0 else ""
        print(
            f"  {row['replica']:<24} {row['state']:<10} {row['node']:<20} {step:<12} heard {row['heard_s']:.1f} s ago"
        )
    return int(fault)
