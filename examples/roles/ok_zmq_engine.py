"""Healthy: a rollout engine behind ZMQ decodes token after token, a hundred milliseconds each, for one long request at a time."""

import time

import zmq
from job import free_port, main, ready, start, tell, train


def rollout(port):
    socket = zmq.Context().socket(zmq.REP)
    socket.bind(f"tcp://127.0.0.1:{port}")
    while True:
        socket.recv()
        for _ in range(30):
            train(0.02)
            time.sleep(0.08)
        socket.send(b"text")


def trainer():
    tell("trainer")
    port = free_port()
    start(rollout, port)
    socket = zmq.Context().socket(zmq.REQ)
    socket.connect(f"tcp://127.0.0.1:{port}")
    while True:
        socket.send(b"prompt")
        ready()
        socket.recv()


main(trainer, rollout)
