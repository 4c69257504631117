"""Which addresses accept no connection. Standard library only: the liveness proxy uses it too."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterable

from allranks.channel.frames import split_address


def find_unreachable(addresses: Iterable[str], limit_s: float) -> set[str]:
    """Those of these HOST:PORT that accept no connection within the limit, all tried at once.

    The kernel of the other side accepts: a process that computes, or is stopped for a moment, is reachable.
    """
    failed, deadline = set(), time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for address in dict.fromkeys(addresses):
            try:
                host, port = split_address(address)
                family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                sock = socket.socket(family, socket.SOCK_STREAM)
            except (OSError, ValueError):
                failed.add(address)
                continue
            sock.setblocking(False)
            if sock.connect_ex(target) in (0, errno.EINPROGRESS):
                selector.register(sock, selectors.EVENT_WRITE, address)
            else:
                failed.add(address)
                sock.close()
        while selector.get_map():
            left = deadline - time.monotonic()
            ready = selector.select(max(0.0, left))
            for key, _ in ready:
                _settle(selector, key, failed)
            if not ready and left <= 0:
                break
        for key in list(selector.get_map().values()):
            failed.add(str(key.data))
            _close(selector, key)
    return failed


def _settle(selector: selectors.BaseSelector, key: selectors.SelectorKey, failed: set[str]) -> None:
    sock = key.fileobj
    assert isinstance(sock, socket.socket)
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        failed.add(str(key.data))
    _close(selector, key)


def _close(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    selector.unregister(key.fileobj)
    sock = key.fileobj
    assert isinstance(sock, socket.socket)
    sock.close()
