"""Healthy: the reward server thinks for half a second about every answer."""

from job import free_port, main, post, ready, serve, start, tell, train


def reward(port):
    def score(path, body):
        train(0.5)
        return {"reward": 1}

    serve(port, score)


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    for step in range(10**6):
        if step == 2:
            ready()
        post(port, "/score", step=step)


main(trainer, reward)
