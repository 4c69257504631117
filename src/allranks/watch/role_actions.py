"""What may be done about a stuck role: its own restart command from the job file, and nothing else. Pure.

debug:
  restart: ["reward=systemctl --user restart reward"]
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from allranks.model.stacks import ProcessFinding

MAX_RESTARTS, WITHIN_S = 3, 3600.0


def restart_commands(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """ROLE=COMMAND of the options, by role."""
    pairs = (one.partition("=")[::2] for one in given)
    return {role.strip(): tuple(shlex.split(command)) for role, command in pairs}


def choose_restart(
    finding: ProcessFinding,
    commands: Mapping[str, Sequence[str]],
    earlier_s: Sequence[tuple[str, float]],
    now_s: float,
) -> tuple[str, str]:
    """The role to restart ("" for none) and the reason. `earlier_s`: roles that were restarted, and when."""
    if finding.state != "stuck":
        return "", "the job is not stuck"
    roles = {re.sub(r" \d+$", "", one.role) for one in finding.guilty}
    if len(roles) != 1:
        return "", f"{len(roles)} roles are guilty: one must be, for a restart"
    (role,) = roles
    if role not in commands:
        return "", f"the job file has no restart command for {role}"
    recent = sum(name == role and now_s - at_s < WITHIN_S for name, at_s in earlier_s)
    if recent >= MAX_RESTARTS:
        return "", f"{role} was restarted {recent} times within an hour"
    return role, f"{role} is stuck and may be restarted"
