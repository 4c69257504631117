"""The consumer task of the rollout engine has ended with an error that nobody looked at. Its queue is full, and every handler
waits for room."""

import asyncio

from job import connect, free_port, main, ready, start, tell, train


async def consume(queue):
    while True:
        prompt, done = await queue.get()
        if prompt == 4:
            raise ValueError("prompt too long")
        done.set()


def rollout(port):
    async def run():
        queue, tasks = asyncio.Queue(2), []

        async def handle(reader, writer):
            while line := await reader.readline():
                if int(line) == 7:
                    ready()
                await queue.put((int(line), asyncio.Event()))  # <- here
                writer.write(b"queued\n")

        tasks.append(asyncio.create_task(consume(queue)))
        server = await asyncio.start_server(handle, "127.0.0.1", int(port))
        await server.serve_forever()

    asyncio.run(run())


def trainer():
    tell("trainer")
    port = free_port()
    start(rollout, port)
    lines = connect(port).makefile("rw")
    for prompt in range(10):
        lines.write(f"{prompt}\n")
        lines.flush()
        lines.readline()
        train()


main(trainer, rollout)
