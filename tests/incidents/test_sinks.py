"""Incidents in TensorBoard, W&B and OpenTelemetry, with the real packages and nothing outside this machine."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from allranks.cli.run_job import webhook_addresses
from allranks.errors import ConfigurationError, MissingExtra
from allranks.incidents.publish import check_address, deliver, payload
from allranks.model.diagnosis import Finding, Incident, Moment

pytestmark = pytest.mark.usefixtures("forks")

INCIDENT = Incident(
    "20260301-030000",
    "hang",
    "llama-42",
    1.7e9,
    "no step for 5 s",
    node="node0",
    ranks=(1,),
    step=1650,
    verdict=Finding("sleep", (1,), "rank 1 sleeps"),
    timeline=(Moment("noticed", 1.7e9, "no step for 5 s"), Moment("recovered", 1.7e9 + 2)),
    closed=1.7e9 + 2,
    durations_s={"recovered": 2.0},
)
SENTENCE = "rank 1 sleeps at data.py:31"


def sent(address: str) -> bool:
    """Whether the sink took it."""
    return deliver(address, INCIDENT, SENTENCE)


def test_tensorboard_shows_the_sentence_at_the_step(tmp_path: Path) -> None:
    """Read back with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert sent(f"tensorboard:{tmp_path}")
    events = EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("incidents/hang")
    assert text.step == 1650 and text.tensor_proto.string_val == [SENTENCE.encode()]
    assert [one.value for one in events.Scalars("incidents/recovered_s")] == [2.0]


def test_wandb_has_a_run_of_the_job_with_the_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline: in the file that `wandb sync` uploads."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert sent("wandb:allranks-test")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert SENTENCE.encode() in file.read_bytes()


def test_opentelemetry_gets_one_span_per_incident() -> None:
    """As protobuf over HTTP, to a collector on this machine."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        assert sent(f"otlp:http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join(10)
    ((path, body),) = bodies
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert path == "/v1/traces" and span.name == f"hang: {SENTENCE}"
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (int(1.7e18), int((1.7e9 + 2) * 1e9))
    assert [event.name for event in span.events] == ["noticed", "recovered"]


def test_a_missing_package_is_said_when_the_job_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it; other addresses need none."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"allranks\[wandb\]"):
        check_address("wandb:project")
    check_address("https://example.com/hook")


def test_a_webhook_with_a_password_sends_it_as_basic_authentication() -> None:
    """urllib takes "user:password@host" for the name of a host."""
    heads: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection = listener.accept()[0]
            with connection:
                heads.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        assert deliver(f"http://me:p%40ss@{host}/hook", INCIDENT, SENTENCE, attempts=1)
        thread.join(60)
    assert heads[0].startswith(b"POST /hook ") and f"Host: {host}\r\n".encode() in heads[0]
    assert base64.b64encode(b"me:p@ss") in heads[0] and b"p%40ss" not in heads[0]


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 500 \x1b[2J\r\nContent-Length: 0\r\n\r\n"]
)
def test_a_webhook_that_fails_is_named_without_what_is_secret_in_its_address(
    answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Slack's path and a password are keys; what listens there may be anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection = listener.accept()[0]
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        for address in (
            f"http://{host}/services/T0/B0/secret-path?key=secret",
            f"slack:http://{host}/secret",
        ):
            assert not deliver(address, INCIDENT, SENTENCE, attempts=1)
        thread.join(60)
    assert f"webhook http://{host}/… failed (1 of 1)" in caplog.text
    assert "secret" not in caplog.text and "\x1b" not in caplog.text


def test_webhooks_come_from_flags_or_the_job_file_or_the_environment() -> None:
    environment = {"ALLRANKS_WEBHOOK": "https://a.example/x slack:https://b.example/y"}
    assert webhook_addresses((), (), environment) == ("https://a.example/x", "slack:https://b.example/y")
    assert webhook_addresses((), ("https://c.example",), environment) == ("https://c.example",)
    assert webhook_addresses(("https://d.example",), ("https://c.example",), environment) == (
        "https://d.example",
    )
    assert webhook_addresses((), (), {}) == ()


@pytest.mark.parametrize(
    "address",
    ["hooks.slack.com/S3CRET", "htps://x.example/S3CRET", "slack:hooks.slack.com/S3CRET", "otlp:S3CRET:4318",
     "https:///S3CRET", "https://x.example:S3CRET/", "https://x.example/S3 CRET", "https://[S3CRET/", "tensorboard:", "wandb", ""],
)  # fmt: skip
def test_a_webhook_that_nothing_can_be_sent_to_is_refused_without_showing_it(address: str) -> None:
    """Its path or user is often the key."""
    with pytest.raises(ConfigurationError, match="not shown") as caught:
        check_address(address)
    said = f"{caught.value} {caught.value.hint}"
    assert "S3" not in said and "slack:https://" in said and caught.value.__cause__ is None


@pytest.mark.parametrize("way", ["flag", "flag, nothing watched", "job file", "environment"])
def test_run_refuses_a_webhook_without_a_known_scheme_before_anything_is_started(
    way: str, tmp_path: Path
) -> None:
    """Not at the first incident, days later."""
    secret = "hooks.slack.com/services/T0/S3CRET"
    (tmp_path / "train.py").write_text("print('started')")
    (tmp_path / "job.yaml").write_text(f"recovery:\n  webhooks: [{secret}]\n")
    words = {"job file": ["--config", "job.yaml"], "environment": []}.get(way, ["--webhook", secret])
    words += ["--no-watch"] if "watched" in way else []
    added = {"ALLRANKS_WEBHOOK": secret} if way == "environment" else {}
    environment = {**os.environ, "ALLRANKS_DIR": str(tmp_path / "boxes"), **added}
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "run", "--replicas", "1", *words, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "slack:https://" in done.stderr
    assert "S3CRET" not in done.stdout + done.stderr and "started" not in done.stdout
    assert not (tmp_path / "boxes").exists()


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server whose every connection is answered by `answer`, after the whole head has come; its HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    with connection, suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_a_redirect_is_not_followed_and_named() -> None:
    """It would carry the password to another host, and arrive there as a GET without the incident."""
    other: list[bytes] = []

    def take(connection: socket.socket) -> None:
        other.append(connection.recv(65536))

    with serving(take) as elsewhere:

        def redirect(connection: socket.socket) -> None:
            connection.recv(65536)
            head = f"HTTP/1.1 302 Found\r\nLocation: http://{elsewhere}/x\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(head.encode())

        with serving(redirect) as hook:
            assert not deliver(f"http://me:secret@{hook}/hook", INCIDENT, SENTENCE, attempts=1)
    assert not other


def test_slack_text_is_escaped() -> None:
    """A rank's exception is not ours: it must neither notify a channel nor make a link."""
    incident = replace(INCIDENT, job="<!channel> & co", folder="/x/`<https://evil.example|here>`")
    _, body = payload("slack:http://x/y", incident, "raised ValueError: <!here> <@U1>")
    text = str(body["text"])
    assert "<" not in text and ">" not in text and "&lt;!channel&gt; &amp; co" in text
    assert text.count("`") == 2
