"""Plain programs on a GPU, under torchrun and under `allranks run`: they must print the same losses, bit by bit.

    gpu_plain.py OUT [--cpu] [--only NAME,NAME] [--backends nccl,nccl2,nccl-legacy,nccl-lazy]

The programs know nothing of us: a loop of collectives, DDP, FSDP2, Hugging Face's Trainer. Two ranks share one GPU. A backend
that this torch does not have is left out. With each backend one rank of DDP also hangs, and the verdict must name its rank
and line. Prints PASS or FAIL for each claim and writes OUT/gpu_plain.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_replicas import SHARED_GPU

HEAD = """
import os, sys, time
if CPU: os.environ["ACCELERATE_USE_CPU"] = "1"
rank = int(os.environ["RANK"]); os.environ["NCCL_HOSTID"] = f"host-{rank}"; os.environ["LOCAL_RANK"] = "0"
sys.modules["torchvision"] = sys.modules["torchaudio"] = None  # they may be of another torch
import torch, torch.distributed as dist
torch.manual_seed(5); device = torch.device("cpu" if CPU else "cuda:0")
if not CPU: torch.cuda.set_device(device)
def begin():
    dist.init_process_group("gloo" if CPU else BACKEND, **({} if CPU else {"device_id": device}))
def loss_of(value): os.write(1, f"LOSS {rank} {float(value).hex()}\\n".encode())  # whole lines
def load_next_shard():
    time.sleep(10_000)
"""
PROGRAMS = {
    "loop": """
begin()
x = torch.randn(64, device=device)
for step in range(20):
    y = x * (rank + 1); dist.all_reduce(y); parts = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(parts, y); dist.broadcast(x, 0); x = x + 0.1 * torch.stack(parts).mean(0).tanh(); loss_of(x.sum())
dist.destroy_process_group()
""",
    "ddp": """
begin()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    if HANG and step == 8 and rank == 1: load_next_shard()
    torch.manual_seed(100 * step + rank); optimizer.zero_grad()
    loss = model(torch.randn(16, 64, device=device)).square().mean(); loss.backward(); optimizer.step(); loss_of(loss)
dist.destroy_process_group()
""",
    "fsdp2": """
begin()
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to(device)
for layer in model: fully_shard(layer)
fully_shard(model); optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    torch.manual_seed(100 * step + rank); optimizer.zero_grad()
    loss = model(torch.randn(16, 64, device=device)).square().mean(); loss.backward(); optimizer.step(); loss_of(loss)
dist.destroy_process_group()
""",
    "trainer": """
import transformers, tempfile
config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
transformers.set_seed(3); model = transformers.GPT2LMHeadModel(config)
data = [{"input_ids": torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(n))} for n in range(64)]
for row in data: row["labels"] = row["input_ids"]
more = {"use_cpu": True} if CPU else {"ddp_backend": BACKEND}
args = transformers.TrainingArguments(tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, **more)
trainer = transformers.Trainer(model=model, args=args, train_dataset=data); trainer.train()
for row in trainer.state.log_history:
    if "loss" in row: loss_of(row["loss"])
""",
}
LIMIT_S = 120.0


def write(folder: Path, name: str, backend: str, cpu: bool, hang: bool) -> Path:
    """The program as a file of its own."""
    path = folder / f"{name}_{backend}_{'hang' if hang else 'ok'}.py"
    given = f"CPU, BACKEND, HANG, STEPS = {cpu}, {backend!r}, {hang}, {20_000 if hang else 20}\n"
    path.write_text(given + HEAD + PROGRAMS[name])
    return path


def environment() -> dict[str, str]:
    """Of a job whose two ranks share one GPU."""
    return {**os.environ, **SHARED_GPU, "MASTER_ADDR": "127.0.0.1"}


def losses(command: list[str], script: Path) -> tuple[int, list[str], str]:
    """Exit code, the losses of all ranks, and what went wrong in the job's own words."""
    done = subprocess.run(
        [*command, str(script)], capture_output=True, text=True, timeout=LIMIT_S, cwd=script.parent, env=environment()
    )  # fmt: skip
    found = sorted(re.findall(r"LOSS \d+ \S+", done.stdout + done.stderr))
    return done.returncode, found, (done.stdout + done.stderr)[-1500:]


def torchrun(port: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
    ]


def ours(port: int) -> list[str]:
    return [sys.executable, "-m", "allranks", "run", "--nproc-per-node", "2", "--master-port", str(port)]


def compare(name: str, script: Path, port: int) -> tuple[bool, str]:
    """Whether the program prints the same losses under both launchers."""
    try:
        theirs, with_us = losses(torchrun(port), script), losses(ours(port + 1), script)
    except subprocess.TimeoutExpired as error:
        return False, str(error)
    same = theirs[0] == with_us[0] == 0 and theirs[1] == with_us[1] and len(theirs[1]) >= 20
    if theirs[0]:
        return False, f"torchrun itself: {theirs[2]}"
    return (
        same,
        ""
        if same
        else f"torchrun {theirs[0]} {len(theirs[1])}, ours {with_us[0]} {len(with_us[1])}: {with_us[2]}",
    )


def hang(script: Path, port: int) -> tuple[bool, str]:
    """Whether the verdict on a hang names rank 1 and its line; SIGINT ends the job."""
    began = time.monotonic()
    with subprocess.Popen(
        [*ours(port), str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=script.parent, env=environment()
    ) as job:  # fmt: skip
        try:
            while time.monotonic() - began < LIMIT_S:
                found = [
                    json.loads(path.read_text())
                    for path in script.parent.glob("allranks-incidents/*/incident.json")
                ]
                verdicts = [one["verdict"] for one in found if one.get("verdict")]
                if verdicts:
                    said = f"{verdicts[0]['ranks']} {verdicts[0].get('where', '')} {time.monotonic() - began:.1f} s"
                    return verdicts[0]["ranks"] == [1] and "load_next_shard" in verdicts[0].get(
                        "where", ""
                    ), said
                time.sleep(0.5)
        finally:
            job.kill()
    return False, "no verdict"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", default=",".join(PROGRAMS))
    parser.add_argument("--backends", default="nccl,nccl2,nccl-legacy,nccl-lazy")
    parser.add_argument("--jobs", type=int, default=4)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="gpu-plain-"))
    claims = []
    for number, (backend, name) in enumerate(
        (backend, name) for backend in args.backends.split(",") for name in args.only.split(",")
    ):
        folder = root / f"{backend}-{name}"
        folder.mkdir()
        port = 23_000 + 10 * number
        claims.append(
            (
                f"{backend} {name}: the same losses",
                compare,
                (name, write(folder, name, backend, args.cpu, False), port),
            )
        )
        if name == "ddp":
            (folder / "hang").mkdir()
            claims.append(
                (
                    f"{backend} {name}: a hang is named",
                    hang,
                    (write(folder / "hang", name, backend, args.cpu, True), port + 5),
                )
            )
    verdicts, notes = {}, {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for claim, future in [(claim, pool.submit(check, *words)) for claim, check, words in claims]:
            verdicts[claim], notes[claim] = future.result()
            print(f"{'PASS' if verdicts[claim] else 'FAIL'}  {claim}  {notes[claim]}", flush=True)
    (args.out / "gpu_plain.json").write_text(json.dumps({"verdicts": verdicts, "numbers": notes}, indent=1))
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
