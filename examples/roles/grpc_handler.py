"""The trainer calls the reward server over gRPC without a deadline. The handler waits for an event that nobody sets."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from job import free_port, main, ready, start, tell, train


def reward(port):
    scored = threading.Event()

    def score(request, context):
        if request == b"3":
            ready()
            scored.wait()  # <- here
        return b"1"

    handlers = {"Score": grpc.unary_unary_rpc_method_handler(score)}
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Reward", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def trainer():
    tell("trainer")
    port = free_port()
    start(reward, port)
    score = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/Reward/Score")
    for step in range(10):
        train()
        score(b"%d" % step, wait_for_ready=True)


main(trainer, reward)
