"""Asks an object store whether a job may use it, and names the permission that is missing."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

from allranks.elastic.config.problems import ValidationResult, result_of
from allranks.errors import MissingExtra, require

_CREDENTIALS = "Configure credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or attach an IAM role"
_STATUS = re.compile(r"status code: (\d{3})")
_ROLE_SERVER = "169.254.169.254"  # asked for the credentials of a machine's role


def validate_s3_access(
    bucket: str, region: str | None = None, *, endpoint: str | None = None
) -> ValidationResult:
    """Lists, writes, reads and deletes one small object; an error names the IAM action that was refused.

    `endpoint` is the URL of an S3-compatible server (environment: AWS_ENDPOINT_URL). What cannot be told for
    want of a library, credentials or network is a warning.
    """
    try:
        require("obstore", feature="Checking an object store", extra="s3")
    except MissingExtra as error:
        return result_of([], [f"cannot check S3 bucket '{bucket}': {error}"])
    from obstore.store import S3Store

    options: dict[str, Any] = {
        "region": region or "us-east-1",
        "client_options": {"timeout": "15s", "connect_timeout": "5s"},
        "retry_config": {"max_retries": 1},
    }
    if endpoint:
        options["endpoint"] = endpoint
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
    return _probe(S3Store(bucket, **options), bucket)


def _probe(store: Any, bucket: str) -> ValidationResult:
    import obstore

    name = f"allranks-access-{uuid.uuid4().hex[:12]}"
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("s3:ListBucket", lambda: obstore.list_with_delimiter(store)),
        ("s3:PutObject", lambda: obstore.put(store, name, b"allranks")),
        ("s3:GetObject", lambda: obstore.get(store, name).bytes()),
        ("s3:DeleteObject", lambda: obstore.delete(store, name)),
    ]
    errors: list[str] = []
    warnings: list[str] = []
    written = True
    for action, call in steps:
        if action in {"s3:GetObject", "s3:DeleteObject"} and not written:
            continue
        try:
            call()
        except Exception as error:  # obstore raises many kinds; the text tells them apart
            written = written and action != "s3:PutObject"
            said, fatal = _judge(str(error), bucket, action)
            (errors if fatal else warnings).append(said)
            if "does not exist" in said or not fatal:
                break
    return result_of(errors, warnings)


def _judge(text: str, bucket: str, action: str) -> tuple[str, bool]:
    """(sentence, whether it is an error)."""
    found = _STATUS.search(text)  # what the server said; elsewhere digits may be a port or a time
    status = int(found[1]) if found and _ROLE_SERVER not in text else 0
    if status == 404:
        return f"S3 bucket '{bucket}' does not exist. Create it: aws s3 mb s3://{bucket}", True
    if status == 403:
        return (
            f"Access denied to S3 bucket '{bucket}'. Check IAM permissions: {action} is missing, "
            "or the credentials are wrong",
            True,
        )
    if status == 401:
        return f"Access denied to S3 bucket '{bucket}': credentials refused. {_CREDENTIALS}", True
    if not status and ("credential" in text.lower() or _ROLE_SERVER in text):
        return f"AWS credentials not configured, cannot check S3 bucket '{bucket}'. {_CREDENTIALS}", False
    return f"Could not verify S3 bucket '{bucket}' ({action}): {text.splitlines()[0][:200]}", False
