"""The job token in files: read where it should be, written so that nobody else reads or redirects it."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.channel.keys import find_token, write_token
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
