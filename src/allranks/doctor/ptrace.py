"""Whether stacks of other processes can be read: tried, as py-spy will try it, on a child by another child.

Under Yama a process may read its descendants and nobody else's: what the agent starts to read a rank is the rank's
sibling. Run as a program it reads one byte of a process: ptrace.py PID ADDRESS; exit 0 when it could.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys

LIMIT_S = 20.0


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def may_read_siblings() -> bool | None:
    """True or False; None when it could not be tried."""
    text = "import ctypes, sys; b = ctypes.create_string_buffer(b'x'); print(ctypes.addressof(b), flush=True); sys.stdin.read()"
    command = [sys.executable, "-I", "-S", "-c", text]
    try:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sibling:
            assert sibling.stdin is not None and sibling.stdout is not None
            try:
                address = sibling.stdout.readline().strip()
                reader = [sys.executable, "-I", "-S", __file__, str(sibling.pid), address]
                return (
                    subprocess.run(reader, timeout=LIMIT_S, capture_output=True, check=False).returncode == 0
                )
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
