"""A task of the orchestrator takes the lock of the weights and waits for the trainer; the trainer waits for the orchestrator,
whose handler wants the same lock."""

import asyncio

from job import connect, free_port, main, ready, start, tell


def orchestrator(port):
    async def run():
        lock = asyncio.Lock()

        async def handle(reader, writer):
            await lock.acquire()  # kept: the update below was to release it
            writer.write(b"go\n")
            await reader.readline()
            ready()
            await lock.acquire()  # <- here
            writer.write(b"done\n")

        server = await asyncio.start_server(handle, "127.0.0.1", int(port))
        await server.serve_forever()

    asyncio.run(run())


def trainer():
    tell("trainer")
    port = free_port()
    start(orchestrator, port)
    lines = connect(port).makefile("rw")
    lines.readline()
    lines.write("update\n")
    lines.flush()
    lines.readline()


main(trainer, orchestrator)
