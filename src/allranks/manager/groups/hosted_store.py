"""The store that a rank hosts for making groups, opened so that torch makes no further DNS lookups.

Runs in a rank. For its log torch looks up the name of every address that connects to a store, on both sides, and blocks
the store meanwhile. A lost DNS answer takes 5 s, during which no group can be made. After the first failed lookup torch
(2.9 and later) logs numbers instead, while the process runs. So the first lookup is made to fail: a thread makes it
whose own glibc resolver knows only a server that does not exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading

import torch.distributed as dist

from allranks.manager.groups.native_calls import silenced

_NAMELESS = "127.83.19.7"  # a loopback address without a name
_REACHED_S = 1.0
#: glibc's public `struct __res_state`: seconds to wait, tries, options, and the servers
_STATE = struct.Struct("@iiLiHH4s")


def host_store(host: str) -> dist.TCPStore:
    """A store on a free port, on all addresses of this machine."""
    made: list[dist.TCPStore] = []

    def make() -> None:
        with contextlib.suppress(OSError, AttributeError, RuntimeError), silenced():
            with socket.create_server(
                (_NAMELESS, 0)
            ) as listener:  # test first: the store would retry for minutes
                socket.create_connection(listener.getsockname(), timeout=_REACHED_S).close()
            _forget_servers()
            made.append(dist.TCPStore(_NAMELESS, 0, is_master=True, wait_for_workers=False))

    thread = threading.Thread(target=make, name="allranks-store")
    thread.start()
    thread.join()
    return made[0] if made else dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def _forget_servers() -> None:
    """Points this thread's resolver to a port without a server, so that each lookup fails at once."""
    libc = ctypes.CDLL(None)
    libc.__res_state.restype = ctypes.c_void_p
    libc.__res_init()
    state = (ctypes.c_char * _STATE.size).from_address(libc.__res_state())
    options = _STATE.unpack_from(state)[2]
    no_server = socket.AF_INET, socket.htons(1), socket.inet_aton("127.0.0.1")
    _STATE.pack_into(state, 0, 1, 1, options, 1, *no_server)
