"""The trainer fills a queue of two places. The reward worker does not empty it: it polls for a file that never comes."""

import multiprocessing
import os
import time

from job import ready, tell, train


def reward(batches):
    while True:
        batch = batches.get()
        while batch == 2 and not os.path.exists("/nonexistent/judge.done"):
            time.sleep(0.5)  # <- here


def trainer():
    tell("trainer")
    batches = multiprocessing.Queue(2)
    worker = multiprocessing.Process(target=reward, args=(batches,), daemon=True)
    worker.start()
    tell("reward", worker.pid)
    for step in range(100):
        train()
        if step == 5:
            ready()
        batches.put(step)


if __name__ == "__main__":
    trainer()
