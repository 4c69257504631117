"""The processes of an sglang server: tokenizer manager, two schedulers, detokenizer, joined by ZMQ over ipc. The detokenizer waits
for a vocabulary that another thread loads; that thread has ended."""

import multiprocessing
import tempfile
import threading

import zmq
from job import ready, tell
from setproctitle import setproctitle


def pull(address):
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.bind(address)
    return socket


def push(address):
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(address)
    return socket


def scheduler(rank, folder):
    setproctitle(f"sglang::scheduler_TP{rank}")
    requests = pull(f"ipc://{folder}/scheduler{rank}")
    tokens = push(f"ipc://{folder}/detokenizer")
    while True:
        request = requests.recv()
        if rank == 0:
            tokens.send(request)


def detokenizer(folder):
    setproctitle("sglang::detokenizer")
    tokens, texts = pull(f"ipc://{folder}/detokenizer"), push(f"ipc://{folder}/tokenizer")
    vocabulary = threading.Event()
    while True:
        token = tokens.recv()
        if token == b"\x03":
            ready()
            vocabulary.wait()  # <- here
        texts.send(token)


def server():
    setproctitle("sglang::launch_server")
    tell("server")
    folder = tempfile.mkdtemp()
    context = multiprocessing.get_context("spawn")
    parts = [("scheduler0", scheduler, (0, folder)), ("scheduler1", scheduler, (1, folder))]
    for name, role, args in [*parts, ("detokenizer", detokenizer, (folder,))]:
        process = context.Process(target=role, args=args, daemon=True)
        process.start()
        tell(name, process.pid)
    answers = pull(f"ipc://{folder}/tokenizer")
    schedulers = [push(f"ipc://{folder}/scheduler{rank}") for rank in range(2)]
    for request in range(10):
        for one in schedulers:
            one.send(bytes([request]))
        answers.recv()


if __name__ == "__main__":
    server()
