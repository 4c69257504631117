"""A process that imports what a rank needs, waits on a socket, and then is that rank.

python -m allranks.launch.spare_process ORDERS READY      (two pipes)
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys

from allranks.launch.rank_entry import die_with_parent, main

#: What a rank imports sooner or later, the parts that torch loads on first use among them.
PRELOADED = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "allranks.record.recorder",
    "allranks.checkpoint.manager",
)  # fmt: skip


def wait_and_run(orders: int, ready: int) -> None:
    """Never returns: runs the rank, or exits quietly when the agent closes the pipe."""
    for name in (*PRELOADED, *filter(None, os.environ.get("ALLRANKS_PRELOAD", "").split(","))):
        try:
            importlib.import_module(name.strip())
        except ImportError:
            continue  # the script does without it, or fails by itself with its own words
    with contextlib.suppress(OSError):  # taken before it was warm: nobody waits for it
        os.write(ready, b"r")
    os.close(ready)
    with open(orders, "rb") as pipe:
        data = pipe.read()
    if not data:
        os._exit(0)
    message = json.loads(data)
    os.environ.clear()
    os.environ.update(message["environment"])
    for path, number in ((message["out"], 1), (message["err"], 2)):
        if path is not None:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, number)
            os.close(target)
    sys.argv = [sys.argv[0], *message["argv"]]
    main()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    wait_and_run(int(sys.argv[1]), int(sys.argv[2]))
