"""Trainer and rollout wait for each other: the trainer asks for samples before it serves weights, and the rollout asks
for weights before it serves samples."""

import threading
import urllib.request

from job import free_port, main, ready, serve, start, tell, wait_for_port

weights, samples = threading.Event(), threading.Event()


def ask(port, path):
    wait_for_port(port)
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", b"{}")
    return urllib.request.urlopen(request).read()


def rollout(port, trainer_port):
    def answer(path, body):
        samples.wait()  # <- here
        return {}

    threading.Thread(target=serve, args=(port, answer)).start()
    print(ask(trainer_port, "/weights"))  # <- here
    samples.set()


def trainer():
    tell("trainer")
    port, rollout_port = free_port(), free_port()
    start(rollout, rollout_port, port)

    def answer(path, body):
        ready()
        weights.wait()  # <- here
        return {}

    threading.Thread(target=serve, args=(port, answer)).start()
    print(ask(rollout_port, "/samples"))  # <- here
    weights.set()


main(trainer, rollout)
