"""A tokenizer is forked while another thread holds the lock of the cache. Nobody in the new process will release it."""

import multiprocessing
import threading

from job import ready, tell

cache, texts = threading.Lock(), {}


def refresh(holding, end):
    with cache:
        holding.set()
        end.wait()


def tokenizer(requests, answers):
    while True:
        text = requests.get()
        ready()
        with cache:  # <- here
            texts[text] = text.split()
        answers.put(texts[text])


def trainer():
    tell("trainer")
    holding, end = threading.Event(), threading.Event()
    threading.Thread(target=refresh, args=(holding, end), daemon=True).start()
    holding.wait()
    context = multiprocessing.get_context("fork")
    requests, answers = context.Queue(), context.Queue()
    worker = context.Process(target=tokenizer, args=(requests, answers), daemon=True)
    worker.start()
    end.set()
    tell("tokenizer", worker.pid)
    requests.put("a b")
    answers.get()


trainer()
