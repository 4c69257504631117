"""The processes of a vLLM server: API server, engine core (ZMQ over ipc), two tensor-parallel workers that poll a block of
shared memory. Worker TP1 does not return from loading an adapter."""

import multiprocessing
import tempfile
import threading
import time
from multiprocessing import shared_memory

import zmq
from job import ready, tell
from setproctitle import setproctitle


def load_adapter(rank, request):
    if rank == 1 and request == 3:
        ready()
        threading.Event().wait()  # <- here


def worker(rank, name):
    setproctitle(f"VLLM::Worker_TP{rank}")
    block = shared_memory.SharedMemory(name)
    while True:
        while block.buf[0] == block.buf[1 + rank]:
            time.sleep(0.001)
        load_adapter(rank, block.buf[0])
        block.buf[1 + rank] = block.buf[0]


def engine_core(address, name):
    setproctitle("VLLM::EngineCore")
    block = shared_memory.SharedMemory(name)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    while True:
        request = socket.recv()
        block.buf[0] = request[0]
        while not block.buf[0] == block.buf[1] == block.buf[2]:
            time.sleep(0.001)  # the reader of a full ring polls
        socket.send(request)


def api_server():
    setproctitle("VLLM::APIServer")
    tell("api")
    context = multiprocessing.get_context("spawn")
    block = shared_memory.SharedMemory(create=True, size=16)
    address = f"ipc://{tempfile.mkdtemp()}/engine"
    socket = zmq.Context().socket(zmq.DEALER)
    socket.bind(address)
    parts = [("engine", engine_core, (address, block.name))]
    parts += [(f"worker{rank}", worker, (rank, block.name)) for rank in range(2)]
    for name, role, args in parts:
        process = context.Process(target=role, args=args, daemon=True)
        process.start()
        tell(name, process.pid)
    for request in range(1, 10):
        socket.send(bytes([request]))
        socket.recv()


if __name__ == "__main__":
    api_server()
