"""Tokens per second, MFU and GPUs of a real job, from its step marks and what nvidia-smi says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.channel import web_client

pytestmark = pytest.mark.usefixtures("forks")

#: As an H200 answers.
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=index*) printf '0, GPU-a, 97, 120345, 143771, 61, 655.20, NVIDIA H200\\n1, GPU-b, 95, 119871, 143771, 64, 649.83, NVIDIA H200\\n' ;;
esac
"""
TRAIN = """
import pathlib, time
import torch
import torch.distributed as dist
import allranks

dist.init_process_group("gloo")
over, step = torch.zeros(1), 0
while not over:
    allranks.step(step, tokens=1000, flops=4e12)
    time.sleep(0.05)
    over[0] = pathlib.Path("stop").exists()
    dist.all_reduce(over)
    step += 1
"""


@pytest.mark.timeout(120)
def test_a_job_shows_its_tokens_per_second_mfu_and_gpus(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "allranks", "run", "--job", f"tokens-{tmp_path.name}"]
    environment = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ALLRANKS_HISTORY": "off",
        "ALLRANKS_DIR": str(tmp_path / "boxes"),
    }  # fmt: skip
    log = tmp_path / "log"
    with log.open("w") as file:
        job = subprocess.Popen(
            [*command, "--standalone", "--nproc-per-node", "2", "train.py"],
            cwd=tmp_path, env=environment, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        line = ""
        while "MFU" not in line:
            assert job.poll() is None, log.read_text()
            if found := re.search(r"page http://(\S+?)/?\s", log.read_text()):
                page = json.loads(web_client.get(found[1], "/api/page", 5.0).body)
                line = page["line"]["text"]
            time.sleep(0.1)
        numbers = re.search(r" ([\d,.]+) steps/s, ([\d,]+) tokens/s, MFU (\d+)%", line)
        assert numbers, line
        steps, tokens, mfu = (float(text.replace(",", "")) for text in numbers.groups())
        assert tokens == pytest.approx(steps * 2000, rel=0.02)
        assert mfu == pytest.approx(100 * steps * 8e12 / (2 * 989e12), abs=1)
        assert page["sample"]["tokens_per_s"] == pytest.approx(tokens, rel=0.02)
        metrics = web_client.get(found[1], "/metrics", 5.0).body.decode()
        assert re.search(r"^allranks_tokens_per_second \d", metrics, re.M)
        assert re.search(r"^allranks_mfu_ratio 0\.\d", metrics, re.M)
        (node,) = json.loads(web_client.get(found[1], "/api/nodes", 5.0).body)["nodes"]
        seen = [(gpu["busy"], gpu["used_mb"], gpu["celsius"], gpu["watts"]) for gpu in node["gpus"]]
        assert seen == [(97, 120345, 61, 655), (95, 119871, 64, 650)]
    finally:
        (tmp_path / "stop").touch()
        job.wait(60)
    assert job.returncode == 0, log.read_text()
    command = [sys.executable, "-m", "allranks", "goodput", "allranks-incidents", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    account = json.loads(done.stdout)
    assert 0 < account["tokens"] <= 2000 * (account["step"] + 1)
