"""Two simulators exchange through shared memory and poll it; simulator 1 waits for a signal that was sent before it listened."""

import multiprocessing
import signal
import time
from multiprocessing import shared_memory

from job import ready, tell


def simulator(number, name):
    tell(f"simulator{number}")
    memory = shared_memory.SharedMemory(name)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    for step in range(1, 100):
        if number == 1 and step == 20:
            ready()
            signal.sigwait([signal.SIGUSR1])  # <- here
        memory.buf[number] = step
        while memory.buf[1 - number] < step:
            time.sleep(0.002)


def driver():
    tell("driver")
    memory = shared_memory.SharedMemory(create=True, size=16)
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=simulator, args=(n, memory.name)) for n in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()


driver()
