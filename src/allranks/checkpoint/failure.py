"""Turns an exception of a save into the sentence and the hint people search for. Pure, torch-free."""

from __future__ import annotations

import errno
import os

from allranks.errors import AllranksError


def reason_of(error: BaseException) -> str:
    """The short reason: an OSError's own words without number and path."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or os.strerror(error.errno)
    if isinstance(error, AllranksError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def hint_for(error: BaseException, tier: str, path: str) -> str:
    """The command or setting that helps."""
    if isinstance(error, AllranksError) and error.hint:
        return error.hint
    number = error.errno if isinstance(error, OSError) else None
    if tier == "S3":
        return _object_store_hint(str(error), number, path)
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return f"free space: df -h '{path}' && allranks checkpoint prune '{path}' --keep 1"
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return f"the folder must be writable: ls -ld '{path}' && mount | grep \"$(df --output=target '{path}' | tail -1)\""
    if number == errno.ENOENT:
        return f"create it: mkdir -p '{path}'"
    if tier == "PEER":
        return "is the peer's agent alive and the token the same on both nodes?"
    return f"look at the disk: df -h '{path}'; dmesg | tail"


def _object_store_hint(text: str, number: int | None, path: str) -> str:
    if "NoCredentials" in text:
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine a role"
    if number == errno.EACCES:
        return f"the key needs s3:GetObject, PutObject, DeleteObject and ListBucket: aws s3 ls '{path}'"
    if number == errno.ENOENT:
        return f"does the bucket exist? aws s3 ls '{path}'"
    return f"is the store reachable? allranks checkpoint ls '{path}'"
