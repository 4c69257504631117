"""Checks of the services of a job: ports, etcd, lighthouse, object store, clocks."""

from __future__ import annotations

import ctypes
import os
import socket
import time
import urllib.parse

from allranks.channel import web_client
from allranks.doctor import CLOCK_LIMIT_S, Check, DoctorOptions
from allranks.errors import AllranksError, EtcdError
from allranks.etcd import Etcd, parse_endpoints

STALE_S = 3.0


def check_ports(options: DoctorOptions) -> list[Check]:
    """The ports that this node must listen on are free."""
    ports = list(options.ports)
    if os.environ.get("MASTER_PORT", "").isdigit() and os.environ.get("RANK", "0") == "0":
        ports.append(int(os.environ["MASTER_PORT"]))
    found = [_check_port(port) for port in dict.fromkeys(ports)]
    return found or [Check("ports", "skipped", "none given (--port N)")]


def _check_port(port: int) -> Check:
    name = f"port {port}"
    if not 0 < port < 65536:
        return Check(name, "problem", "is not a port number", "choose one between 1 and 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            hint = f"ss -ltnp 'sport = :{port}' shows the process; end it or choose another port"
            return Check(name, "problem", f"cannot be used: {error.strerror}", hint)
    return Check(name, "ok", "free")


def check_etcd(options: DoctorOptions) -> list[Check]:
    """etcd answers, has a leader, and holds no stale rendezvous."""
    if not options.etcd:
        return [Check("etcd", "skipped", "none given (--etcd HOST:PORT)")]
    try:
        endpoints = parse_endpoints(options.etcd)
    except (EtcdError, ValueError) as error:
        return [_no_address("etcd", options.etcd, str(error))]
    found = []
    for endpoint in endpoints:
        etcd, name = Etcd((endpoint,), options.timeout_s), f"etcd {endpoint}"
        try:
            begin = time.monotonic()
            status = etcd.status()
            took = (time.monotonic() - begin) * 1e3
        except EtcdError as error:
            hint = "allranks etcd start, or check the address and firewalls"
            found.append(Check(name, "problem", f"does not answer: {error}", hint))
            continue
        if status.get("leader", "0") in ("0", ""):
            hint = "More than half of its members must be up"
            found.append(Check(name, "problem", "the cluster has no leader", hint))
            continue
        found.append(Check(name, "ok", f"version {status.get('version')}, {took:.0f} ms"))
        found += _stale_keys(etcd)
        etcd.close()
        break
    return found


def _no_address(name: str, text: str, why: str) -> Check:
    return Check(name, "problem", f"{text!r} is not an address: {why}", "give HOST:PORT")


def _stale_keys(etcd: Etcd) -> list[Check]:
    """Keys of ended runs. A running job writes its rendezvous every second."""
    prefix = "/allranks/rdzv/"
    before = etcd.get_prefix(prefix)
    if not before:
        return []
    time.sleep(STALE_S)
    now = etcd.get_prefix(prefix)
    old = sorted(key for key in now if key in before and now[key].revision == before[key].revision)
    alive = [key for key in now if key not in old]
    found = [Check("rendezvous keys", "ok", f"{len(alive)} of running jobs")] if alive else []
    if not old:
        return found
    names = [key.removeprefix(prefix) for key in old]
    text = (
        f"stale: no process has written {', '.join(names[:5])}{' …' if len(names) > 5 else ''} for {STALE_S:g} s; "
        "a new job with the same --rdzv-id may join the ended one"
    )
    remove = f"etcdctl del --prefix {prefix}{names[0]} (they expire by themselves within a day)"
    hint = f"Use a new --rdzv-id, or remove it: {remove}"
    return [*found, Check("rendezvous keys", "warning", text, hint)]


def check_lighthouse(options: DoctorOptions) -> list[Check]:
    """The lighthouse answers on its port."""
    first = _lighthouse(options)
    if not first:
        return [Check("lighthouse", "skipped", "none given (--lighthouse HOST:PORT)")]
    try:
        parts = urllib.parse.urlsplit(f"http://{first}")
        if not (parts.hostname and parts.port):
            raise ValueError("host or port is missing")
    except ValueError as error:
        return [_no_address("lighthouse", first, str(error))]
    try:
        answer = web_client.get(first, "/healthz", options.timeout_s)
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        return [Check("lighthouse", "ok", f"{first} answers {answer.status}")]
    except (OSError, ValueError) as error:
        text = f"{first} does not answer: {error}"
        return [Check("lighthouse", "problem", text, f"allranks lighthouse --bind {first}")]


def _lighthouse(options: DoctorOptions) -> str:
    """HOST:PORT of the first given lighthouse; "" for none."""
    address = options.lighthouse or os.environ.get("ALLRANKS_LIGHTHOUSE", "")
    return address.split(",")[0].removeprefix("http://")


def check_object_store(options: DoctorOptions) -> list[Check]:
    """A small object can be put, read, listed and deleted; else names the missing permission."""
    if not options.s3:
        return [Check("object store", "skipped", "none given (--s3 BUCKET)")]
    from allranks.checkpoint.stores import StoreSpec, hint_for, reason_of
    from allranks.checkpoint.stores.object_store import try_access

    place = options.s3.removeprefix("s3://")
    if not place.strip("/"):
        return [Check("object store", "problem", f"{options.s3!r} names no bucket", "--s3 BUCKET/PREFIX")]
    name, url = f"object store {options.s3}", options.s3 if "://" in options.s3 else f"s3://{options.s3}"
    limits = {"timeout_s": f"{options.timeout_s:g}", "max_retries": "1"}
    given = {**({"endpoint": options.s3_endpoint} if options.s3_endpoint else {}), **limits}
    try:
        found = next(try_access(StoreSpec(url, given)), None)
    except AllranksError as error:
        return [Check(name, "problem", str(error), error.hint or "Check the options of the store")]
    if found is None:
        return [Check(name, "ok", "can put, get, list and delete")]
    permission, problem = found
    hint = hint_for(problem, StoreSpec(url, given))
    if isinstance(problem, PermissionError) and hint.startswith("check the keys"):
        bucket = place.partition("/")[0]
        path = bucket if permission == "s3:ListBucket" else f"{place}*" if "/" in place else f"{place}/*"
        hint = f"Allow {permission} on arn:aws:s3:::{path} to these credentials (IAM policy or bucket policy)"
    return [Check(name, "problem", f"{permission} failed: {reason_of(problem)}", hint)]


def check_clock(options: DoctorOptions) -> list[Check]:
    """This node's clock is synchronised, and agrees with the lighthouse's: timelines of incidents need this."""
    found = []
    if _unsynchronised():
        text = "not synchronised, according to the kernel"
        found.append(Check("clock", "warning", text, "Start chrony or systemd-timesyncd on this node"))
    if not _lighthouse(options):
        text = "synchronised by NTP (give --lighthouse to compare it with the lighthouse's)"
        return found or [Check("clock", "ok", text)]
    offset = clock_offset_s(options)
    if offset is None:
        return [*found, Check("clock", "skipped", "the lighthouse did not report its time")]
    if abs(offset) > CLOCK_LIMIT_S:
        text = f"{offset:+.1f} s against the lighthouse"
        return [*found, Check("clock", "problem", text, "Start chrony or ntpd on this node")]
    return [*found, Check("clock", "ok", f"within {CLOCK_LIMIT_S:g} s of the lighthouse")]


def clock_offset_s(options: DoctorOptions) -> float | None:
    """Seconds by which this node is ahead of the lighthouse, to about a second; None without an answer."""
    first = _lighthouse(options)
    if not first:
        return None
    try:
        theirs = web_client.get(first, "/healthz", options.timeout_s).time_s()
    except (OSError, ValueError):
        return None
    return None if theirs is None else time.time() - theirs


def _unsynchronised() -> bool:
    """adjtimex(2) without changes returns 5 when the clock is not synchronised."""
    try:
        return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) == 5)
    except (OSError, AttributeError):
        return False
