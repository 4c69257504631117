"""A tokenizer worker is killed inside Queue.get, where it holds the lock of all readers. The other worker waits for the lock,
the driver for its answer."""

import multiprocessing
import os
import signal
import time

from job import ready, tell


def tokenizer(texts, tokens):
    while True:
        tokens.put(len(texts.get()))  # <- here


def driver():
    tell("driver")
    texts, tokens = multiprocessing.Queue(), multiprocessing.Queue()
    workers = []
    for number in range(2):
        workers.append(multiprocessing.Process(target=tokenizer, args=(texts, tokens), daemon=True))
        workers[-1].start()
        tell(f"tokenizer{number}", workers[-1].pid)
        while f"{number + 1}" != f"{sum(_sleeps(one.pid) for one in workers)}":
            time.sleep(0.05)
    os.kill(workers[0].pid, signal.SIGKILL)  # the first one sleeps in get(), with the lock
    texts.put("a sentence")
    ready()
    print(tokens.get())


def _sleeps(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(") ", 1)[1][0] == "S"


if __name__ == "__main__":
    driver()
