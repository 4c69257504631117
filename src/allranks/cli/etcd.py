"""`allranks etcd start|status|stop`: runs an etcd for rendezvous and for a standby lighthouse, without containers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from allranks.cli.parser import read_flags
from allranks.cli.terminal import answer
from allranks.model.options import argument, option


@dataclass(frozen=True)
class EtcdFlags:
    action: str = argument("", "what to do", choices=("start", "status", "stop"), required=True)
    folder: Path | None = option(None, "where data, log and pid are kept (default: per user)", metavar="DIR")
    bind: str = option("127.0.0.1", "address to listen on", metavar="HOST")
    port: int = option(2379, "client port; 0: any free one")
    json: bool = option(False, "print one JSON object")


FLAGS = (EtcdFlags,)


def main(args: argparse.Namespace) -> int:
    """0 running (or stopped as requested), 1 not running, 2 could not run."""
    from allranks.launch import etcd_server

    flags = read_flags(EtcdFlags, args)
    folder = flags.folder or etcd_server.default_folder()
    if flags.action == "stop":
        stopped = etcd_server.stop(folder)
        text = "etcd stopped" if stopped else f"no etcd was running in {folder}"
        answer(flags.json, {"stopped": stopped}, text)
        return 0
    server = etcd_server.read(folder) if flags.action == "status" else None
    if flags.action == "start":
        server = etcd_server.start(folder, bind=flags.bind, port=flags.port)
    if server is None or not server.running():
        answer(flags.json, {"running": False}, "etcd is not running; start it with: allranks etcd start")
        return 1
    facts: dict[str, object] = {"running": True, "pid": server.pid, "client": server.client}
    facts |= {"folder": server.folder, **_health(server.client)}
    state = "healthy" if facts["healthy"] else f"not answering: {facts.get('error')}"
    endpoint = server.client.removeprefix("http://")
    answer(flags.json, facts, f"etcd {facts.get('version', '')} at {endpoint} (pid {server.pid}) is {state}")
    return 0 if facts["healthy"] else 1


def _health(client: str) -> dict[str, object]:
    from allranks.errors import EtcdError
    from allranks.etcd import Etcd

    gateway = Etcd((client,), timeout_s=3.0)
    try:
        answer = gateway.status()
        return {"healthy": True, "version": answer.get("version", ""), "bytes": int(answer.get("dbSize", 0))}
    except EtcdError as error:
        return {"healthy": False, "error": str(error)}
    finally:
        gateway.close()
