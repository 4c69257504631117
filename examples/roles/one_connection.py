"""The reward server serves one connection after the other. The monitor keeps its connection open and does something else,
so the trainer is never served."""

import http.client
import socket
from http.server import HTTPServer

from job import free_port, main, post, ready, serve, start, tell, wait_for_port


def reward(port):
    serve(port, lambda path, body: {"ok": True}, server=HTTPServer)


def monitor(port):
    wait_for_port(port)
    kept = http.client.HTTPConnection("127.0.0.1", int(port))
    kept.request("POST", "/health", b"{}", {"Content-Length": "2"})
    print(kept.getresponse().read(), flush=True)
    ours, _theirs = socket.socketpair()
    ready()
    ours.recv(1)  # <- here


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    start(monitor, port)
    while True:
        post(port, "/score", step=0)


main(trainer, reward, monitor)
