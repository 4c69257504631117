"""Healthy: two environments fill a queue, then rest for seconds; the trainer waits meanwhile."""

import multiprocessing
import time

from job import ready, tell, train


def environment(episodes):
    while True:
        for _ in range(20):
            episodes.put([1] * 100)
        time.sleep(8)


def trainer():
    tell("trainer")
    context = multiprocessing.get_context("spawn")
    episodes = context.Queue(8)
    for number in range(2):
        worker = context.Process(target=environment, args=(episodes,), daemon=True)
        worker.start()
        tell(f"environment{number}", worker.pid)
    for count in range(10_000):
        episodes.get()
        train(0.01)
        if count == 39:
            ready()


if __name__ == "__main__":
    trainer()
