"""What a rank must know of its job, as environment variables. Written by the agent, read in the rank."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allranks.channel.keys import find_token


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
    """The token of the job: as the environment says, or a new one."""
    return find_token(environment) or secrets.token_urlsafe(24)
