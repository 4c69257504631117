"""The exporter has ended with an error. The trainer looks for the file that the exporter would have written."""

import pathlib
import sys
import tempfile
import time

from job import main, ready, start, tell, train


def exporter(folder):
    for step in range(10):
        while not pathlib.Path(folder, f"{step}.weights").exists():
            time.sleep(0.01)
        if step == 3:
            ready()
            sys.exit("no space left")
        pathlib.Path(folder, f"{step}.done").touch()


def trainer():
    tell("trainer")
    folder = tempfile.mkdtemp()
    worker = start(exporter, folder)
    for step in range(10):
        train()
        pathlib.Path(folder, f"{step}.weights").touch()
        while not pathlib.Path(folder, f"{step}.done").exists():
            time.sleep(0.2)  # <- here
    worker.wait()


main(trainer, exporter)
