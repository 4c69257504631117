"""The tool server announces more bytes than it sends. The trainer reads on; the server waits for the next request."""

import http.client
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from job import free_port, main, ready, start, tell, wait_for_port


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        text = "Zürich"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode()) + 1))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words):
        pass


def tool(port):
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


def trainer():
    tell("trainer")
    port = free_port()
    start(tool, port)
    wait_for_port(port)
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/city")
    reply = connection.getresponse()
    ready()
    print(reply.read())  # <- here


main(trainer, tool)
