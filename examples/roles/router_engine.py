"""A router sends the trainer's prompts to two rollout engines in turn; engine 1 never answers its third one."""

import threading

from job import free_port, main, post, ready, serve, start, tell, train


def rollout(port, number):
    seen = []

    def generate(path, body):
        seen.append(body["prompt"])
        if number == "1" and len(seen) == 3:
            free_block = threading.Condition()
            with free_block:
                ready()
                free_block.wait()  # <- here
        return {"tokens": [body["prompt"]] * 4}

    serve(port, generate)


def router(port, *engines):
    def forward(path, body):
        return post(engines[body["prompt"] % len(engines)], path, **body)

    serve(port, forward)


def trainer():
    tell("trainer")
    first, second, front = free_port(), free_port(), free_port()
    start(rollout, first, 0, name="rollout0")
    start(rollout, second, 1, name="rollout1")
    start(router, front, first, second)
    for prompt in range(20):
        post(front, "/generate", prompt=prompt)
        train()


main(trainer, rollout, router)
