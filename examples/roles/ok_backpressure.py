"""Healthy: the queue is always full, since the trainer is faster than the reward worker, which works all the time."""

import multiprocessing

from job import ready, tell, train


def reward(batches):
    while True:
        batches.get()
        train(0.3)


def trainer():
    tell("trainer")
    batches = multiprocessing.Queue(2)
    worker = multiprocessing.Process(target=reward, args=(batches,), daemon=True)
    worker.start()
    tell("reward", worker.pid)
    for step in range(10**6):
        batches.put(step)
        if step == 4:
            ready()


if __name__ == "__main__":
    trainer()
