"""File systems that this machine does not have: the kernel answers system calls as they would (seccomp).

For a process of its own, and its children: a filter cannot be taken away again.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

LOCK_EX = 2
RENAME_EXCHANGE = 2
#: What each file system answers: (system call, a bit of its argument that it is about (0: any), argument, error)
FILE_SYSTEMS = {
    "no locks (Lustre without flock)": [("flock", 0, 1, errno.ENOSYS)],
    "no lock server (NFS 3)": [("flock", 0, 1, errno.ENOLCK)],
    "a file server that is gone": [("getdents64", 0, 1, errno.EIO)],
    "a file server that was replaced": [("getdents64", 0, 1, errno.ESTALE)],
    "NFS 4": [("flock", LOCK_EX, 1, errno.EBADF), ("renameat2", RENAME_EXCHANGE, 4, errno.EINVAL)],
}
_NUMBERS = {
    "x86_64": {"flock": 73, "renameat2": 316, "getdents64": 217},
    "aarch64": {"flock": 32, "renameat2": 276, "getdents64": 61},
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06


def answer_as(file_system: str) -> None:
    """From now on every file system answers this process as this one would."""
    program = []
    for call, bit, argument, error in FILE_SYSTEMS[file_system]:
        number = _NUMBERS[platform.machine()][call]
        program.append((_LOAD, 0, 0, 0))
        program.append((_EQUAL, 0, 3 if bit else 1, number))
        if bit:
            program += [(_LOAD, 0, 0, 16 + 8 * argument), (_ANY_BIT, 0, 1, bit)]
        program.append((_RETURN, 0, 0, _ERRNO | error))
    program.append((_RETURN, 0, 0, _ALLOW))
    code = b"".join(struct.pack("HBBI", *one) for one in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _FILTER, head)):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
