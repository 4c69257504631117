"""The tokenizer reads lines from a unix socket. The trainer forgets the end of the line, and waits for the answer."""

import os
import socket
import sys
import tempfile
import time

from job import main, ready, start, tell


def tokenizer(path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    connection, _ = server.accept()
    lines = connection.makefile("rw")
    while line := lines.readline():  # <- here
        lines.write(f"{len(line)}\n")
        lines.flush()


def trainer():
    tell("trainer")
    path = os.path.join(tempfile.mkdtemp(), "tokenizer.sock")
    start(tokenizer, path)
    while not os.path.exists(path):
        time.sleep(0.05)
    connection = socket.socket(socket.AF_UNIX)
    while connection.connect_ex(path):
        time.sleep(0.05)
    lines = connection.makefile("rw")
    for text in ("one\n", "two\n", "three"):
        if text == "three":
            ready()
        lines.write(text)
        lines.flush()
        print(lines.readline(), file=sys.stderr)  # <- here


main(trainer, tokenizer)
