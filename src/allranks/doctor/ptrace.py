"""Tests whether stacks of other processes can be read, as py-spy does: one child reads another.

Under Yama a process may read only its descendants, and the reader that the agent starts is a sibling of the ranks. As a program,
`ptrace.py PID ADDRESS` reads one byte of a process and exits 0 on success.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

LIMIT_S = 20.0


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def may_read_siblings() -> bool | None:
    """The result of the test; None when it could not run."""
    text = "import ctypes, sys; b = ctypes.create_string_buffer(b'x'); print(ctypes.addressof(b), flush=True); sys.stdin.read()"
    command = [sys.executable, "-I", "-S", "-c", text]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sibling:
            assert sibling.stdin is not None and sibling.stdout is not None
            try:
                address = sibling.stdout.readline().strip()
                reader = [sys.executable, "-I", "-S", __file__, str(sibling.pid), address]
                done = subprocess.run(reader, timeout=LIMIT_S, capture_output=True, check=False)
                return done.returncode == 0
            finally:
                sibling.stdin.close()
                sibling.kill()
    except (OSError, subprocess.TimeoutExpired):
        return None


def read_byte(pid: int, address: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.create_string_buffer(1)
    here, there = _Span(ctypes.addressof(byte), 1), _Span(address, 1)
    got: int = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return got == 1 and byte.raw == b"x"


if __name__ == "__main__":
    sys.exit(0 if read_byte(int(sys.argv[1]), int(sys.argv[2])) else 1)
