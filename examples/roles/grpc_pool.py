"""The parameter server has one thread for its calls. The monitor holds it with a stream that does not end, so the trainer's
call is never begun."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from job import free_port, main, ready, start, tell


def parameters(port):
    changed = threading.Condition()

    def watch(request, context):
        yield b"version 1"
        with changed:
            ready()
            changed.wait()  # <- here

    handlers = {
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
        "Pull": grpc.unary_unary_rpc_method_handler(lambda request, context: b"weights"),
    }
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Parameters", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def trainer():
    tell("trainer")
    port = free_port()
    start(parameters, port)
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    versions = channel.unary_stream("/Parameters/Watch")(b"", wait_for_ready=True)
    print(next(versions))
    channel.unary_unary("/Parameters/Pull")(b"")


main(trainer, parameters)
