"""The evaluator keeps a transaction of a database open. The trainer's write asks for the lock again and again."""

import os
import sqlite3
import threading
import time

from job import main, ready, start, tell


def evaluator():
    base = sqlite3.connect("runs.db", isolation_level=None)
    base.execute("create table runs (step)")
    base.execute("begin immediate")
    base.execute("insert into runs values (1)")
    open("begun", "w").close()
    threading.Event().wait()  # <- here


def trainer():
    while not os.path.exists("begun"):
        time.sleep(0.05)
    base = sqlite3.connect("runs.db", timeout=100_000)
    ready()
    base.execute("insert into runs values (2)")


def driver():
    tell("driver")
    start(evaluator)
    start(trainer).wait()


main(driver, evaluator, trainer)
