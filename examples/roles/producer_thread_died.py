"""The thread that prefetches batches for the trainer has ended with an error. The evaluator waits for the trainer, and the trainer
for the next batch."""

import queue
import threading

from job import connect, main, ready, start, tell, train


def prefetch(batches):
    for step in range(100):
        if step == 3:
            raise OSError("shard 3 cannot be read")
        batches.put(step)


def trainer(port):
    batches = queue.Queue(4)
    lines = connect(port).makefile("w")
    threading.Thread(target=prefetch, args=(batches,), name="prefetch", daemon=True).start()
    for step in range(100):
        if step == 3:
            ready()
        batch = batches.get()  # <- here
        train()
        print(batch, file=lines, flush=True)


def evaluator():
    import socket

    tell("evaluator")
    server = socket.create_server(("127.0.0.1", 0))
    start(trainer, server.getsockname()[1])
    connection, _ = server.accept()
    for line in connection.makefile():
        print("evaluated", line, end="")


main(evaluator, trainer)
