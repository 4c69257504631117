"""The rollout pushes samples to the trainer until the buffers are full. The trainer does not pull any more: it waits for
a thread that has a lock which the trainer holds."""

import threading

import zmq
from job import free_port, main, ready, start, tell

lock = threading.Lock()


def save():
    with lock:  # <- here
        print("saved")


def trainer(port):
    socket = zmq.Context().socket(zmq.PULL)
    socket.set_hwm(2)
    socket.connect(f"tcp://127.0.0.1:{port}")
    for step in range(100):
        socket.recv()
        if step == 3:
            saving = threading.Thread(target=save, name="save")
            with lock:
                saving.start()
                ready()
                saving.join()  # <- here


def rollout():
    tell("rollout")
    port = free_port()
    start(trainer, port)
    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(2)
    socket.bind(f"tcp://127.0.0.1:{port}")
    while True:
        socket.send(bytes(1 << 20))


main(rollout, trainer)
