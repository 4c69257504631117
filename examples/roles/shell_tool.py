"""A reward worker runs a shell command that reads from a FIFO without a writer: the guilty process is not Python."""

import os
import subprocess
import tempfile

from job import main, ready, start, tell


def reward():
    fifo = os.path.join(tempfile.mkdtemp(), "input")
    os.mkfifo(fifo)
    tool = subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE)
    tell("tool", tool.pid)
    ready()
    tool.communicate()  # <- here


def trainer():
    tell("trainer")
    start(reward).wait()


main(trainer, reward)
