"""Who connects to a store is not looked up in DNS: a lost answer would stop a group that is being made."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

#: the resolver of the main thread leads to a socket that counts what it is asked and never answers
COUNTED = """
    import ctypes, os, socket, struct, sys, threading
    import torch.distributed as dist
    from allranks.manager.groups import hosted_store

    asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asked.bind(("127.0.0.1", 0))
    asked.setblocking(False)

    def ask_it():
        libc, state = ctypes.CDLL(None), hosted_store._STATE
        libc.__res_state.restype = ctypes.c_void_p
        libc.__res_init()
        found = (ctypes.c_char * state.size).from_address(libc.__res_state())
        at = socket.AF_INET, socket.htons(asked.getsockname()[1]), socket.inet_aton("127.0.0.1")
        state.pack_into(found, 0, 1, 1, state.unpack_from(found)[2], 1, *at)

    if sys.argv[1] == "ours":
        store = hosted_store.host_store("127.0.0.1")
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ask_it()
    client = dist.TCPStore("127.45.6.7", store.port, is_master=False)
    client.set("who", "us")
    try:
        asked.recv(512)
        print(store.get("who").decode(), "was asked", flush=True)
    except BlockingIOError:
        print(store.get("who").decode(), "was not asked", flush=True)
    os._exit(0)  # torch's threads may still wait for the answer of a name server
    """


def run(tmp_path: Path, whose: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(COUNTED))
    done = subprocess.run(
        [sys.executable, str(script), whose], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "" or whose == "torch's"
    return done.stdout.strip()


def test_no_name_is_looked_up_after_a_store_was_hosted(tmp_path: Path) -> None:
    """Where torch alone asks for every address; with other sources of names it may ask nobody."""
    if run(tmp_path, "torch's") != "us was asked":
        pytest.skip("names of addresses are not asked from DNS on this machine")
    assert run(tmp_path, "ours") == "us was not asked"


def test_without_glibc_the_store_is_made_as_torch_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from allranks.manager.groups import hosted_store

    def missing() -> None:
        raise AttributeError("__res_state")

    monkeypatch.setattr(hosted_store, "_forget_servers", missing)
    store = hosted_store.host_store("127.0.0.1")
    store.set("who", "us")
    assert store.get("who") == b"us"
