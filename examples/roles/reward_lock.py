"""The trainer waits for the reward server. A thread of the server holds the lock of the judge and reads from a socket
on which nothing arrives."""

import socket
import threading

from job import free_port, main, post, ready, serve, start, tell, train

judge = threading.Lock()


def refresh(first):
    with judge:
        first.set()
        ours, _theirs = socket.socketpair()
        ready()
        ours.recv(1)  # <- here


def reward(port):
    def score(path, body):
        if body["step"] == 3:
            first = threading.Event()
            threading.Thread(target=refresh, args=(first,), name="refresh").start()
            first.wait()
        with judge:  # <- here
            return {"reward": body["step"]}

    serve(port, score)


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    for step in range(10):
        train()
        post(port, "/score", step=step)


main(trainer, reward)
