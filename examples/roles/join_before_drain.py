"""The driver joins its worker before it has read the results. The worker cannot end: its results do not fit into the pipe."""

import multiprocessing

from job import ready, tell


def evaluate(results):
    results.put(bytes(4 << 20))
    ready()


def driver():
    tell("driver")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=evaluate, args=(results,))
    worker.start()
    tell("evaluate", worker.pid)
    worker.join()  # <- here
    print(len(results.get()))


if __name__ == "__main__":
    driver()
