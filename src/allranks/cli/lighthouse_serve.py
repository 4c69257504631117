"""`allranks lighthouse serve`: a lighthouse in this process, until a signal."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from allranks.channel.frames import split_address
from allranks.channel.keys import read_token, write_token
from allranks.cli.lighthouse import LighthouseFlags, default_token_file
from allranks.cli.parser import read_flags
from allranks.errors import ConfigurationError, InputError
from allranks.etcd import parse_endpoints
from allranks.lighthouse.connection import calm_collector, raise_open_files
from allranks.lighthouse.election import EtcdOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse, explain_listen, new_event_loop

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
        # present replicas will reconnect to the next lighthouse here with the same token
        known = lighthouse.service.state.replicas.values() if lighthouse.service else ()
        alone = all(replica.observer for replica in known)
        if token_file is None and lighthouse.address and alone:
            with suppress(OSError):
                default_token_file(lighthouse.address).unlink(missing_ok=True)
    return 130 if caught == signal.SIGINT else 0


def _serve_until_signal(lighthouse: Lighthouse, announce: Callable[[], None]) -> int:
    """Serves until a signal, and returns it."""
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
    """The lighthouse with these options; `on_grpc` gets the address of its gRPC port."""
    host, port = _split(options.bind)
    timeout_s = Options.heartbeat_timeout_s if args.heartbeat_timeout_s is None else args.heartbeat_timeout_s
    grace = {name: min(getattr(Options, name), timeout_s) for name in ("grace_s", "reset_grace_s")}
    server = read_flags(ServerOptions, args, host=host, port=port, token=token, job="")
    endpoints = parse_endpoints(options.etcd) if options.etcd else ()
    etcd = EtcdOptions(endpoints, options.job, options.lease_s, options.ca) if endpoints else None
    protocols = []
    if options.grpc_bind:
        from allranks.lighthouse.grpc_server import torchft_protocol

        same = options.grpc_bind == options.bind and port
        where = ("", 0) if same else _split(options.grpc_bind)
        protocols.append(torchft_protocol(*where, on_grpc, options.grpc_open))
    return Lighthouse(
        read_flags(Options, args, **grace),
        server,
        allow_hosts=options.allow_host,
        protocols=protocols,
        etcd=etcd,
    )


def _split(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError as error:
        raise InputError(f"--bind: {error}") from error


def server_token(options: LighthouseFlags) -> tuple[str, Path | None, bool]:
    """(token, its file or None if it is not written yet, whether it was generated now)."""
    if options.no_token:
        return "", None, False
    if not options.token_file and (token := os.environ.get("ALLRANKS_TOKEN")):
        return token, None, False
    if path := options.token_file or os.environ.get("ALLRANKS_TOKEN_FILE"):
        return read_token(Path(path)), Path(path), False
    try:  # of a killed lighthouse at this address: its replicas still use it
        return read_token(default_token_file(options.bind), own=True), None, False
    except ConfigurationError:
        return secrets.token_urlsafe(24), None, True


def _announce(
    options: LighthouseFlags, lighthouse: Lighthouse, token: str, token_file: Path | None, grpc: str
) -> None:
    if not token:  # a killed lighthouse at this port may have left a token, which commands would use
        with suppress(OSError):
            default_token_file(lighthouse.address).unlink()
    if token and token_file is None:
        token_file = default_token_file(lighthouse.address)
        try:
            _write_token(token_file, token)
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


def _write_token(path: Path, token: str) -> None:
    """Writes the token for commands of this user, unless the folder belongs to another user."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own, link_by = path.parent.stat().st_uid == os.getuid(), path.parent.lstat().st_uid
        if not own or link_by not in (0, os.getuid()):
            raise InputError(f"{path.parent} belongs to another user", hint="Give --token-file.")
        write_token(path, token)
    except OSError as error:
        raise InputError(
            f"cannot write the job token to {path}: {error.strerror or error}",
            hint="Give --token-file or $ALLRANKS_TOKEN, or set $XDG_RUNTIME_DIR to a folder that can be written.",
        ) from error
