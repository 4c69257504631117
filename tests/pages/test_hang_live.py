"""The page of a real job that hangs at its fifth step: amber from the agent's suspicion, red from its verdict."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allranks.channel import web_client
from pages.gallery import Visit, running_browser

pytestmark = pytest.mark.everything

SCRIPT = """
import time
import torch
import torch.distributed as dist
import allranks

dist.init_process_group("gloo")

def load_batch(step):
    time.sleep(600 if step == 5 and dist.get_rank() == 1 else 0.2)

for step in range(1000):
    allranks.step(step, loss=1 / (step + 1))
    load_batch(step)
    dist.all_reduce(torch.ones(4))
"""
#: Notes when the first line changes its colour.
OBSERVE = """() => {
  window.changes = [];
  const note = () => { const now = document.getElementById("now"); changes.push([Date.now() / 1000, now.className, document.getElementById("sentence").textContent]); };
  new MutationObserver(note).observe(document.getElementById("now"), { attributes: true });
}"""


@pytest.fixture(scope="module")
def browser(keep_child: set[int]) -> Iterator[Any]:
    with running_browser(keep_child) as running:
        yield running


@pytest.mark.usefixtures("forks")
def test_amber_within_two_seconds_of_the_suspicion_and_red_within_one_of_the_verdict(
    browser: Any, tmp_path: Path
) -> None:
    """Never green after it; `status` says the same; the incident is on the page with the line of the guilty rank."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "allranks",
        "run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "--notice-s",
        "6",
        "--quiet",
    ]
    log = (tmp_path / "log").open("w+")
    job = subprocess.Popen(
        [*command, "--job", f"live-{tmp_path.name}", str(script)], cwd=tmp_path, stderr=log, stdout=log
    )
    try:
        address = ""
        while not address:
            assert job.poll() is None
            found = re.search(r"page (http://\S+)", (tmp_path / "log").read_text())
            address = found[1] if found else ""
            time.sleep(0.05)
        visit = Visit(browser, address)
        visit.page.wait_for_selector("body[data-ready=yes]")
        visit.page.evaluate(OBSERVE)
        visit.page.wait_for_selector("#now.bad", timeout=120_000)
        changes = visit.page.evaluate("changes")
        line = visit.page.inner_text("#sentence")
        (path,) = (tmp_path / "allranks-incidents").glob("*/incident.json")
        moments = {one["name"]: one["at"] for one in json.loads(path.read_text())["timeline"]}
        amber = next(at for at, name, words in changes if "warn" in name and words.startswith("Looking"))
        red = next(at for at, name, _ in changes if "bad" in name)
        assert amber - moments["noticed"] < 2.0 and red - moments["verdict"] < 1.0, (changes, moments)
        assert not [words for at, name, words in changes if at > amber and "good" in name]
        assert line.startswith("Hung for ") and "at step 5: rank 1" in line and "load_batch" in line
        status = subprocess.run(
            [sys.executable, "-m", "allranks", "status", f"live-{tmp_path.name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "load_batch" in status.splitlines()[1] and status.splitlines()[1].startswith("Hung for")
        metrics = web_client.get(address.split("/")[2], "/metrics", timeout_s=20).body.decode()
        assert 'allranks_training{state="bad"} 1' in metrics
        visit.page.locator(".incident.bad .evidence .source .hit").wait_for()
        assert visit.errors == []
        visit.page.close()
    finally:
        job.terminate()
        job.wait(60)
        log.close()
