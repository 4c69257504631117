"""The rollout worker allows itself one open connection, and needs a second one while it holds the first."""

import threading

from job import free_port, main, post, ready, serve, start, tell

connections = threading.Semaphore(1)


def call_tool(port):
    ready()
    with connections:  # <- here
        return post(port, "/tool")


def reward(port):
    serve(port, lambda path, body: {"value": 1})


def rollout(port, reward_port):
    def generate(path, body):
        with connections:
            post(reward_port, "/score")
            return call_tool(reward_port)

    serve(port, generate)


def trainer():
    tell("trainer")
    port, reward_port = free_port(), free_port()
    start(reward, reward_port)
    start(rollout, port, reward_port)
    post(port, "/generate", prompt=1)


main(trainer, reward, rollout)
