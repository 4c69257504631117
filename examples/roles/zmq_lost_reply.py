"""The reward worker drops a request that it cannot read, without a reply, and waits for the next one. The trainer
waits for the reply."""

import json
import sys

import zmq
from job import free_port, main, ready, start, tell, train


def reward(port):
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(f"tcp://127.0.0.1:{port}")
    while True:
        client, empty, body = socket.recv_multipart()  # <- here
        try:
            step = json.loads(body)["step"]
        except ValueError as error:
            print(error, file=sys.stderr)
            ready()
            continue
        socket.send_multipart([client, empty, b"%d" % step])


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    socket = zmq.Context().socket(zmq.REQ)
    socket.connect(f"tcp://127.0.0.1:{port}")
    for step in range(10):
        train()
        socket.send(b'{"step": %d' % step + (b"}" if step != 3 else b""))
        socket.recv()  # <- here


main(trainer, reward)
