"""Addresses (HOST:PORT, with brackets around IPv6), and options of the sockets that are connected to them."""

from __future__ import annotations

import socket


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Sets NODELAY, keepalive and TCP_USER_TIMEOUT on a connected TCP socket; other sockets are left alone."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    whole = max(1, int(timeout_s))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", whole),
        ("TCP_KEEPINTVL", max(1, whole // 3)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(max(timeout_s, 0.5) * 1000)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def split_address(address: str, default_port: int = 29510) -> tuple[str, int]:
    """("host", port) of "host:port", "[::1]:port", "http://host:port" or "host". Raises ValueError."""
    text = address.strip().removeprefix("http://").removeprefix("https://").removeprefix("tcp://").rstrip("/")
    host, colon, port = text.rpartition(":")
    if not colon or (port and not port.isdigit()) or text.endswith("]"):
        host, port = text, str(default_port)
    if not port or not 0 <= int(port) <= 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def join_address(host: str, port: int) -> str:
    """ "host:port" for others: this machine's name instead of "everywhere", brackets around an IPv6 address."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(toward: str) -> str:
    """The address of this host as seen by whoever is at HOST:PORT; nothing is sent."""
    host, port = split_address(toward)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
