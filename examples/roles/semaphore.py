"""Two rollout workers share one GPU by a semaphore. Worker 0 keeps it after an error and waits for its next prompt, so worker 1
never starts."""

import multiprocessing

from job import ready, tell


def rollout(number, gpu, prompts, samples):
    while True:
        prompt = prompts.get()  # <- here
        try:
            gpu.acquire()  # <- here
            samples.put(10 // (prompt - 3))
            gpu.release()
        except ZeroDivisionError:
            ready()


def driver():
    tell("driver")
    gpu, samples = multiprocessing.Semaphore(1), multiprocessing.Queue()
    queues = [multiprocessing.Queue(), multiprocessing.Queue()]
    for number, prompts in enumerate(queues):
        worker = multiprocessing.Process(target=rollout, args=(number, gpu, prompts, samples), daemon=True)
        worker.start()
        tell(f"rollout{number}", worker.pid)
    for prompt in range(1, 4):
        queues[0].put(prompt)
        if prompt != 3:
            samples.get()
    queues[1].put(7)
    print(samples.get())


if __name__ == "__main__":
    driver()
