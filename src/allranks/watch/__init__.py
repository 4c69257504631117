"""Observes the ranks of one node: samples, progress, exits, other nodes. Runs in the agent; decides nothing about incidents.

This module handles the `debug:` section of a job file: stacks of every rank of this node at given times. `allranks watch`
collects them, as a child that ends with the agent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def timed_stacks(debug: Mapping[str, Any], folder: Path, log_dir: str) -> Iterator[None]:
    """Runs the child that collects stacks, if the section asks for them. `{log_dir}` is the job's."""
    section = collection(debug)
    if section is None:
        yield
        return
    config = folder / "debug.yaml"
    config.write_text(json.dumps({"debug": section}))  # JSON is YAML
    command = [sys.executable, "-m", "allranks", "watch", "--pid", str(os.getpid()), "--config", str(config)]
    environment = {**os.environ, "LOG_DIR": log_dir, "ALLRANKS_DIR": str(folder)}
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        child.terminate()
        try:
            child.wait(5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def collection(debug: Mapping[str, Any]) -> dict[str, Any] | None:
    """The section for `allranks watch`. The agent itself notices hangs, so only triggers of the section are passed on."""
    triggers = {key: value for key, value in (debug.get("triggers") or {}).items() if value not in (None, [])}
    if not debug.get("enabled") or not (debug.get("wait_seconds") or any(triggers.values())):
        return None
    keys = ("output_dir", "repeats", "rounds", "interval_seconds", "native", "cuda_gdb", "patterns")
    chosen = {key: debug[key] for key in keys if debug.get(key) is not None}
    quiet = {"no_progress_seconds": 0, "rank_lost": False}
    return {"wait_seconds": debug.get("wait_seconds") or 0, "triggers": {**quiet, **triggers}, **chosen}
