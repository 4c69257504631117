"""Healthy: the driver waits for a build that keeps a processor busy, and the trainer waits for the driver."""

import subprocess
import sys

from job import main, ready, tell

BUILD = "while True: sum(range(100_000))"


def trainer():
    sys.stdin.readline()


def driver():
    tell("driver")
    words = [sys.executable, sys.argv[0], "trainer"]
    waiting = subprocess.Popen(words, stdin=subprocess.PIPE)
    tell("trainer", waiting.pid)
    build = subprocess.Popen([sys.executable, "-c", BUILD])
    tell("build", build.pid)
    ready()
    build.wait()
    waiting.communicate(b"go\n")


main(driver, trainer)
