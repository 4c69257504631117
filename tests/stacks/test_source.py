"""What the source of a function says: locks held at a line, who ends a wait, loops that wait, try again or only sleep."""

from __future__ import annotations

import pytest

from allranks.stacktraces import source

CODE = """
class Engine:
    def evict(self):
        with self.cache:
            with self.scheduler:
                pass

    def take(self):
        self.gpu.acquire()
        self.work()
        self.gpu.release()
        self.idle()

    def wait(self, request):
        request["done"].wait()

    def loop(self, request):
        request["done"].set()

    def poll(self):
        while not os.path.exists(self.path):
            time.sleep(1)
        for step in range(3):
            time.sleep(1)
"""


@pytest.mark.parametrize(
    ("line", "held", "asked"),
    [
        (5, ("self.cache",), "self.scheduler"),
        (4, (), "self.cache"),
        (10, ("self.gpu",), ""),
        (12, (), ""),
        (9, (), "self.gpu"),
    ],
)
def test_locks_of_a_line(line: int, held: tuple[str, ...], asked: str) -> None:
    """What the source says that a frame holds and asks for."""
    assert (source.held_locks(CODE, line), source.asked_lock(CODE, line)) == (held, asked)


def test_a_context_manager_of_the_same_file_holds_its_locks_for_the_block() -> None:
    text = (
        "@contextmanager\ndef cached(self):\n    self.cache.acquire()\n    try:\n        yield 1\n    finally:\n"
        "        self.cache.release()\ndef reload(self):\n    with self.cached() as found:\n        self.model.acquire()"
    )
    assert source.held_locks(text, 10) == ("self.cached()", "self.cache")
    assert source.held_locks(text, 3) == ()
    assert source.held_locks("@contextmanager\ndef me():\n    with me():\n        yield", 4) == ("me()",)


def test_a_function_that_defines_another_one_does_not_end_a_wait() -> None:
    text = "def outer():\n    def inner():\n        done.set()\n    Timer(1, lambda: late.set())\n    done.wait()"
    assert source.find_setters(text, "done", "wait") == ("inner",)
    assert source.find_setters(text, "late", "wait") == ("outer",)


def test_who_ends_a_wait_and_what_polls() -> None:
    assert source.waited_object(CODE, 15) == ("done", "wait")
    assert source.find_setters(CODE, "done", "wait") == ("loop",)
    assert (source.is_poll(CODE, 22), source.is_poll(CODE, 24)) == (True, False)


def test_what_a_loop_that_polls_tests() -> None:
    text = "def f():\n    while store.add('n', 0) < 3:\n        sleep(1)\n    sleep(5)"
    assert [source.polled(text, line) for line in (3, 4)] == ["store.add('n', 0) < 3", ""]


LOOPS = """
def environment(queue, stop):
    while True:
        queue.put(1)
        sleep(7)
    while not stop.is_set():
        queue.put(1)
        sleep(7)
def wait(stop, path):
    while not stop.is_set():
        sleep(1)
    while True:
        if path.exists():
            break
        sleep(1)
def serve(socket):
    while True:
        try:
            request = socket.recv()
        except OSError:
            return
        socket.send(request)
        socket.recv()
def train(socket):
    while socket.step < 10:
        socket.recv()
def take(path):
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            return
        except FileExistsError:
            sleep(1)
def consume(queue):
    for job in iter(queue.get, None):
        queue.put(job)
    for job in queue:
        queue.put(job)
    while job := queue.get():
        queue.put(job)
    while queue.get() != "ready":
        queue.put(1)
def stay():
    while True:
        sleep(1200)
def batch(condition, left):
    condition.wait(5)
    while (left := end - time.monotonic()) > 0:
        condition.wait(left)
    while True:
        condition.wait(5)
"""


@pytest.mark.parametrize(("line", "polls"), [(5, False), (8, False), (11, True), (15, True), (33, True)])
def test_a_loop_that_works_and_sleeps_does_not_poll(line: int, polls: bool) -> None:
    assert source.is_poll(LOOPS, line) == polls


@pytest.mark.parametrize(
    ("line", "takes"),
    [(19, True), (22, False), (23, False), (26, False), (35, True), (37, False), (39, True), (41, False)],
)
def test_the_first_wait_of_an_endless_loop_is_for_work(line: int, takes: bool) -> None:
    """Who waits there needs nobody: an engine without requests is idle."""
    assert source.takes_work(LOOPS, line) == takes


@pytest.mark.parametrize(("line", "only"), [(5, False), (11, False), (15, False), (45, True)])
def test_a_loop_that_only_sleeps_keeps_its_process_alive(line: int, only: bool) -> None:
    assert source.only_sleeps(LOOPS, line) == only


@pytest.mark.parametrize(("line", "again"), [(47, False), (49, False), (51, True)])
def test_a_wait_with_a_limit_that_begins_anew_does_not_end(line: int, again: bool) -> None:
    assert source.tries_again(LOOPS, line) == again


RETRIES = """
def until(answer):
    while not answer():
        sleep(1)
def until_body():
    for _ in range(10):
        found = ask("/ready")
        if "ok" in found:
            return found
        sleep(1)
def watch(stop):
    while not stop.is_set():
        ask("/health")
        sleep(1)
def serve():
    while True:
        ask("/health")
        sleep(1)
"""


@pytest.mark.parametrize(("line", "loop"), [(4, 3), (7, 6), (10, 6), (14, 0), (18, 0)])
def test_a_loop_that_ends_by_an_answer_is_told_from_one_that_runs_for_ever(line: int, loop: int) -> None:
    assert source.retry_loop(RETRIES, line) == loop


def test_a_limit_around_a_wait_is_not_what_is_waited_for() -> None:
    assert source.waited_object("got = await asyncio.wait_for(jobs.get(), 30)\n", 1) == ("jobs", "get")


def test_a_method_that_was_called_before_a_line() -> None:
    text = "class A:\n    def release(self): self.a.release()\ncall = a.stop.remote()\nget(call)\na.release.remote()\n"
    assert [source.calls_before(text, 4, name) for name in ("stop", "release")] == [True, False]
    assert source.calls_before(text, 6, "release")
    inside = "def f(a):\n    a.release()\n    get(a)\n"
    assert source.calls_before(inside, 3, "release") and not source.calls_before(inside, 2, "release")
