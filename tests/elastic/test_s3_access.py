"""Access to an object store is really tried, and what is missing has a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.checkpoint.stores.object_store import _os_error
from allranks.elastic.config import _s3_problem, validate_config, validate_s3_access
from checkpoint.s3server import KEY, SECRET, Proxy, S3Server


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.mark.usefixtures("credentials")
def test_a_bucket_that_can_be_used_is_valid_and_left_clean(s3: S3Server) -> None:
    """List, put, get and delete are tried for real; nothing stays behind."""
    result = validate_s3_access("ready", endpoint=s3.endpoint)
    assert (result.valid, result.errors, result.warnings) == (True, [], [])
    config = {"checkpoint": {"s3_bucket": "ready", "s3_endpoint_url": s3.endpoint}}
    assert validate_config(config, validate_s3=True).valid


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("word", "action"),
    [
        ("GET /ready?", "s3:ListBucket"),
        ("PUT /ready/", "s3:PutObject"),
        ("GET /ready/", "s3:GetObject"),
        ("POST /ready?delete", "s3:DeleteObject"),
    ],
)
def test_the_missing_permission_is_named(s3: S3Server, word: str, action: str) -> None:
    """Each of the four actions, refused with 403, is the one that the error names."""
    with Proxy(s3.ports["s3"], lambda line: 403 if line.startswith(word) else None) as proxy:
        result = validate_s3_access("ready", endpoint=proxy.endpoint)
        assert proxy.judged, "nothing was refused"
    assert not result.valid
    assert len(result.errors) == 1 and f"{action} is missing" in result.errors[0]
    assert "Access denied to S3 bucket 'ready'" in result.errors[0]


def test_wrong_credentials_and_a_missing_bucket_are_told_apart(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are errors, in different words."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    denied = validate_s3_access("ready", endpoint=s3.endpoint)
    assert not denied.valid and "Access denied" in denied.errors[0]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    missing = validate_s3_access("no-such-bucket", endpoint=s3.endpoint)
    assert missing.errors == [
        "S3 bucket 'no-such-bucket' does not exist. Create it: aws s3 mb s3://no-such-bucket"
    ]


@pytest.mark.usefixtures("credentials")
def test_a_server_that_is_not_there_is_a_warning_not_a_verdict(tmp_path: Path) -> None:
    """Nobody listens: we could not tell, within the limit."""
    result = validate_s3_access("b", endpoint="http://127.0.0.1:9")
    assert result.valid and "Could not verify S3 bucket 'b'" in result.warnings[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Error performing GET http://h:4030/b in 100.403841ms - HTTP error: error sending request", "Could not verify"),
        ("Error performing PUT http://h:1/b/401-404 in 1ms - HTTP error: connection closed", "Could not verify"),
        ("Error performing PUT http://169.254.169.254/ in 1ms - status code: 404 Not Found", "not configured"),
    ],
)  # fmt: skip
def test_digits_in_a_time_a_port_or_a_name_are_no_refusal(text: str, said: str) -> None:
    """Only a status that the store itself has sent is a verdict on its bucket."""
    sentence, fatal = _s3_problem(_os_error(RuntimeError(text)), "b", "s3:PutObject")
    assert said in sentence and not fatal
