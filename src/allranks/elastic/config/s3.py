"""Asks an object store whether a job may use it, and names the permission that is missing."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from allranks.checkpoint.stores.object_store import ObjectBlobs
from allranks.checkpoint.stores.store import StoreSpec, reason_of
from allranks.elastic.config.yaml_tree import ValidationResult, result_of
from allranks.errors import MissingExtra

_CREDENTIALS = "Configure credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or attach an IAM role"


def validate_s3_access(
    bucket: str, region: str | None = None, *, endpoint: str | None = None
) -> ValidationResult:
    """Lists, writes, reads and deletes one small object; an error names the IAM action that was refused.

    `endpoint` is the URL of an S3-compatible server (environment: AWS_ENDPOINT_URL). What cannot be found out for
    want of a library, credentials or network is a warning.
    """
    given = {"region": region or "", "endpoint": endpoint or "", "timeout_s": "15", "max_retries": "1"}
    url = bucket if "://" in bucket else f"s3://{bucket}"
    try:
        blobs = ObjectBlobs(StoreSpec(url, {key: value for key, value in given.items() if value}))
    except MissingExtra as error:
        return result_of([], [f"cannot check S3 bucket '{bucket}': {error}"])
    name, data = f"allranks-access-{uuid.uuid4().hex[:12]}", b"allranks"
    steps: dict[str, Callable[[], object]] = {
        "s3:ListBucket": lambda: blobs.keys(name),
        "s3:PutObject": lambda: blobs.put(name, [memoryview(data)], len(data)),
        "s3:GetObject": lambda: blobs.get(name),
        "s3:DeleteObject": lambda: blobs.delete([name]),
    }
    errors: list[str] = []
    for action, call in steps.items():
        try:
            call()
        except OSError as error:
            message, fatal = _judge(error, bucket, action)
            if not fatal:
                return result_of(errors, [message])
            errors.append(message)
            if action == "s3:PutObject" or isinstance(error, FileNotFoundError):
                break  # there is nothing to read and to delete
    return result_of(errors, [])


def _judge(error: OSError, bucket: str, action: str) -> tuple[str, bool]:
    """(sentence, whether it is an error)."""
    message = reason_of(error)
    if isinstance(error, FileNotFoundError):
        return f"S3 bucket '{bucket}' does not exist. Create it: aws s3 mb s3://{bucket}", True
    if "NoCredentials" in message:
        return f"AWS credentials not configured, cannot check S3 bucket '{bucket}'. {_CREDENTIALS}", False
    if isinstance(error, PermissionError):
        text = f"Access denied to S3 bucket '{bucket}'. Check IAM permissions: {action} is missing, "
        return text + "or the credentials are wrong", True
    return f"Could not verify S3 bucket '{bucket}' ({action}): {message[:200]}", False
