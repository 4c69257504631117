"""Healthy: an asyncio engine that answers 8 clients, each after a second of sleep."""

import asyncio
import threading

from job import connect, free_port, main, ready, start, tell


def rollout(port):
    async def handle(reader, writer):
        while line := await reader.readline():
            await asyncio.sleep(1)
            writer.write(line)

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", int(port))
        await server.serve_forever()

    asyncio.run(run())


def ask(port, first):
    lines = connect(port).makefile("rw")
    for number in range(10**6):
        lines.write(f"{number}\n")
        lines.flush()
        lines.readline()
        if first and number == 2:
            ready()


def trainer():
    tell("trainer")
    port = free_port()
    start(rollout, port)
    for number in range(8):
        threading.Thread(target=ask, args=(port, number == 0)).start()


main(trainer, rollout)
