"""`allranks etcd start|status|stop`: an etcd for rendezvous and for a standby lighthouse, without containers."""

from __future__ import annotations

import argparse
from pathlib import Path

from allranks.cli.terminal import answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=["start", "status", "stop"], metavar="start|status|stop")
    add("--folder", type=Path, metavar="DIR", help="where data, log and pid are kept (default: per user)")
    add("--bind", default="127.0.0.1", metavar="HOST", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=2379, help="client port; 0: any free one (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    """Runs the command: 0 running (or stopped as asked), 1 not running, 2 could not."""
    from allranks.launch import etcd_server

    folder = args.folder or etcd_server.default_folder()
    if args.action == "stop":
        stopped = etcd_server.stop(folder)
        answer(args.json, {"stopped": stopped}, "etcd stopped" if stopped else "no etcd of ours was running")
        return 0
    server = etcd_server.read(folder) if args.action == "status" else None
    if args.action == "start":
        server = etcd_server.start(folder, bind=args.bind, port=args.port)
    if server is None or not server.running():
        answer(args.json, {"running": False}, "etcd is not running; start it with: allranks etcd start")
        return 1
    facts: dict[str, object] = {"running": True, "pid": server.pid, "client": server.client}
    facts |= {"folder": server.folder, **_health(server.client)}
    state = "healthy" if facts["healthy"] else f"not answering: {facts.get('error')}"
    endpoint = server.client.removeprefix("http://")
    answer(args.json, facts, f"etcd {facts.get('version', '')} at {endpoint} (pid {server.pid}) is {state}")
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
