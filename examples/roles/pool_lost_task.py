"""A worker of a multiprocessing.Pool was killed in its task. The pool starts another worker; the task is lost."""

import multiprocessing
import os
import signal

from job import main, ready, tell


def score(number):
    if number == 5 and not os.path.exists("killed"):
        open("killed", "w").close()
        ready()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def trainer():
    tell("trainer")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(score, range(8), chunksize=1)  # <- here


main(trainer)
