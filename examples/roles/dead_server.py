"""The reward server was killed, but a helper that it had forked still holds its connections open. The trainer waits for an answer
that nobody sends."""

import os
import signal
import time

from job import free_port, main, post, ready, serve, start, tell, train


def reward(port):
    def score(path, body):
        if body["step"] == 3:
            helper = os.fork()
            while helper == 0:
                time.sleep(3600)  # <- here
            tell("helper", helper)
            ready()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"reward": 1}

    serve(port, score)


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    for step in range(10):
        train()
        post(port, "/score", step=step)


main(trainer, reward)
