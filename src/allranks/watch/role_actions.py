"""What may be done about a stuck role: its own restart command from the job file, and nothing else. Pure but for reading.

roles:
  - role: reward
    title: 'reward_server\.py'                  # how its processes are recognised, as in stacks/roles.yaml
    restart: systemctl --user restart reward    # optional; without it a stuck role is only reported
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from allranks.errors import ConfigurationError, InputError
from allranks.model.parsing import read_yaml
from allranks.model.processes import ProcessFinding
from allranks.stacks.roles import RoleRule, parse_roles

MAX_RESTARTS, WITHIN_S = 3, 3600.0


@dataclass(frozen=True)
class RolePolicy:
    """The `roles:` section: rules that come before the built-in ones, and commands by role."""

    rules: tuple[RoleRule, ...] = ()
    restart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_policy(path: str | Path) -> RolePolicy:
    """The section of a job file, which may have none."""
    try:
        document = read_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from error
    return parse_policy(document.get("roles") if isinstance(document, dict) else None)


def parse_policy(section: object) -> RolePolicy:
    rows = [] if section is None else section
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigurationError("roles must be a list of rows with `role` and what to look for")
    commands = {}
    for row in rows:
        if "restart" in row:
            if not isinstance(row["restart"], str) or not (words := shlex.split(row["restart"])):
                raise ConfigurationError(f"roles: restart of {row.get('role')!r} must be a command")
            commands[str(row.get("role"))] = tuple(words)
    plain = [{key: value for key, value in row.items() if key != "restart"} for row in rows]
    return RolePolicy(parse_roles(plain), commands)


def choose_restart(
    finding: ProcessFinding, policy: RolePolicy, earlier_s: Sequence[tuple[str, float]], now_s: float
) -> tuple[str, str]:
    """The role to restart ("" for none) and the reason."""
    if finding.state != "stuck":
        return "", "the job is not stuck"
    roles = {re.sub(r" \d+$", "", one.role) for one in finding.guilty}
    if len(roles) != 1:
        return "", f"{len(roles)} roles are guilty: one must be, for a restart"
    (role,) = roles
    if role not in policy.restart:
        return "", f"the job file has no restart command for {role}"
    recent = sum(name == role and now_s - at_s < WITHIN_S for name, at_s in earlier_s)
    if recent >= MAX_RESTARTS:
        return "", f"{role} was restarted {recent} times within an hour"
    return role, f"{role} is stuck and may be restarted"
