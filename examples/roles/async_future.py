"""The rollout engine answers requests from futures by number. The answer of request 5 is filed under another number, so its
future is never fulfilled."""

import asyncio
import json

from job import connect, free_port, main, ready, start, tell, train


async def finish(futures, number):
    await asyncio.sleep(0.01)
    found = futures.get(number if number != 5 else 50)
    if found is not None:
        found.set_result(number)
    else:
        ready()


def rollout(port):
    futures = {}

    async def handle(reader, writer):
        while line := await reader.readline():
            number = json.loads(line)
            futures[number] = asyncio.get_running_loop().create_future()
            later = asyncio.create_task(finish(futures, number))
            answer = await futures[number]  # <- here
            await later
            writer.write(json.dumps(answer).encode() + b"\n")

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", int(port))
        await server.serve_forever()

    asyncio.run(run())


def trainer():
    tell("trainer")
    port = free_port()
    start(rollout, port)
    lines = connect(port).makefile("rw")
    for number in range(10):
        lines.write(f"{number}\n")
        lines.flush()
        lines.readline()
        train()


main(trainer, rollout)
