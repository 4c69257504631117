"""Turns an exception of a store into the sentence and the hint people search for. Pure but for a look at folders.

A command in a hint ends its line after ": ", and works as it stands: tests run it in the situation it is for.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from allranks.errors import AllranksError

#: Options of a store that may be shown. Keys and tokens may not.
_SHOWN = ("endpoint", "region")
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def reason_of(error: BaseException) -> str:
    """The short reason: an OSError's own words without number and path."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or os.strerror(error.errno)
    if isinstance(error, AllranksError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def store_arguments(url: str, options: Mapping[str, str] | None = None) -> str:
    """A store as an argument of `allranks checkpoint`, with the options that it needs and that are no secrets."""
    given = options or {}
    shown = [f"--option {shlex.quote(f'{key}={given[key]}')}" for key in _SHOWN if given.get(key)]
    return " ".join([quoted(url), *shown])


def quoted(text: object) -> str:
    """For a shell, always in quotes."""
    return "'" + str(text).replace("'", "'\"'\"'") + "'"


def hint_for(error: BaseException, tier: str, url: str, options: Mapping[str, str] | None = None) -> str:
    """The command or setting that helps when the store at `url` failed."""
    if isinstance(error, AllranksError) and error.hint:
        return error.hint
    number = error.errno if isinstance(error, OSError) else None
    store = store_arguments(url, options)
    if tier == "S3":
        return _object_store_hint(str(error), number, store, options or {})
    if tier == "PEER":
        return "is `allranks run` alive on the other nodes, and ALLRANKS_TOKEN the same on all of them?"
    there = quoted(_existing(url))
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return f"how full it is: df -h {there}\nremove older ones: allranks checkpoint prune {store} --keep 1"
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return (
            f"it must be readable and writable for user {os.geteuid()}: ls -ld {there}\n"
            f'is it mounted read-only? look for ro: grep " $(df --output=target {there} | tail -1) " /proc/mounts'
        )
    if number == errno.ENOENT:
        return (
            f"is a disk not mounted? What is there: ls -ld {there}\ncreate the folder: mkdir -p {quoted(url)}"
        )
    if number in {errno.ENOTDIR, errno.ELOOP, errno.EEXIST}:
        return f"it must be a folder, or a link to one: ls -ld {there}"
    return f"is the disk in order? Space: df -h {there}\nerrors of the kernel: dmesg | tail"


def _object_store_hint(text: str, number: int | None, store: str, options: Mapping[str, str]) -> str:
    keys = f"\n(with the job's keys in {_KEYS})" if "access_key_id" in options else ""
    if "NoCredentials" in text:
        return f"set {_KEYS}, or give the machine a role; then try: allranks checkpoint ls {store}"
    if "TimeTooSkewed" in text or "request time" in text.lower():
        return f"the clock of this machine is wrong: date -u; set it (chronyd, ntpd), then try: allranks checkpoint ls {store}{keys}"
    if number == errno.EACCES:
        return (
            "the key must be right, and may s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket "
            f"(the IAM policy is in docs/checkpoint.md); try it: allranks checkpoint ls {store}{keys}"
        )
    if number == errno.ENOENT:
        return f"does the bucket exist? Try it: allranks checkpoint ls {store}{keys}"
    return f"is the store reachable? Try it: allranks checkpoint ls {store}{keys}"


def _existing(path: str) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    here = Path(path.removeprefix("file://")).absolute()
    while not os.path.lexists(here) and here != here.parent:
        here = here.parent
    return here
