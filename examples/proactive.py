"""What the push is worth: how long training stalls when a peer freezes, with and without it.

    python examples/proactive.py

Two replicas train; one is stopped (SIGSTOP: its sockets stay open, so no error ever comes). With the push the
lighthouse's notice ends the survivor's collective; without, it waits for the collective's timeout (8 s here,
60 s by default). Then the same for kill -9, where the closed socket helps both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

TIMEOUT_S = 8.0
HEARTBEAT_TIMEOUT_S = 1.0


def worker() -> None:
    import torch
    from torch import nn

    from allranks import DistributedDataParallel, Manager, Optimizer

    torch.set_num_threads(1)
    model = nn.Linear(64, 64)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    manager = Manager(
        load_state_dict=model.load_state_dict, state_dict=model.state_dict, min_replica_size=1,
        timeout=TIMEOUT_S, rank=0, world_size=1,
    )  # fmt: skip
    manager.group.set_timeout(TIMEOUT_S)
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while True:
        optimizer.zero_grad()
        ddp(torch.randn(8, 64)).square().mean().backward()
        time.sleep(0.005)
        if optimizer.step():
            print(time.monotonic(), manager.num_participants(), flush=True)


def stall(proactive: bool, number: int) -> float:
    """Seconds from the fault to the survivor's next committed step."""
    from allranks.lighthouse.options import Options
    from allranks.lighthouse.server import Lighthouse

    with Lighthouse(Options(min_replicas=1, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)) as lighthouse:
        env = {
            **os.environ,
            "ALLRANKS_LIGHTHOUSE": lighthouse.address,
            "ALLRANKS_PROACTIVE": str(int(proactive)),
        }
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "worker"],
                env={**env, "ALLRANKS_REPLICA": name},
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is ours; we end them
            )
            for name in ("survivor", "victim")
        ]
        try:
            survivor, victim = workers
            assert survivor.stdout is not None and victim.stdout is not None
            next(line for line in victim.stdout if line.split()[1] == "2")
            next(line for line in survivor.stdout if line.split()[1] == "2")
            at = time.monotonic()
            os.kill(victim.pid, number)
            for line in survivor.stdout:
                when, together = line.split()
                if together == "1" and float(when) > at:
                    return float(when) - at
            raise RuntimeError("the survivor ended")
        finally:
            for one in workers:
                one.kill()
                one.wait()
                if one.stdout is not None:
                    one.stdout.close()


def main() -> None:
    print(f"heartbeat timeout {HEARTBEAT_TIMEOUT_S} s, timeout of a collective {TIMEOUT_S} s", flush=True)
    for name, number in (("frozen (SIGSTOP)", signal.SIGSTOP), ("killed (SIGKILL)", signal.SIGKILL)):
        with_push = stall(True, number)
        without = stall(False, number)
        print(f"peer {name}: {with_push:.2f} s with the push, {without:.2f} s without", flush=True)


if __name__ == "__main__":
    try:
        worker() if "worker" in sys.argv[1:] else main()
    except KeyboardInterrupt:
        sys.exit(130)
