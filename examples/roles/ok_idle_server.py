"""Healthy: the trainer computes, and the reward server has nothing to do."""

from job import free_port, main, post, ready, serve, start, tell, train


def reward(port):
    serve(port, lambda path, body: {"reward": 1})


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    post(port, "/score", step=0)
    ready()
    while True:
        train(0.5)


main(trainer, reward)
