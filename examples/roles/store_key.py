"""The evaluator waits for a key of the store. The trainer is to set it, and waits for a child process that reads from the
terminal of nobody."""

import datetime
import subprocess
import sys

import torch.distributed as dist
from job import main, ready, start, tell

DAY = datetime.timedelta(days=1)


def trainer(port):
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=DAY)
    export = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tell("export", export.pid)
    ready()
    export.wait()  # <- here
    store.set("checkpoint/3", "done")


def evaluator():
    tell("evaluator")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=DAY, wait_for_workers=False)
    start(trainer, store.port)
    store.wait(["checkpoint/3"], DAY)


main(evaluator, trainer)
