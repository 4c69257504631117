"""The job token: where a process finds it, and how it is left in a file for others of the same user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from allranks.errors import ConfigurationError


def find_token(environment: Mapping[str, str] = os.environ) -> str:
    """$ALLRANKS_TOKEN, or what the file $ALLRANKS_TOKEN_FILE holds; "" when there is neither."""
    if token := environment.get("ALLRANKS_TOKEN"):
        return token
    path = environment.get("ALLRANKS_TOKEN_FILE")
    return read_token(Path(path)) if path else ""


def read_token(path: Path) -> str:
    """What the file holds; an error when that is nothing."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the job token: {error}") from error
    if not token:
        raise ConfigurationError(f"the token file {path} is empty")
    return token


def write_token(path: Path, token: str) -> None:
    """A new file, readable by this user only; never through a link or into a file that somebody else laid there.

    Agents that share a folder may write it at the same moment: each makes a file of its own, and the last one stays.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = path.with_name(f".{path.name}-{os.getpid()}")
    mine.unlink(missing_ok=True)
    handle = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(token + "\n")
    mine.replace(path)
