"""A lock of a multiprocessing Manager guards the replay buffer. The trainer holds it and waits for a signal that was sent
before it waited."""

import multiprocessing
import threading

from job import ready, tell


def trainer(lock, held):
    missed = threading.Condition()
    with lock:
        held.set()
        with missed:
            ready()
            missed.wait()  # <- here


def rollout(lock, held):
    held.wait()
    with lock:
        print("sample added")


def driver():
    tell("driver")
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        lock, held = manager.Lock(), manager.Event()
        workers = [context.Process(target=role, args=(lock, held)) for role in (trainer, rollout)]
        for worker, name in zip(workers, ("trainer", "rollout"), strict=True):
            worker.start()
            tell(name, worker.pid)
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    driver()
