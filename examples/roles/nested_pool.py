"""The judge runs in a pool of one thread. A job of the pool submits another one and waits for it."""

from concurrent.futures import ThreadPoolExecutor

from job import free_port, main, post, ready, serve, start, tell

pool = ThreadPoolExecutor(1, thread_name_prefix="judge")


def second_opinion(answer):
    return len(answer)


def judge(answer):
    ready()
    return pool.submit(second_opinion, answer).result()  # <- here


def reward(port):
    serve(port, lambda path, body: {"reward": pool.submit(judge, body["answer"]).result()})


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    post(port, "/score", answer="42")


main(trainer, reward)
