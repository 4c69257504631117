"""Runs a script of another library as two replicas that kill themselves on the way, and reads what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 560

#: Kills, alternately, the second replica first: two in the everyday run, ten with --soak.
KILLS = (
    pytest.param(2, marks=pytest.mark.timeout(300)),
    pytest.param(10, marks=(pytest.mark.soak, pytest.mark.timeout(LIMIT_S + 20))),
)

# Pasted in front of every script: `lives(manager)` kills this replica when it is its turn and both take part.
DIES = f"""
import os, pathlib, time
NAME, FOLDER = os.environ["ALLRANKS_REPLICA"], pathlib.Path(os.environ["FOLDER"])
def says(*words):  # in one piece: log lines of other threads go to the same place
    os.write(1, " ".join(("SAYS", *words, "\\n")).encode())
together = seen = 0  # committed steps that this process made in company since the last kill; kills that it knew of
def lives(manager):
    global together, seen
    kills = len(list(FOLDER.glob("kill-*")))
    if kills != seen:  # the other one died in this step: it must be back before it is our turn
        together, seen = 0, kills
    if manager.num_participants() < 2:
        time.sleep(3.0 if kills else 0.05)  # the other one is being started, on a busy machine: leave it something to do
        return
    together += 1
    if kills < int(os.environ["KILLS"]) and together >= 5 and NAME == f"replica-{{(kills + 1) % 2}}":
        (FOLDER / f"kill-{{kills}}").write_text(str(manager.current_step()))
        os.kill(os.getpid(), {int(signal.SIGKILL)})
"""


def run(script: str, folder: Path, kills: int, *arguments: str) -> dict[str, dict[str, str]]:
    """What each replica said last in `SAYS key=value ...`, after both were killed in turn and came back."""
    path = folder / "train.py"
    path.write_text(DIES + script)
    env = {
        **os.environ,
        "FOLDER": str(folder),
        "KILLS": str(kills),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [
        sys.executable,
        "-m",
        "allranks",
        "run",
        "--replicas",
        "2",
        "--incidents",
        str(folder / "incidents"),
    ]
    done = subprocess.run(
        [*command, str(path), *arguments], env=env, cwd=folder, text=True, timeout=LIMIT_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    killed = len(list(folder.glob("kill-*")))
    assert killed == kills, f"{killed} kills of {kills} happened: {done.stdout[-3000:]}"
    said = re.findall(r"SAYS name=(\S+) (.*)", done.stdout)
    return {name: dict(pair.split("=", 1) for pair in rest.split()) for name, rest in said}
