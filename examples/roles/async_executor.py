"""The engine's only executor thread waits for a coroutine, and that for another job of the same thread."""

import asyncio
import concurrent.futures

from job import connect, free_port, main, ready, start, tell


def rollout(port):
    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tools")

    async def score(loop):
        return await loop.run_in_executor(pool, sum, [1, 2])  # <- here

    def tool(loop, step):
        if step < 3:
            return step
        ready()
        return asyncio.run_coroutine_threadsafe(score(loop), loop).result()  # <- here

    async def handle(reader, writer):
        loop, step = asyncio.get_running_loop(), 0
        while await reader.readline():
            answer = await loop.run_in_executor(pool, tool, loop, step)  # <- here
            step += 1
            writer.write(b"%d\n" % answer)
            await writer.drain()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", int(port))
        await server.serve_forever()

    asyncio.run(run())


def trainer():
    tell("trainer")
    port = free_port()
    start(rollout, port)
    line = connect(port).makefile("rwb")
    while True:
        line.write(b"step\n")
        line.flush()
        line.readline()


main(trainer, rollout)
