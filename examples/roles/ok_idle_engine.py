"""Healthy: a router without requests, and behind it an engine that waits for work at a ZMQ socket."""

import tempfile

import zmq
from job import free_port, main, ready, serve, start, tell


def engine(folder):
    socket = zmq.Context().socket(zmq.REP)
    socket.bind(f"ipc://{folder}/engine")
    while True:
        socket.recv()
        socket.send(b"text")


def router():
    tell("router")
    folder = tempfile.mkdtemp()
    start(engine, folder)
    socket = zmq.Context().socket(zmq.REQ)
    socket.connect(f"ipc://{folder}/engine")

    def generate(path, body):
        socket.send(b"prompt")
        return socket.recv().decode()

    generate("", {})
    ready()
    serve(free_port(), generate)


main(router, engine)
