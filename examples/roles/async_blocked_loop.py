"""A handler of the asyncio rollout engine calls the tool server with a blocking client, and the tool server asks the
engine back: its event loop cannot answer."""

import asyncio
import urllib.request

from job import free_port, main, post, ready, serve, start, tell, wait_for_port


def call_tool(port):
    ready()
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/run", b"{}").read()  # <- here


def rollout(port, tool_port):
    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        body = call_tool(tool_port) if b"/generate" in head else b"{}"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", int(port))
        await server.serve_forever()

    asyncio.run(run())


def tool(port, rollout_port):
    serve(port, lambda path, body: post(rollout_port, "/tokenizer"))


def trainer():
    tell("trainer")
    port, tool_port = free_port(), free_port()
    start(tool, tool_port, port)
    start(rollout, port, tool_port)
    wait_for_port(tool_port)
    post(port, "/generate", prompt=1)


main(trainer, rollout, tool)
