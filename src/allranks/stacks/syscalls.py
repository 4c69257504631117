"""Names of the system calls a stuck thread may sit in, for both machine types that carry GPUs. Pure."""

from __future__ import annotations

_X86_64 = {
    0: "read", 1: "write", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv", 20: "writev",
    23: "select", 24: "sched_yield", 26: "msync", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept",
    44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 56: "clone", 57: "fork", 58: "vfork",
    61: "wait4", 65: "semop", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 76: "truncate",
    77: "ftruncate", 2: "open", 3: "close", 128: "rt_sigtimedwait", 130: "rt_sigsuspend", 162: "sync",
    202: "futex", 206: "io_setup", 208: "io_getevents", 219: "restart_syscall", 230: "clock_nanosleep",
    232: "epoll_wait", 247: "waitid", 257: "openat", 270: "pselect6", 271: "ppoll", 275: "splice",
    277: "sync_file_range", 281: "epoll_pwait", 285: "fallocate", 288: "accept4", 295: "preadv",
    296: "pwritev", 299: "recvmmsg", 306: "syncfs", 307: "sendmmsg", 326: "copy_file_range",
    426: "io_uring_enter", 435: "clone3", 437: "openat2", 441: "epoll_pwait2", 449: "futex_waitv",
    40: "sendfile", 4: "stat", 5: "fstat", 6: "lstat", 9: "mmap", 11: "munmap", 28: "madvise",
    87: "unlink", 82: "rename", 83: "mkdir", 262: "newfstatat", 263: "unlinkat", 217: "getdents64",
    332: "statx", 231: "exit_group", 60: "exit", 62: "kill", 165: "mount", 166: "umount2",
}  # fmt: skip
_AARCH64 = {
    63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64", 71: "sendfile",
    72: "pselect6", 73: "ppoll", 22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat",
    57: "close", 82: "fsync", 83: "fdatasync", 81: "sync", 84: "sync_file_range", 95: "waitid",
    98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 128: "restart_syscall",
    133: "rt_sigsuspend", 137: "rt_sigtimedwait", 202: "accept", 203: "connect", 206: "sendto",
    207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 220: "clone", 242: "accept4", 243: "recvmmsg",
    260: "wait4", 267: "syncfs", 269: "sendmmsg", 285: "copy_file_range", 426: "io_uring_enter",
    435: "clone3", 437: "openat2", 441: "epoll_pwait2", 61: "getdents64", 79: "newfstatat", 80: "fstat",
    291: "statx", 93: "exit", 94: "exit_group", 129: "kill", 227: "msync", 233: "madvise", 46: "ftruncate",
}  # fmt: skip


def parse_syscall(text: str, machine: str = "x86_64") -> tuple[str, tuple[int, ...]]:
    """(name, arguments) of a line of /proc/PID/syscall; ("running", ()) on a CPU, ("", ()) when unreadable."""
    words = text.split()
    if not words:
        return "", ()
    if words[0] == "running":
        return "running", ()
    try:
        number, values = int(words[0]), tuple(int(word, 16) for word in words[1:7])
    except ValueError:
        return "", ()
    if number < 0:
        return "", ()
    table = _AARCH64 if machine == "aarch64" else _X86_64
    return table.get(number, f"syscall_{number}"), values
