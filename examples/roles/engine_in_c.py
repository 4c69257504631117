"""The rollout engine calls into a C library that does not return."""

import ctypes

from job import free_port, main, post, ready, serve, start, tell


def decode(prompt):
    if prompt == 3:
        ready()
        ctypes.CDLL(None).pause()  # <- here
    return [prompt]


def rollout(port):
    serve(port, lambda path, body: {"tokens": decode(body["prompt"])})


def trainer():
    tell("trainer")
    port = free_port()
    start(rollout, port)
    for prompt in range(10):
        post(port, "/generate", prompt=prompt)


main(trainer, rollout)
