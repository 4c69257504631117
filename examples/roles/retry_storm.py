"""The reward server answers "not ready" for ever, since the thread that loads its model has died. The trainer asks again
and again."""

import threading
import time

from job import free_port, main, post, ready, serve, start, tell

loaded = threading.Event()


def load_model():
    raise FileNotFoundError("/models/judge-7b")


def reward(port):
    threading.Thread(target=load_model, name="load").start()

    def score(path, body):
        return {"reward": 1.0} if loaded.is_set() else {"retry": True}

    serve(port, score)


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    for tries in range(10**9):
        if "reward" in post(port, "/score", step=0):
            break
        if tries == 10:
            ready()
        time.sleep(0.2)  # <- here


main(trainer, reward)
