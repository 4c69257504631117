"""The trainer opens a FIFO to read the samples; the rollout opens another one first, which nobody reads."""

import os
import tempfile

from job import main, ready, start, tell


def rollout(folder):
    ready()
    with open(f"{folder}/metrics", "w") as metrics, open(f"{folder}/samples", "w") as samples:  # <- here
        metrics.write("started\n")
        samples.write("1 2 3\n")


def trainer():
    tell("trainer")
    folder = tempfile.mkdtemp()
    for name in ("metrics", "samples"):
        os.mkfifo(f"{folder}/{name}")
    start(rollout, folder)
    with open(f"{folder}/samples") as samples:
        print(samples.readline())


main(trainer, rollout)
