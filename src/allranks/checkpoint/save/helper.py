"""The helper process of a rank: hashes, writes and uploads snapshots in shared memory. No torch.

Started as `python -m allranks.checkpoint.save.helper` with a socket as descriptor 3. Each store has its own thread, so that
a slow upload does not delay the disk. If the rank dies, the helper finishes its saves, whose memory it has mapped, and exits.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import select
import socket
import sys
import threading
from dataclasses import asdict
from typing import Any, TypeAlias

from allranks.channel.frames import JsonReader, send_json
from allranks.checkpoint.manifest import FileLayout, Shard, lay_out
from allranks.checkpoint.save.writer import Saved, SaveJob, write_checkpoint
from allranks.checkpoint.stores import Attempt, Store, StoreSpec, hint_for, open_store, reason_of

SOCKET_FD = 3
Message: TypeAlias = dict[str, Any]  # between rank and helper, as JSON; `kind` is the type
NICENESS = 5  # training has priority on a shared core


class Helper:
    """The mapped memory, layouts and open stores of one helper."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = JsonReader(sock)
        self.parent = _watch_parent()
        self.arenas: dict[int, memoryview] = {}
        self.layouts: dict[int, FileLayout] = {}
        self.stores: dict[str, Store] = {}
        self.queues: dict[str, queue.SimpleQueue[Message | None]] = {}
        self.workers: list[threading.Thread] = []
        self.sending = threading.Lock()

    def serve(self) -> None:
        """Runs until the rank closes its side and all its saves are done."""
        try:
            while (message := self.inbox.receive()) is not None:
                self.handle(message)
        finally:  # also after an invalid message: otherwise the workers would keep the process alive
            for waiting in self.queues.values():
                waiting.put(None)
            for worker in self.workers:
                worker.join()

    def handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "arena":
            fd = self.inbox.fds.pop(0)
            self.arenas[message["id"]] = memoryview(mmap.mmap(fd, message["bytes"]))
            os.close(fd)
        elif kind == "drop":
            self.arenas.pop(message["id"], None)
        elif kind == "forget":
            self.layouts.clear()
        elif kind == "layout":
            self.layouts[message["id"]] = lay_out(shards_from_json(message["shards"]))
        elif kind == "save":
            # looked up now: the rank may drop the arena and the layouts before this save starts
            taken = {"image": self.arenas[message["arena"]], "layout": self.layouts[message["layout"]]}
            self.queue_of(message["job"]["store"]["url"]).put({**message, **taken})

    def queue_of(self, url: str) -> queue.SimpleQueue[Message | None]:
        """The queue of a store; starts its thread at the first use."""
        if url not in self.queues:
            self.queues[url] = queue.SimpleQueue()
            worker = threading.Thread(target=self.work, args=(self.queues[url],), name=f"save {url}")
            self.workers.append(worker)
            worker.start()
        return self.queues[url]

    def work(self, waiting: queue.SimpleQueue[Message | None]) -> None:
        while (message := waiting.get()) is not None:
            self.reply(self.save(message))

    def save(self, message: Message) -> Message:
        """Carries out one save; never raises."""
        job = job_from_json(message["job"])
        try:
            store = self.store(job.store)
            saved = write_checkpoint(job, message["layout"], message["image"], store, self.parent_alive)
            return {"kind": "saved", "save": message["save"], "result": asdict(saved)}
        except Exception as error:
            if isinstance(error, PermissionError):
                self.stores.pop(repr(job.store), None)  # the keys may be renewed before the next save
            import traceback  # imported late to keep the helper small

            return {
                "kind": "failed",
                "save": message["save"],
                "reason": reason_of(error),
                "path": job.path,
                "hint": hint_for(error, job.store),
                "trace": traceback.format_exc(),
            }

    def store(self, spec: StoreSpec) -> Store:
        """The store of an address, opened once to reuse its connections."""
        key = repr(spec)
        if key not in self.stores:
            self.stores[key] = open_store(spec)
        return self.stores[key]

    def parent_alive(self) -> bool:
        return self.parent is not None and not select.select([self.parent], [], [], 0)[0]

    def reply(self, message: Message) -> None:
        """Sends a message to the rank, if it still exists."""
        with contextlib.suppress(OSError), self.sending:
            send_json(self.sock, message)


def _watch_parent() -> int | None:
    """A descriptor that becomes readable when the rank exits; None if it already has."""
    try:
        return os.pidfd_open(os.getppid())
    except OSError:
        return None


def main() -> int:
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    Helper(socket.socket(fileno=SOCKET_FD)).serve()
    return 0


def job_to_json(job: SaveJob) -> Message:
    """A job as JSON; the skeletons in it are not copied."""
    return {**vars(job), "store": asdict(job.store), "attempt": asdict(job.attempt)}


def job_from_json(raw: Message) -> SaveJob:
    typed = {"store": StoreSpec(**raw["store"]), "attempt": Attempt(**raw["attempt"])}
    return SaveJob(**{**raw, **typed, "ranks": tuple(raw["ranks"])})


def shards_from_json(raw: list[list[Any]]) -> list[Shard]:
    """Shards from their JSON lists."""
    return [
        Shard(name, dtype, tuple(shape), tuple(offsets), tuple(sizes), length, view)
        for name, dtype, shape, offsets, sizes, length, view in raw
    ]


def saved_from_json(raw: Message) -> Saved:
    return Saved(**{**raw, "left": tuple(raw["left"])})


if __name__ == "__main__":
    sys.exit(main())
