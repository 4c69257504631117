"""What the programs of this folder share: starting roles, a small HTTP server and client, and lines for gallery.py."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main(driver, *roles):
    """Runs the role that the command line names; without one, the driver."""
    name, *words = sys.argv[1:] or [""]
    by_name = {role.__name__: role for role in roles}
    by_name.get(name, driver)(*words)


def start(role, *words, name=""):
    """Starts a role in a process of its own: this script again, with the role's name."""
    process = subprocess.Popen([sys.executable, sys.argv[0], role.__name__, *map(str, words)])
    tell(name or role.__name__, process.pid)
    return process


def tell(role, pid=None):
    """One line for gallery.py: which process has which role."""
    print(f"role {role} {pid or os.getpid()}\n", end="", flush=True)


def ready():
    """One line for gallery.py: it can look now."""
    print("ready\n", end="", flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(port, answer, server=ThreadingHTTPServer, host="127.0.0.1"):
    """An HTTP server: `answer(path, body)` returns what is sent back."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps(answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words):
            pass

    server((host, int(port)), Handler).serve_forever()


def post(port, path, host="127.0.0.1", **body):
    """An HTTP request to a server that may still be starting."""
    request = urllib.request.Request(f"http://{host}:{port}{path}", json.dumps(body).encode())
    wait_for_port(port, host)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def wait_for_port(port, host="127.0.0.1"):
    connect(port, host).close()


def connect(port, host="127.0.0.1"):
    """A connection to a server that may still be starting."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((host, int(port)))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def train(seconds=0.05):
    """Something that keeps a processor busy."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
