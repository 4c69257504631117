"""Checks of what the job connects to: ports, etcd, lighthouse, object store, clocks."""

from __future__ import annotations

import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from email.utils import parsedate_to_datetime
from typing import Any

from allranks.doctor.checks import Check, DoctorOptions
from allranks.errors import EtcdError
from allranks.etcd import Etcd, parse_endpoints

CLOCK_LIMIT_S = 2.0


def check_ports(options: DoctorOptions) -> list[Check]:
    """The ports that this node must listen on are free."""
    ports = list(options.ports)
    if os.environ.get("MASTER_PORT", "").isdigit() and os.environ.get("RANK", "0") == "0":
        ports.append(int(os.environ["MASTER_PORT"]))
    found = []
    for port in dict.fromkeys(ports):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                found.append(Check(f"port {port}", "ok", "free"))
            except OSError as error:
                found.append(
                    Check(
                        f"port {port}",
                        "problem",
                        f"cannot be used: {error.strerror}",
                        f"ss -ltnp 'sport = :{port}' shows who holds it; end it or choose another port",
                    )
                )
    return found or [Check("ports", "skipped", "none given (--port N)")]


def check_etcd(options: DoctorOptions) -> list[Check]:
    """etcd answers, is one cluster with a leader, and holds no closed rendezvous of an old run."""
    if not options.etcd:
        return [Check("etcd", "skipped", "none given (--etcd HOST:PORT)")]
    found = []
    for endpoint in parse_endpoints(options.etcd):
        etcd = Etcd((endpoint,), options.timeout_s)
        try:
            begin = time.monotonic()
            status = etcd.status()
            took = (time.monotonic() - begin) * 1e3
        except EtcdError as error:
            found.append(
                Check(
                    f"etcd {endpoint}",
                    "problem",
                    f"does not answer: {error}",
                    "allranks etcd start, or check the address and firewalls",
                )
            )
            continue
        if status.get("leader", "0") in ("0", ""):
            found.append(
                Check(
                    f"etcd {endpoint}",
                    "problem",
                    "the cluster has no leader",
                    "More than half of its members must be up",
                )
            )
            continue
        found.append(Check(f"etcd {endpoint}", "ok", f"version {status.get('version')}, {took:.0f} ms"))
        found += _stale_keys(etcd)
        etcd.close()
        break
    return found


def _stale_keys(etcd: Etcd) -> list[Check]:
    keys = list(etcd.get_prefix("/allranks/rdzv/"))
    if not keys:
        return []
    names = ", ".join(key.rsplit("/", 1)[1] for key in keys[:5])
    return [
        Check(
            "rendezvous keys",
            "warning",
            f"{len(keys)} rendezvous of earlier runs are kept in etcd: {names}",
            "Use a new --rdzv-id; they expire by themselves within a day, or: etcdctl del --prefix /allranks/rdzv/ID",
        )
    ]


def check_lighthouse(options: DoctorOptions) -> list[Check]:
    """The lighthouse answers on its port."""
    address = options.lighthouse or os.environ.get("ALLRANKS_LIGHTHOUSE", "")
    if not address:
        return [Check("lighthouse", "skipped", "none given (--lighthouse HOST:PORT)")]
    first = address.split(",")[0].removeprefix("http://")
    try:
        with urllib.request.urlopen(f"http://{first}/healthz", timeout=options.timeout_s) as answer:
            return [Check("lighthouse", "ok", f"{first} answers {answer.status}")]
    except (OSError, ValueError) as error:
        return [
            Check(
                "lighthouse",
                "problem",
                f"{first} does not answer: {error}",
                f"allranks lighthouse --bind {first}",
            )
        ]


def check_object_store(options: DoctorOptions) -> list[Check]:
    """Put, read, list and delete one small object, and name the permission that is missing."""
    if not options.s3:
        return [Check("object store", "skipped", "none given (--s3 BUCKET)")]
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError:
        return [Check("object store", "problem", "the client is not installed", "pip install 'allranks[s3]'")]
    bucket, _, prefix = options.s3.removeprefix("s3://").partition("/")
    extra: dict[str, Any] = {}
    if options.s3_endpoint:
        extra = {
            "endpoint": options.s3_endpoint,
            "client_options": {"allow_http": True},
            "virtual_hosted_style_request": False,
        }
    store = S3Store(bucket, retry_config={"max_retries": 1}, **extra)
    key = f"{prefix.rstrip('/')}/.allranks-doctor-{os.getpid()}".lstrip("/")
    steps = (
        ("s3:PutObject", lambda: obstore.put(store, key, b"allranks")),
        ("s3:GetObject", lambda: obstore.get(store, key).bytes()),
        ("s3:ListBucket", lambda: list(obstore.list(store, prefix or None, chunk_size=1).__next__())),
        ("s3:DeleteObject", lambda: obstore.delete(store, key)),
    )
    for permission, action in steps:
        try:
            action()
        except StopIteration:
            continue
        except Exception as error:
            text = str(error).splitlines()[0][:300]
            return [
                Check(
                    f"object store {options.s3}",
                    "problem",
                    f"{permission} failed: {text}",
                    f"Allow {permission} on arn:aws:s3:::{bucket}"
                    + ("" if permission == "s3:ListBucket" else f"/{prefix}*")
                    + ", or check credentials, region and endpoint",
                )
            ]
    return [Check(f"object store {options.s3}", "ok", "can put, get, list and delete")]


def check_clock(options: DoctorOptions) -> list[Check]:
    """This node's clock against the lighthouse's: timelines of incidents compare clocks of nodes."""
    address = options.lighthouse or os.environ.get("ALLRANKS_LIGHTHOUSE", "")
    if not address:
        return [Check("clock", "skipped", "needs a lighthouse to compare with")]
    first = address.split(",")[0].removeprefix("http://")
    try:
        with urllib.request.urlopen(f"http://{first}/healthz", timeout=options.timeout_s) as answer:
            date = answer.headers.get("Date")
    except (OSError, ValueError):
        return [Check("clock", "skipped", "the lighthouse does not answer")]
    if not date:
        return [Check("clock", "skipped", "the lighthouse did not tell its time")]
    offset = time.time() - parsedate_to_datetime(date).timestamp()
    if abs(offset) > CLOCK_LIMIT_S:
        return [
            Check(
                "clock",
                "warning",
                f"{offset:+.1f} s against the lighthouse",
                "Start chrony or ntpd on this node",
            )
        ]
    return [Check("clock", "ok", f"within {CLOCK_LIMIT_S:g} s of the lighthouse")]
