"""Trainer and evaluator lock the checkpoint folder. The evaluator holds the lock and waits for a server whose queue of
connections is full."""

import fcntl
import os
import socket
import tempfile
import time

from job import main, ready, start, tell


def storage(folder):
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{folder}/storage")
    server.listen(0)
    other = socket.socket(socket.AF_UNIX)
    other.connect(f"{folder}/storage")
    open(f"{folder}/full", "w").close()
    while True:
        time.sleep(3600)  # <- here


def evaluator(folder):
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        open(f"{folder}/held", "w").close()
        while not os.path.exists(f"{folder}/full"):
            time.sleep(0.05)
        upload = socket.socket(socket.AF_UNIX)
        ready()
        upload.connect(f"{folder}/storage")
        upload.recv(1)


def trainer():
    tell("trainer")
    folder = tempfile.mkdtemp()
    start(storage, folder)
    start(evaluator, folder)
    with open(f"{folder}/lock", "w") as lock:
        while not os.path.exists(f"{folder}/held"):
            time.sleep(0.05)
        fcntl.flock(lock, fcntl.LOCK_EX)


main(trainer, storage, evaluator)
