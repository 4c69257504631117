"""What goes wrong in these programs, and what they print at their end. Imported by the programs, not by tests."""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal

import torch

KILLS = 10
# Lightning's own launcher sets the second
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
FOLDER = pathlib.Path(os.environ["TROUBLE"]) if "TROUBLE" in os.environ else None


def trouble(step: int, rank: int = RANK) -> bool:
    """With $TROUBLE: rank 1 kills itself ten times, each a little later, and then is to hang once (True)."""
    if FOLDER is None or rank != 1:
        return False
    kills = len(list(FOLDER.glob("kill-*")))
    if kills < KILLS and step >= 2 * kills + 2:
        (FOLDER / f"kill-{kills}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if kills == KILLS and step >= 2 * KILLS + 8 and not (FOLDER / "hung").exists():
        (FOLDER / "hung").touch()
        return True
    return False


def say(parameters: list[torch.Tensor], step: int, rank: int = RANK) -> None:
    """Bits of this rank's parameters."""
    whole = torch.cat([p.detach().double().flatten() for p in parameters]).numpy().tobytes()
    print(f"SAYS rank={rank} step={step} bits={hashlib.sha256(whole).hexdigest()[:16]}", flush=True)
