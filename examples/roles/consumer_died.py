"""The reward worker is killed, as the out-of-memory killer does. The trainer waits for room in its queue."""

import multiprocessing
import os
import signal

from job import ready, tell, train


def reward(batches):
    while True:
        if batches.get() == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer():
    tell("trainer")
    context = multiprocessing.get_context("spawn")
    batches = context.Queue(2)
    worker = context.Process(target=reward, args=(batches,), daemon=True)
    worker.start()
    tell("reward", worker.pid)
    for step in range(100):
        train()
        if step == 5:
            ready()
        batches.put(step)  # <- here


if __name__ == "__main__":
    trainer()
