"""Three simulators meet at a barrier after every episode. Simulator 2 waits for a lock file that a run of yesterday has left."""

import multiprocessing
import os
import tempfile
import time

from job import ready, tell


def take(lock):
    while True:
        try:
            return os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep(0.25)  # <- here


def simulator(number, barrier, lock):
    for episode in range(10):
        if number == 2 and episode == 3:
            ready()
            take(lock)
        barrier.wait()


def driver():
    tell("driver")
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    with tempfile.NamedTemporaryFile() as lock:
        workers = [context.Process(target=simulator, args=(n, barrier, lock.name)) for n in range(3)]
        for number, worker in enumerate(workers):
            worker.start()
            tell(f"simulator{number}", worker.pid)
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    driver()
