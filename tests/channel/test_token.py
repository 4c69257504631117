"""The job token in files: read where it should be, written so that nobody else reads or redirects it."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from allranks.channel.keys import MAX_TOKEN_CHARS, find_token, read_token, write_token
from allranks.errors import ConfigurationError


def test_the_environment_says_where_the_token_is(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from the file\n")
    file = {"ALLRANKS_TOKEN_FILE": str(tmp_path / "token")}
    assert find_token({}) == ""
    assert find_token(file) == "from the file"
    assert find_token(file | {"ALLRANKS_TOKEN": "said"}) == "said"
    with pytest.raises(ConfigurationError, match="nowhere"):
        find_token({"ALLRANKS_TOKEN_FILE": str(tmp_path / "nowhere")})


def test_a_token_file_is_for_its_owner_only_even_if_a_file_was_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "token"
    write_token(path, "first")
    path.chmod(0o644)
    write_token(path, "second")
    assert path.read_text() == "second\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_token_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Somebody laid a link at the well-known place: the target is untouched."""
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "token").symlink_to(target)
    write_token(tmp_path / "token", "ours")
    assert target.read_text() == "precious"
    assert not (tmp_path / "token").is_symlink()


def test_a_token_file_that_somebody_has_open_does_not_get_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch()
    with path.open() as spy:
        write_token(path, "ours")
        assert spy.read() == ""


def test_a_pipe_in_place_of_a_token_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    with pytest.raises(ConfigurationError, match="not a regular file"):
        read_token(tmp_path / "token")


@pytest.mark.parametrize("content", [b"x" * (MAX_TOKEN_CHARS + 1), b"one\ntwo\n", b"a\0b", b"\xff\xfe"])
def test_a_file_that_holds_something_else_is_no_token(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigurationError, match="token"):
        read_token(tmp_path / "token")


def test_a_token_that_others_may_read_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, with the fix. Secrets that a cluster mounts are readable by all of their container."""
    path = tmp_path / "token"
    path.write_text("known to all")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert [read_token(path), read_token(path)] == ["known to all"] * 2
    assert [f"chmod 600 {path}" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o440, False), (0o400, False)])
def test_a_readable_token_of_a_mounted_secret_is_not_told_to_chmod(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    """Kubernetes' layout: a link into ..data, whose modes only the manifest can change; fsGroup lets the group read."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "token").write_text("known to all")
    (tmp_path / "..2026" / "token").chmod(mode)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "token").symlink_to("..data/token")
    assert read_token(tmp_path / "token") == "known to all"
    assert "chmod 600" not in caplog.text
    assert ("defaultMode: 0400" in caplog.text) is warned


@pytest.mark.needs_root
def test_a_readable_token_on_a_read_only_mount_is_not_told_to_chmod(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `docker secret` mounts it."""
    (tmp_path / "token").write_text("known to all")
    (tmp_path / "token").chmod(0o444)
    subprocess.run(["mount", "--bind", tmp_path, tmp_path], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", tmp_path], check=True)
        assert read_token(tmp_path / "token") == "known to all"
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
    assert "mode: 0400" in caplog.text and "chmod 600" not in caplog.text


def test_a_token_in_a_place_of_everybody_must_be_a_file_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who makes /tmp/allranks-UID first could lay a token there that he knows."""
    path = tmp_path / "token"
    write_token(path, "mine")
    assert read_token(path, own=True) == "mine"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigurationError):
        read_token(tmp_path / "link", own=True)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        read_token(path, own=True)
