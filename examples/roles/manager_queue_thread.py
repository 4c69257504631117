"""A tokenizer takes two texts from a queue of a manager; the thread that puts them in waits for its answer after the first."""

import multiprocessing
import threading

from job import ready, tell


def tokenizer(queue, pipe):
    tell("tokenizer")
    first = queue.get()
    second = queue.get()  # <- here
    pipe.send((first, second))


def trainer():
    tell("trainer")
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        queue = manager.Queue()
        ours, theirs = context.Pipe()
        worker = context.Process(target=tokenizer, args=(queue, theirs))
        worker.start()

        def feed():
            queue.put("a")
            ready()
            ours.recv()  # <- here
            queue.put("b")

        thread = threading.Thread(target=feed)
        thread.start()
        thread.join()


trainer()
