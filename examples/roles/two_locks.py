"""Two threads of the rollout engine take two locks in different order: cache, then scheduler, and the other way round."""

import threading

from job import free_port, main, post, ready, serve, start, tell

cache, scheduler, both = threading.Lock(), threading.Lock(), threading.Barrier(2)


def evict():
    with cache:
        both.wait()
        with scheduler:  # <- here
            pass


def rollout(port):
    def generate(path, body):
        if body["prompt"] == 3:
            threading.Thread(target=evict, name="evict").start()
            with scheduler:
                both.wait()
                ready()
                with cache:  # <- here
                    pass
        return {"tokens": []}

    serve(port, generate)


def trainer():
    tell("trainer")
    port = free_port()
    start(rollout, port)
    for prompt in range(10):
        post(port, "/generate", prompt=prompt)


main(trainer, rollout)
