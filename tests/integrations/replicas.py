"""Runs a script of another library as two replicas that kill themselves on the way, and reads what they say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

LIMIT_S = 280

# Pasted in front of every script: `lives(manager)` kills this replica once, when both take part.
DIES = f"""
import os, pathlib, time
NAME, FOLDER = os.environ["ALLRANKS_REPLICA"], pathlib.Path(os.environ["FOLDER"])
AT = {{"replica-1": 5, "replica-0": 25}}[NAME]  # committed steps made in company until this replica ends
together = 0
def lives(manager):
    global together
    if manager.num_participants() < 2:
        time.sleep(0.05)  # the other one is being started: leave it something to do
        return
    together += 1
    other = FOLDER / ("replica-1" if NAME == "replica-0" else "replica-0")
    mine = FOLDER / NAME
    if together >= AT and not mine.exists() and (NAME == "replica-1" or other.exists()):
        mine.write_text(str(manager.current_step()))
        os.kill(os.getpid(), {int(signal.SIGKILL)})
"""


def run(script: str, folder: Path, *arguments: str) -> dict[str, dict[str, str]]:
    """What each replica said last in `SAYS key=value ...`, after both were killed once and came back."""
    path = folder / "train.py"
    path.write_text(DIES + script)
    env = {**os.environ, "FOLDER": str(folder), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
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
    killed = {name: (folder / name).exists() for name in ("replica-0", "replica-1")}
    assert killed == {"replica-0": True, "replica-1": True}, f"a kill did not happen: {done.stdout[-3000:]}"
    said = re.findall(r"SAYS name=(\S+) (.*)", done.stdout)
    return {name: dict(pair.split("=", 1) for pair in rest.split()) for name, rest in said}
