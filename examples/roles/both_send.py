"""Trainer and rollout are joined by one pipe. Both send 8 MB before they receive."""

import multiprocessing

from job import ready, tell

BLOB = bytes(8 << 20)


def rollout(pipe):
    while True:
        pipe.send_bytes(BLOB)  # <- here
        pipe.recv_bytes()


def trainer():
    tell("trainer")
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.Process(target=rollout, args=(theirs,), daemon=True)
    worker.start()
    tell("rollout", worker.pid)
    ready()
    while True:
        ours.send_bytes(BLOB)  # <- here
        ours.recv_bytes()


if __name__ == "__main__":
    trainer()
