"""The orchestrator asks a tool for its answer; the tool reads its input to the end, which the orchestrator keeps open."""

import asyncio
import sys

from job import main, ready, tell


def tool():
    text = sys.stdin.read()  # <- here
    print(len(text))


def orchestrator():
    tell("orchestrator")

    async def run():
        process = await asyncio.create_subprocess_exec(
            sys.executable, sys.argv[0], "tool", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        tell("tool", process.pid)
        process.stdin.write(b"call\n")
        await process.stdin.drain()
        ready()
        print(await process.stdout.readline())  # <- here

    asyncio.run(run())


main(orchestrator, tool)
