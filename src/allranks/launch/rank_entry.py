"""The entry point of a rank under `allranks run`: dies with its agent, records, then runs the user's script.

python …/allranks/launch/rank_entry.py [-m] SCRIPT ARGS...

Not started with `python -m`, which would put the working folder first on sys.path: it may contain a `queue.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback

FILE = os.path.abspath(__file__)
PR_SET_PDEATHSIG = 1


def die_with_parent(agent_pid: int) -> None:
    """Asks the kernel to kill this process when its agent dies, so that no orphan holds a GPU."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux: only the agent's shutdown ends this process
    # a command in $PYTHON_EXEC may be the parent
    if os.getppid() != agent_pid and not os.environ.get("PYTHON_EXEC"):
        os._exit(128 + signal.SIGKILL)  # the agent died before the request was in place


def _import_package() -> None:
    """Imports the allranks that this file belongs to, and nothing else from its folder."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(FILE))))
    try:
        importlib.import_module("allranks")
    finally:
        del sys.path[0]


def main() -> None:
    """Runs in the rank; never returns."""
    _import_package()
    agent = os.environ.get("ALLRANKS_AGENT_PID")
    if agent and agent.isdigit():
        die_with_parent(int(agent))
    for name in filter(None, os.environ.get("ALLRANKS_PRELOAD", "").split(",")):
        importlib.import_module(name.strip())
    from allranks.recording.__main__ import main as run_recorded

    try:
        run_recorded()
    except KeyboardInterrupt as error:  # Ctrl-C reaches every rank: one line each, without a traceback
        from allranks.model.stacks import is_user_file

        frames = traceback.extract_tb(error.__traceback__)
        frame = next((one for one in reversed(frames) if is_user_file(one.filename)), frames[-1])
        print(f"interrupted at {frame.filename}:{frame.lineno} in {frame.name}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
