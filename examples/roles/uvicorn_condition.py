"""A handler of an ASGI engine awaits a condition that the batch task notifies; that task awaits a batch, which the trainer
sends after the answer."""

import asyncio

import httpx
import uvicorn
from job import free_port, main, ready, start, tell, wait_for_port


def rollout(port):
    state = {}

    async def batches(queue, cond):
        await queue.get()
        async with cond:
            cond.notify_all()

    async def app(scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                if message["type"] == "lifespan.startup":
                    state["cond"], state["queue"] = asyncio.Condition(), asyncio.Queue()
                    state["task"] = asyncio.create_task(batches(state["queue"], state["cond"]))
                await send({"type": message["type"] + ".complete"})
        elif scope["path"] == "/batch":
            await state["queue"].put(1)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        else:
            ready()
            async with state["cond"]:
                await state["cond"].wait()  # <- here
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error")


def trainer():
    tell("trainer")
    port = free_port()
    start(rollout, port)
    wait_for_port(port)

    async def run():
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            await client.get(f"http://127.0.0.1:{port}/generate")  # <- here
            await client.get(f"http://127.0.0.1:{port}/batch")

    asyncio.run(run())


main(trainer, rollout)
