"""A real job that hangs, with known secrets in every place where people keep them: nothing that it writes, sends or shows has one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.soak.world import find

from allranks.channel.keys import Keyring
from allranks.cli import main
from checkpoint.s3server import KEY, SECRET, S3Server

pytestmark = pytest.mark.usefixtures("forks")

TOKEN = "the-token-of-a-job-with-secrets"
#: of the environment and of the script's command line
HIDDEN = {"WANDB_API_KEY": "wandb-5f3e", "HF_TOKEN": "hf-a71c", "PGPASSWORD": "pg-99d0"}
ARGUMENT, PASSWORD, PATH = "argument-77aa", "hook-password-1b2c", "hook-path-3d4e"
TRAIN = """
import sys, time, torch, torch.distributed as dist
api_key = sys.argv[2]
dist.init_process_group("gloo")
for step in range(1000):
    if step == 30 and dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(4))
"""


@contextmanager
def refusing_webhook() -> Iterator[tuple[str, list[bytes]]]:
    """(address, requests) of a server that answers 500, so that the agent has something to complain of."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection:
                    requests.append(connection.recv(1 << 20))
                    connection.sendall(b"HTTP/1.1 500 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", requests
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shown_by_commands(
    environment: dict[str, str], lighthouse: str, job: str, folder: Path
) -> dict[str, bytes]:
    """What people run, and send to others, when a job hangs; the files that it leaves too."""
    folder.mkdir()
    found = {}
    for words in (
        ["doctor", "--lighthouse", lighthouse, "--s3", "ready", "--s3-endpoint", environment["AWS_ENDPOINT_URL"],
         "--etcd", f"http://root:{PASSWORD}@127.0.0.1:9"],
        ["doctor", "--json", "--s3", "ready", "--s3-endpoint", f"http://me:{PASSWORD}@127.0.0.1:9"],
        ["checkpoint", "ls", "s3://ready/x", "--option", f"endpoint=http://me:{PASSWORD}@127.0.0.1:9", "--option", "max_retries=0"],
        ["stacks", "--job", job],
        ["lighthouse", "status", job, "--json"],
    ):  # fmt: skip
        command = [sys.executable, "-m", "allranks", *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=120, check=False
        )
        found[" ".join(words[:2])] = done.stdout + done.stderr
    return found | files_of(folder)


def open_answers(lighthouse: str) -> dict[str, bytes]:
    found = {}
    for path in ("/", "/api/status", "/metrics", "/status", "/healthz", "/openapi.json"):
        with urllib.request.urlopen(f"http://{lighthouse}{path}", timeout=20) as answer:
            found[path] = answer.read()
    with urllib.request.urlopen(f"http://{lighthouse}/api/events", timeout=20) as stream:
        found["/api/events"] = stream.readline()
    return found


def test_nothing_that_a_hanging_job_writes_sends_or_shows_has_a_secret(s3: S3Server, tmp_path: Path) -> None:
    """Black boxes, stacks, logs, incidents, their copy in the bucket, the webhook's body, open answers, `ps`, doctor."""
    pytest.importorskip("obstore")
    name, log = f"secrets-{os.getpid()}", tmp_path / "agent.log"
    (tmp_path / "train.py").write_text(TRAIN)
    with refusing_webhook() as (host, requests), log.open("wb") as out:
        environment = {
            **os.environ, **HIDDEN, "ALLRANKS_SOAK": name, "ALLRANKS_TOKEN": TOKEN, "ALLRANKS_DIR": str(tmp_path / "boxes"),
            "ALLRANKS_WEBHOOK": f"http://me:{PASSWORD}@{host}/{PATH} slack:http://{host}/{PATH}",
            "AWS_ENDPOINT_URL": s3.endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
        }  # fmt: skip
        agent = subprocess.Popen(
            [sys.executable, "-m", "allranks", "run", "--job", name, "--standalone", "--nproc-per-node", "2", "--notice-s", "2",
             "--verbose", "--incidents", str(tmp_path / "incidents"), "--incident-store", f"s3://ready/{name}",
             str(tmp_path / "train.py"), "--api-key", ARGUMENT],
            cwd=tmp_path, env=environment, stdout=out, stderr=out,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 200
            while b"copied to the object store" not in (said := log.read_bytes()) or len(requests) < 4:
                assert time.monotonic() < deadline and agent.poll() is None, said.decode()
                time.sleep(0.2)
            lighthouse = said.partition(b"lighthouse at ")[2].partition(b",")[0].decode()
            everything = open_answers(lighthouse) | shown_by_commands(
                environment, lighthouse, name, tmp_path / "shown"
            )
            for pid in find(name):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                everything[f"ps {pid}"] = b"" if ARGUMENT.encode() in words else words  # the user's own words
        finally:
            agent.send_signal(signal.SIGINT)
            try:
                agent.wait(60)
            finally:
                agent.kill()
                for pid in find(name):
                    os.kill(pid, signal.SIGKILL)
    everything |= {"log": log.read_bytes()} | {f"sent {i}": body for i, body in enumerate(requests)}
    everything |= files_of(tmp_path / "incidents") | files_of(tmp_path / "boxes") | in_bucket(s3, name)
    assert len([path for path in everything if "incidents" in path]) > 3 and len(requests) >= 4
    token_file = str(tmp_path / "boxes" / "token")
    assert everything.pop(token_file).strip() == TOKEN.encode() and os.stat(token_file).st_mode & 0o77 == 0
    keys = [Keyring(TOKEN).for_purpose(purpose).key for purpose in ("lighthouse", "snapshots", "evidence")]
    texts = [TOKEN, *HIDDEN.values(), ARGUMENT, PASSWORD, PATH, SECRET, *(key.hex() for key in keys)]
    for where, data in everything.items():
        hidden = {PATH} if where.startswith("sent") else set()  # the request itself must name it
        for text in {*texts} - hidden:
            assert text.encode() not in data, f"{text} in {where}"


CRASH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    raise OSError("403 for https://me:xq7-crash-1@host/k?X-Amz-Credential=xq7-crash-2&X-Amz-Signature=xq7-crash-3 (Authorization: Bearer xq7-crash-4)")
dist.all_reduce(torch.ones(4))
"""
JOB_FILE = """
training: {{script: {script}, args: [--api-key, xq7-crash-5], wandb_api_key: xq7-crash-6}}
checkpoint: {{nvme_path: {folder}/checkpoints, s3_endpoint_url: "http://me:xq7-crash-7@127.0.0.1:9", s3_options: {{secret_access_key: xq7-crash-8}}}}
recovery: {{webhooks: ["http://me:xq7-crash-9@{host}/xq7-crash-a", "slack:http://{host}/xq7-crash-b?token=xq7-crash-c"]}}
elastic: {{nproc_per_node: 2}}
"""


def test_nothing_of_a_crash_has_a_secret_of_its_error_or_of_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program's own output has its error as it was raised; what allranks makes of it has it without passwords and keys."""
    name, log = f"ended-{os.getpid()}", tmp_path / "agent.log"
    (tmp_path / "train.py").write_text(CRASH)
    environment = {
        **os.environ,
        "ALLRANKS_SOAK": name,
        "ALLRANKS_TOKEN": TOKEN,
        "ALLRANKS_DIR": str(tmp_path / "boxes"),
    }
    with refusing_webhook() as (host, requests), log.open("wb") as out:
        job = tmp_path / "job.yaml"
        job.write_text(JOB_FILE.format(script=tmp_path / "train.py", folder=tmp_path, host=host))
        subprocess.run(
            [sys.executable, "-m", "allranks", "run", "--config", str(job), "--job", name, "--standalone", "--verbose",
             "--incidents", str(tmp_path / "incidents")],
            cwd=tmp_path, env=environment, stdout=out, stderr=out, timeout=200, check=False,
        )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLRANKS_DIR", str(tmp_path / "boxes"))
    everything = files_of(tmp_path / "incidents") | files_of(tmp_path / "boxes")
    everything = {
        path: data for path, data in everything.items() if "/boxes/logs/" not in path
    }  # its own output
    for words in (["diagnose", "incidents"], ["diagnose", "incidents", "--json"], ["diagnose", "boxes", "agent.log", "--html", "page.html"],
                  ["dump", name, "--list"], ["dump", name, "--list", "--json"], ["status", name], ["status", name, "--json"],
                  ["doctor", "explain", "agent.log"], ["doctor", "explain", "agent.log", "--json"],
                  ["config", "show", "job.yaml"], ["config", "check", "job.yaml", "--json"]):  # fmt: skip
        main(words)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err, printed.err
        everything[" ".join(words)] = (printed.out + printed.err).encode()
    everything["page.html"] = (tmp_path / "page.html").read_bytes()
    everything |= {f"sent {i}": body.partition(b"\r\n\r\n")[2] for i, body in enumerate(requests)}
    own = [
        line
        for line in log.read_bytes().splitlines()
        if b"OSError: 403" not in line and b"raise OSError" not in line
    ]
    everything["log without the program's own words"] = b"\n".join(own)
    assert len(requests) >= 2 and any(b"403 for https://me:***@host" in data for data in everything.values())
    for where, data in everything.items():
        assert b"xq7-crash-" not in data, where


def in_bucket(s3: S3Server, name: str) -> dict[str, bytes]:
    """The copies of the incident, read with the store's own library."""
    import obstore
    from obstore.store import S3Store

    store = S3Store("ready", endpoint=s3.endpoint, access_key_id=KEY, secret_access_key=SECRET, region="us-east-1",
                    client_options={"allow_http": True})  # fmt: skip
    paths = [row["path"] for page in obstore.list(store, prefix=name) for row in page]
    assert any(path.endswith("incident.json") for path in paths)
    return {f"s3://{path}": bytes(obstore.get(store, path).bytes()) for path in paths}
