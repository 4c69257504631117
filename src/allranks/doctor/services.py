"""Checks of what the job connects to: ports, etcd, lighthouse, object store, clocks."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import time
import urllib.parse
from typing import Any

from allranks.channel import web_client
from allranks.doctor import Check, DoctorOptions
from allranks.errors import EtcdError
from allranks.etcd import Etcd, parse_endpoints

CLOCK_LIMIT_S = 2.0
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
            hint = f"ss -ltnp 'sport = :{port}' shows who holds it; end it or choose another port"
            return Check(name, "problem", f"cannot be used: {error.strerror}", hint)
    return Check(name, "ok", "free")


def check_etcd(options: DoctorOptions) -> list[Check]:
    """etcd answers, is one cluster with a leader, and holds no closed rendezvous of an old run."""
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
    """A rendezvous of a job that runs is written every second; one that nobody writes is of a run that is over."""
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
        f"stale: nobody has written {', '.join(names[:5])}{' …' if len(names) > 5 else ''} for {STALE_S:g} s; "
        "a new job with the same --rdzv-id may join what is over"
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
    """HOST:PORT of the first lighthouse that was given; "" for none."""
    address = options.lighthouse or os.environ.get("ALLRANKS_LIGHTHOUSE", "")
    return address.split(",")[0].removeprefix("http://")


def check_object_store(options: DoctorOptions) -> list[Check]:
    """Put, read, list and delete one small object, and name the permission that is missing."""
    if not options.s3:
        return [Check("object store", "skipped", "none given (--s3 BUCKET)")]
    try:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError:
        return [Check("object store", "problem", "the client is not installed", "pip install 'allranks[s3]'")]
    bucket, _, prefix = options.s3.removeprefix("s3://").partition("/")
    if not bucket:
        return [Check("object store", "problem", f"{options.s3!r} names no bucket", "--s3 BUCKET/PREFIX")]
    limit = f"{options.timeout_s:g}s"
    extra: dict[str, Any] = {"client_options": {"timeout": limit, "connect_timeout": limit}}
    if options.s3_endpoint:
        extra["client_options"]["allow_http"] = True
        extra |= {"endpoint": options.s3_endpoint, "virtual_hosted_style_request": False}
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
        except (BaseError, OSError, ValueError) as error:
            return [_store_problem(error, permission, f"{bucket}/{prefix}" if prefix else bucket, options)]
    return [Check(f"object store {options.s3}", "ok", "can put, get, list and delete")]


#: what an object store's error says -> the hint; {bucket}, {endpoint}
_STORE_HINTS = (
    (r"InvalidAccessKeyId", "The access key is not known there: check AWS_ACCESS_KEY_ID, and that it belongs to {endpoint}"),
    (r"SignatureDoesNotMatch", "The secret key is wrong: check AWS_SECRET_ACCESS_KEY (and the region)"),
    (r"ExpiredToken", "The credentials have expired: log in again, or use a role that renews them"),
    (r"169\.254\.169\.254|no credentials", "No credentials were found: export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the node a role"),
    (r"NoSuchBucket|404 Not Found", "There is no bucket {bucket} at {endpoint}: create it, or check its name, region and endpoint"),
    (r"PermanentRedirect|AuthorizationHeaderMalformed|301 Moved", "The bucket is in another region: export AWS_REGION to it"),
    (r"403 Forbidden", "Allow {permission} on arn:aws:s3:::{path} to these credentials (IAM policy or bucket policy)"),
    (r"error sending request|dns|connect|timed out", "{endpoint} does not answer: check --s3-endpoint, DNS, proxies and firewalls"),
)  # fmt: skip


def _store_problem(error: BaseException, permission: str, place: str, options: DoctorOptions) -> Check:
    """What the error itself says, else the permission that is missing."""
    text = " ".join(str(error).split()).split(" Debug source:")[0]
    bucket = place.partition("/")[0]
    path = bucket if permission == "s3:ListBucket" else f"{place}*" if "/" in place else f"{place}/*"
    endpoint = options.s3_endpoint or "the store"
    found = next((hint for pattern, hint in _STORE_HINTS if re.search(pattern, text, re.I)), "{text}")
    hint = found.format(
        bucket=bucket, endpoint=endpoint, permission=permission, path=path, text="Check the store"
    )
    code = re.search(r"<Code>(\w+)</Code>", text)
    status = re.search(r"status code: (\d+ [A-Za-z ]+)", text)
    said = status[1].strip() + (f" ({code[1]})" if code else "") if status else text[:300]
    return Check(f"object store {options.s3}", "problem", f"{permission} failed: {said}", hint)


def check_clock(options: DoctorOptions) -> list[Check]:
    """This node's clock: kept by NTP, and against the lighthouse's (timelines of incidents compare clocks of nodes)."""
    found = []
    if _unsynchronised():
        text = "the kernel says that nothing keeps this node's clock right"
        found.append(Check("clock", "warning", text, "Start chrony or systemd-timesyncd on this node"))
    if not _lighthouse(options):
        text = "kept by NTP (give --lighthouse to compare it with the others)"
        return found or [Check("clock", "ok", text)]
    offset = clock_offset_s(options)
    if offset is None:
        return [*found, Check("clock", "skipped", "the lighthouse did not tell its time")]
    if abs(offset) > CLOCK_LIMIT_S:
        text = f"{offset:+.1f} s against the lighthouse"
        return [*found, Check("clock", "problem", text, "Start chrony or ntpd on this node")]
    return [*found, Check("clock", "ok", f"within {CLOCK_LIMIT_S:g} s of the lighthouse")]


def clock_offset_s(options: DoctorOptions) -> float | None:
    """Seconds by which this node is ahead of the lighthouse (its answers tell whole seconds); None without an answer."""
    first = _lighthouse(options)
    if not first:
        return None
    try:
        said = web_client.get(first, "/healthz", options.timeout_s).time_s()
    except (OSError, ValueError):
        return None
    return None if said is None else time.time() - said


def _unsynchronised() -> bool:
    """adjtimex(2) without changing anything; it answers 5 when the clock is not synchronised."""
    try:
        return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) == 5)
    except (OSError, AttributeError):
        return False
