"""A real job with a known token: nothing that is open to everybody tells a secret, or lets anybody in."""

from __future__ import annotations

import base64
import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from allranks.channel.keys import ChannelError, Credential, Keyring, greet_as_client
from allranks.lighthouse.options import Options

from .cluster import Cluster, Job, LighthouseProcess

TOKEN = "a-job-token-that-nobody-else-knows"
OPEN = ("/", "/api/status", "/metrics", "/status", "/healthz", "/openapi.json", "/favicon.ico")


def secrets_of_the_job(epoch: int) -> set[str]:
    """The token, and every key that its members may have used, as people write bytes."""
    keys = [Keyring(TOKEN).for_quorum(epoch, number).key for number in range(12)]
    return {
        TOKEN, *(key.hex() for key in keys), *(repr(key) for key in keys),
        *(base64.b64encode(key).decode().rstrip("=") for key in keys),
    }  # fmt: skip


def open_answers(address: str) -> dict[str, str]:
    """Everything that the lighthouse tells anyone who asks, without a token."""
    found = {}
    for path in OPEN:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
            found[path] = answer.read().decode()
    with urllib.request.urlopen(f"http://{address}/api/events", timeout=20) as stream:
        found["/api/events"] = stream.readline().decode()
    return found


def strings(value: Any) -> set[str]:
    """All texts of a JSON document, also of documents inside texts."""
    if isinstance(value, dict):
        return {*value, *(text for item in value.values() for text in strings(item))}
    if isinstance(value, list):
        return {text for item in value for text in strings(item)}
    if isinstance(value, str) and value.startswith(("{", "[")):
        return {value, *strings(json.loads(value))}
    return {str(value)}


def test_no_open_answer_and_no_log_tells_a_secret(tmp_path: Path) -> None:
    """Also while replicas come and go; what is sent opens no healing server."""
    log = tmp_path / "lighthouse.log"
    lighthouse = LighthouseProcess(Options(), token=TOKEN, log=str(log))
    job = Job(until_told=True, min_replicas=2, options={"token": TOKEN})
    with lighthouse, Cluster(lighthouse, job) as cluster:
        cluster.start("a", "b")
        cluster.wait_for_progress("a", 2)
        answers = open_answers(lighthouse.address)
        cluster.start("c")
        cluster.wait_for_progress("c", 4)
        answers |= {f"{path} later": text for path, text in open_answers(lighthouse.address).items()}
        status = json.loads(answers["/api/status later"])
        for member in status["quorum"]["members"]:
            _refused_with(member["address"], strings(status), status["epoch"])
        cluster.tell_to_stop()
        cluster.results()
        for name in ("a", "b", "c"):
            logs = Path(cluster.folder.name).glob(f"{name}-*.log")
            answers[f"log of {name}"] = "".join(path.read_text() for path in logs)
        answers["log of the lighthouse"] = log.read_text()
    assert all(answers.values()) and "quorum" in answers["log of a"]
    for where, text in answers.items():
        assert "secret" not in text.lower(), where
        for secret in secrets_of_the_job(status["epoch"]):
            assert secret not in text, where


def _refused_with(address: str, words: set[str], epoch: int) -> None:
    """Nothing that was sent is the token, or a key of the quorum."""
    host, _, port = address.rpartition(":")
    for word in words:
        guesses = [Keyring(word).for_quorum(epoch, number) for number in (1, 2)]
        if len(word) % 2 == 0 and all(letter in "0123456789abcdef" for letter in word):
            guesses.append(Credential(f"quorum {epoch}.2", bytes.fromhex(word)))
        for guess in guesses:
            sock = socket.create_connection((host, int(port)), 20)
            with sock, pytest.raises((ChannelError, OSError)):
                greet_as_client(sock, guess, address)
