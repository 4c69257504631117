"""How the ranks of whole-job mode end: in the time that was asked for, and with all that they have started.

Runs in the agent. torchrun obeys --shutdown-timeout only when the whole job ends, and not when it restarts; and
it leaves alone what a rank that died had started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from allranks.launch.torchrun_patches import STARTING, STOPPING, replaced
from allranks.supervise.orphans import Guard, sweep


@contextlib.contextmanager
def ending_ranks(grace_s: int | None, on_stop: Callable[[set[int]], object]) -> Iterator[None]:
    """While it is open. `grace_s` lies between SIGTERM and SIGKILL, None is torchrun's choice (30 s).

    `on_stop` is told the pids of ranks that are about to be asked to end: that they do is no incident.
    """
    guard = Guard()

    def started(ordinary: Any) -> Any:
        def popen(handler: Any, *args: Any, **kwargs: Any) -> Any:
            process = ordinary(handler, *args, **kwargs)
            guard.add(process.pid)
            return process

        return popen

    def stopped(ordinary: Any) -> Any:
        def close(context: Any, death_sig: Any, timeout: int = 30) -> None:
            ranks = [handler.proc for handler in context.subprocess_handlers.values()]
            asked = {rank.pid for rank in ranks if rank.poll() is None}
            on_stop(asked)
            ordinary(context, death_sig, timeout if grace_s is None else grace_s)
            for rank in ranks:
                if (
                    rank.pid in asked or rank.poll() != 0
                ):  # one that ended well may have left an upload running
                    sweep(rank.pid)
                guard.remove(rank.pid)

        return close

    lost = "--shutdown-timeout is not obeyed at restarts, and children of a dead rank may stay"
    with replaced(STARTING, started, lost), replaced(STOPPING, stopped, lost):
        guard.start()
        try:
            yield
        finally:
            guard.close()
