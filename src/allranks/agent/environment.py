"""What a rank must know of its job, as environment variables. Written by the agent, read in the rank."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.errors import ConfigurationError


@dataclass(frozen=True)
class JobEnvironment:
    """The facts of one job that every rank is told."""

    job: str
    token: str = ""
    lighthouse: str = ""  # host:port, '' = none
    folder: Path | None = None  # where black boxes go; None = the recorder's default
    snapshots: str = ""  # host:port of this node's snapshot keeper, '' = none
    record: bool = True

    def variables(self) -> dict[str, str]:
        """The variables to add to a rank's environment."""
        found = {"ALLRANKS_JOB_ID": self.job, "ALLRANKS_RECORD": "1" if self.record else "0"}
        if self.token:
            found["ALLRANKS_TOKEN"] = self.token
        if self.lighthouse:
            found["ALLRANKS_LIGHTHOUSE"] = self.lighthouse
        if self.folder is not None:
            found["ALLRANKS_DIR"] = str(self.folder)
        if self.snapshots:
            found["ALLRANKS_SNAPSHOTS"] = self.snapshots
        return found


def job_token(environment: Mapping[str, str]) -> str:
    """What a connection must show to the lighthouse: $ALLRANKS_TOKEN, the file $ALLRANKS_TOKEN_FILE, or a new one."""
    if token := environment.get("ALLRANKS_TOKEN"):
        return token
    if path := environment.get("ALLRANKS_TOKEN_FILE"):
        try:
            return Path(path).read_text().strip()
        except OSError as error:
            raise ConfigurationError(f"cannot read the job token: {error}") from error
    return secrets.token_urlsafe(24)


def write_token(path: Path, token: str) -> None:
    """Keeps the token in a file that only its owner can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(token)
