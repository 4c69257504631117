"""GPT-2 of `transformers` in replicas on one GPU, with nothing warmed up: allranks, and torchft where its wheel is given.

    gpu_first_contact.py OUT [--cold=20] [--kills=10] [--late=20] [--side=4] [--starts=3] [--torchft=FOLDER] [--cpu]

1. `--cold` times: `allranks run --replicas 3` of a plain script; all three replicas must train from the first step on.
2. Three recorded replicas by hand: first common step, `--kills` times kill -9 and rejoin (a started process stands by, so that a
   rejoin does not wait for imports), shutdown, an exception.
3. `--late` times: a replica is killed and started again in the last second of a training; nothing may be trained again.
4. The same as 2 with torchft (one kill: its survivors need its timeout, and did not survive a second one), for the ratios;
   and `--starts` times three replicas of either library alternately, up to their first common step.
`--side` jobs of 1 and of 3 run at the same time; 0 of anything leaves it out, and numbers of earlier slices in OUT are kept.
Prints PASS or FAIL per claim and writes OUT/gpu_first_contact.json. `--cpu` rehearses it over gloo.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_replicas import SHARED_GPU, LighthouseProcess, Replica, say

CPU = "--cpu" in sys.argv
NAMES = ("r0", "r1", "r2")


def option(name: str, default: str) -> str:
    found = [word.split("=", 1)[1] for word in sys.argv if word.startswith(f"--{name}=")]
    return found[-1] if found else default


def make_model() -> tuple[Any, Any, Any]:
    """A small GPT-2 as a user would make it, its optimizer, and a function that makes a batch."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    device = torch.device("cpu" if CPU else "cuda:0")
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2) if CPU else GPT2Config(n_layer=6)
    model = GPT2LMHeadModel(config).to(device)
    model = model if CPU else model.bfloat16()
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        lambda: torch.randint(0, 50257, (2, 32 if CPU else 256), device=device),
    )


def make_manager(library: str, load: Any, save: Any) -> tuple[Any, Any, Any]:
    """(manager, DistributedDataParallel, Optimizer) of either library."""
    from datetime import timedelta

    import torch

    if library == "allranks":
        from allranks.torchft import (
            DistributedDataParallel,
            Manager,
            Optimizer,
            ProcessGroupGloo,
            ProcessGroupNCCL,
        )

        group = ProcessGroupGloo(30) if CPU else ProcessGroupNCCL(30, device=torch.device("cuda:0"))
        return Manager(group, load, save, min_replica_size=1), DistributedDataParallel, Optimizer
    from torch.distributed import TCPStore

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo, ProcessGroupNCCL

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=30)
    manager = Manager(
        pg=(ProcessGroupGloo if CPU else ProcessGroupNCCL)(timeout=limit),
        load_state_dict=load, state_dict=save, min_replica_size=1, rank=0, world_size=1, timeout=limit,
        replica_id=os.environ["ALLRANKS_REPLICA"], store_addr="127.0.0.1", store_port=store.port,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
    )  # fmt: skip
    manager.keep_store = store
    return manager, DistributedDataParallel, Optimizer


def tiny_model() -> tuple[Any, Any, Any]:
    """For the end of a training: nothing to import, steps of 50 ms."""
    import torch

    device = torch.device("cpu" if CPU else "cuda:0")
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)).to(device)

    def batch() -> Any:
        time.sleep(0.05)
        return torch.randn(8, 16, device=device)

    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch


def worker(library: str, out: Path, steps: int) -> None:
    """One replica; trains to `steps`, or until `out/stop` names a step. `out/raise` makes it fail like a user's bug.

    With STANDBY it waits for that file before it is ready.
    """
    import logging

    # else NCCL refuses two ranks on one GPU
    os.environ.setdefault("NCCL_HOSTID", os.environ["ALLRANKS_REPLICA"])
    import torch

    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s %(message)s")
    for noisy in ("torch", "transformers", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    tiny = "--tiny" in sys.argv
    model, inner, batch = tiny_model() if tiny else make_model()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])
        say("healed")

    save = lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}  # noqa: E731
    manager, parallel, wrapper = make_manager(library, load, save)
    ddp, optimizer = parallel(manager, model), wrapper(manager, inner)
    if standby := os.environ.get("STANDBY"):
        say("standing-by")
        while not Path(standby).exists():
            time.sleep(0.005)
    say("ready")
    while manager.current_step() < steps:
        x, before = batch(), manager.current_step()
        optimizer.zero_grad()
        (ddp(x).square().mean() if tiny else ddp(input_ids=x, labels=x).loss).backward()
        optimizer.step()
        if not CPU:
            torch.cuda.synchronize()
        after = manager.current_step()
        say("commit" if after > before else "retry", after, manager.num_participants())
        if (out / f"raise-{os.environ['ALLRANKS_REPLICA']}").exists():
            say("raised")
            raise ValueError("a bug of the user")
        if steps == 10**9 and (out / "stop").exists():
            steps = int((out / "stop").read_text())
    total = sum(p.detach().double().sum().item() for p in model.parameters())
    say("done", manager.current_step(), manager.num_participants(), repr(total))
    manager.shutdown()
    if library == "torchft":
        os._exit(0)


def command_of(library: str, out: Path, steps: int, *more: str) -> list[str]:
    words = [sys.executable, __file__, "worker", library, str(out), str(steps), *more]
    return [*words, *(["--cpu"] if CPU else [])]


# ---- 1. cold starts ----

COLD_STEPS = 6


def cold_run(out: Path, number: int) -> tuple[bool, float]:
    """`allranks run --replicas 3`, unwarmed: whether three members trained from the first step to the last."""
    log = out / f"cold-{number}.log"
    words = [sys.executable, "-m", "allranks", "run", "--replicas", "3"]
    words += command_of("allranks", out, COLD_STEPS)[1:]
    began = time.monotonic()
    with open(log, "w") as file:
        done = subprocess.run(
            ["timeout", "120", *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
            env={**os.environ, **SHARED_GPU},
        )
    found = re.findall(r"^\[rank \d\] [\d.]+ (commit|done) (\d+) (\d+) (\S+)$", log.read_text(), re.MULTILINE)
    commits = sorted((int(step), members) for kind, step, members, _ in found if kind == "commit")
    ends = [extra for kind, _, _, extra in found if kind == "done"]
    expected = sorted((step, "3") for step in range(1, COLD_STEPS + 1) for _ in NAMES)
    good = done.returncode == 0 and commits == expected and len(ends) == 3 and len(set(ends)) == 1
    return good, round(time.monotonic() - began, 1)


def cold_runs(out: Path, count: int) -> dict[str, Any]:
    with ThreadPoolExecutor(int(option("side", "4"))) as pool:
        found = list(pool.map(lambda number: cold_run(out, number), range(count)))
    return {"runs": count, "good": sum(good for good, _ in found), "seconds": [took for _, took in found]}


# ---- 2. kills and rejoins, and 4. ----


class Standbys:
    """For each replica a process that has imported and built everything, and joins when it is released."""

    def __init__(self, start: Callable[..., Replica], out: Path) -> None:
        self.start, self.out, self.count = start, out, 0
        self.waiting: dict[str, tuple[Replica, Path]] = {}

    def add(self, name: str) -> None:
        self.count += 1
        go = self.out / f"go-{self.count}"
        self.waiting[name] = (self.start(name, {"STANDBY": str(go)}), go)

    def release(self, name: str) -> Replica:
        replica, go = self.waiting.pop(name)
        replica.wait("standing-by", limit_s=90)
        go.touch()
        return replica

    def kill(self) -> None:
        for replica, _ in self.waiting.values():
            replica.kill()


def start_lighthouse(library: str, out: Path) -> tuple[Any, str]:
    if library == "allranks":
        lighthouse = LighthouseProcess(out)
        return lighthouse, lighthouse.address
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
    script = out / "torchft_lighthouse.py"  # it reads sys.argv itself, from the first argument on
    script.write_text("from torchft._torchft import lighthouse_main\n\nlighthouse_main()\n")
    words = [sys.executable, str(script), "--min_replicas", "1", "--quorum_tick_ms", "100"]
    words += ["--join_timeout_ms", "3000", "--bind", f"127.0.0.1:{port}"]
    process = subprocess.Popen(words)
    time.sleep(3)
    return process, os.environ["TORCHFT_LIGHTHOUSE"]


def by_hand(library: str, out: Path, kills: int) -> dict[str, Any]:
    """First common step, kills and rejoins, the end; without kills only the first."""
    out.mkdir(parents=True)
    result: dict[str, Any] = {}
    lighthouse, address = start_lighthouse(library, out)
    command = command_of(library, out, 10**9)
    if library == "allranks":
        command[1:1] = ["-m", "allranks.recording"]  # as under `allranks run`
    start = lambda name, env=None: Replica(name, command, address, out, env=env)  # noqa: E731
    replicas = {name: start(name) for name in NAMES}
    standbys = Standbys(start, out)
    try:
        ready = max(one.wait("ready", limit_s=90) for one in replicas.values())
        together = max(one.wait("commit", participants=3, limit_s=90) for one in replicas.values())
        result["first_common_step_s"] = round(together - ready, 3)
        if not kills:
            return result
        time.sleep(3)
        commits = replicas["r0"].commits()[-12:]
        result["step_s"] = round(statistics.median(b - a for a, b in itertools.pairwise(commits)), 3)
        victims = [NAMES[turn % 3] if library == "allranks" else "r1" for turn in range(1, kills + 1)]
        for name in NAMES if kills > 1 else victims[:1]:
            standbys.add(name)
        for turn, name in enumerate(victims):
            kill_and_rejoin(result, replicas, standbys, name)
            if turn + 3 < len(victims):
                standbys.add(name)
        finish_by_hand(result, library, out, replicas)
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        result["error"] = str(error)[-2500:]
        result["stacks"] = [one.stacks()[-8000:] for one in replicas.values()]
    finally:
        standbys.kill()
        for one in replicas.values():
            one.kill()
        lighthouse.close() if library == "allranks" else lighthouse.kill()
    return result


def starts(out: Path, count: int, libraries: list[str]) -> dict[str, Any]:
    """Seconds from "all are ready" to the first common step, of the libraries alternately."""
    found: dict[str, Any] = {library: [] for library in libraries}
    for number in range(count):
        for library in libraries:
            one = by_hand(library, out / f"{library}-{number}", 0)
            found[library].append(one.get("first_common_step_s", one.get("error")))
    return found


def kill_and_rejoin(
    result: dict[str, Any], replicas: dict[str, Replica], standbys: Standbys, name: str
) -> None:
    victim = replicas.pop(name)
    at = time.monotonic()
    victim.kill()
    after = [one.wait("commit", at, 2, 90) - at for one in replicas.values()]
    result.setdefault("kill_to_commit_s", []).append(round(max(after), 3))
    time.sleep(1.0)  # the steps of two are as long as always before the third comes
    back = standbys.release(name)
    ready = back.wait("ready", limit_s=60)
    common = back.wait("commit", ready, 3, 60)
    result.setdefault("ready_to_common_step_s", []).append(round(common - ready, 3))
    time.sleep(0.5)
    gaps = []
    for one in replicas.values():
        around = [when for when in one.commits() if ready - 0.5 < when <= common + 0.5]
        gaps.append(max(b - a for a, b in itertools.pairwise(around)))
    result.setdefault("rejoin_gap_s", []).append(round(max(gaps), 3))
    replicas[name] = back


def finish_by_hand(result: dict[str, Any], library: str, out: Path, replicas: dict[str, Replica]) -> None:
    if library == "allranks":
        (out / "raise-r1").touch()
        raised = replicas["r1"].wait("raised")
        replicas["r1"].process.wait(60)
        result["exception_to_exit_s"] = round(time.monotonic() - raised, 3)
        replicas.pop("r1")
    last = int([e for e in replicas["r0"].events() if e[1] == "commit"][-1][2])
    (out / "stop").write_text(str(last + 10))
    ends = []
    for one in replicas.values():
        done = one.wait("done", limit_s=60)
        one.process.wait(60)
        ends.append(round(time.monotonic() - done, 3))
    result["done_to_exit_s"] = max(ends)
    results = {event[4] for one in replicas.values() for event in one.events() if event[1] == "done"}
    result["equal"] = len(results) == 1


# ---- 3. restarted in the last second ----

LATE_STEPS = 60  # of 50 ms


def late_restart(out: Path, number: int) -> str:
    """One training, one of whose replicas is killed and started again in its last second; what went wrong, or ""."""
    out.mkdir(parents=True)
    lighthouse = LighthouseProcess(out)
    command = command_of("allranks", out, LATE_STEPS, "--tiny")
    start = lambda name, env=None: Replica(name, command, lighthouse.address, out, env=env)  # noqa: E731
    replicas: dict[str, Replica] = {}
    standbys, spare = Standbys(start, out), Standbys(start, out)
    spare.count = 100
    for name in NAMES:
        standbys.add(name)
    spare.add("r1")
    try:
        for replica, _ in (*standbys.waiting.values(), *spare.waiting.values()):
            replica.wait("standing-by", limit_s=90)
        replicas = {name: standbys.release(name) for name in NAMES}
        kill_at = LATE_STEPS - 1 - number % 20  # 0 to 20 steps before the end
        victim = replicas["r1"]
        while last_step(victim) < kill_at:
            if victim.process.poll() is not None:
                return f"r1 exited {victim.process.returncode} before it was killed: {victim.errors()}"
            time.sleep(0.002)
        replicas.pop("r1").kill()
        killed_at = last_step(victim)
        late = spare.release("r1")
        for one in (*replicas.values(), late):
            one.process.wait(90)
        codes = [one.process.returncode for one in (*replicas.values(), late)]
        ends = {
            event[4] for one in (*replicas.values(), late) for event in one.events() if event[1] == "done"
        }
        again = [
            int(event[2]) for event in late.events() if event[1] == "commit" and int(event[2]) < killed_at
        ]
        if codes != [0, 0, 0] or len(ends) != 1 or again:
            return f"kill at {killed_at}: exit codes {codes}, results {ends}, trained again {again}: {late.errors()}"
        return ""
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
        return str(error)[-2500:]
    finally:
        standbys.kill()
        spare.kill()
        for one in replicas.values():
            one.kill()
        lighthouse.close()


def last_step(replica: Replica) -> int:
    """That it has committed; 0 before the first."""
    steps = [int(event[2]) for event in replica.events() if event[1] == "commit"]
    return steps[-1] if steps else 0


def late_restarts(out: Path, count: int) -> dict[str, Any]:
    with ThreadPoolExecutor(int(option("side", "4"))) as pool:
        wrong = list(pool.map(lambda number: late_restart(out / str(number), number), range(count)))
    return {"runs": count, "good": wrong.count(""), "wrong": [text for text in wrong if text][:3]}


def claims(found: dict[str, Any]) -> dict[str, bool]:
    """What must hold, from the numbers that are there."""
    held: dict[str, bool] = {}
    ours, peer = found.get("allranks", {}), found.get("torchft", {})
    for part, claim in (
        ("cold", "cold starts train with three members from the first step on"),
        ("late", "a replica restarted in the last second trains nothing again"),
    ):
        if part in found:
            runs, good = found[part]["runs"], found[part]["good"]
            held[f"{claim}: {runs} of {runs}"] = good == runs
    if "starts" in found and "torchft" in found["starts"]:
        mine, theirs = (statistics.median(found["starts"][name]) for name in ("allranks", "torchft"))
        held["first common step at most torchft's, medians of alternating starts"] = mine <= theirs
    if ours:
        held["no survivor crashed or hung"] = "error" not in ours
    if not ours or "error" in ours:
        return held
    step, gap = ours["step_s"], statistics.median(ours.get("rejoin_gap_s", [0.0]))
    kill = statistics.median(ours.get("kill_to_commit_s", [0.0]))
    held |= {
        "kill -9 -> next commit, median at most 2 steps + 0.1 s": kill <= 2 * step + 0.1,
        "rejoin: longest gap of the others, median at most 1 step + 0.3 s": gap <= step + 0.3,
        "shutdown -> exit at most 3 s": ours["done_to_exit_s"] <= 3.0,
        "exception -> exit at most 3 s": ours["exception_to_exit_s"] <= 3.0,
        "equal parameters at the end": ours["equal"],
    }
    if "starts" not in found and "first_common_step_s" in peer:
        common = ours["first_common_step_s"] <= peer["first_common_step_s"]
        held["first common step at most torchft's"] = common
    if "rejoin_gap_s" in peer:
        held["rejoin gap at most 0.3 x torchft's"] = gap <= 0.3 * statistics.median(peer["rejoin_gap_s"])
    return held


def main() -> int:
    out = Path(sys.argv[1])
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"first-contact-{os.getpid()}"
    path = out / "gpu_first_contact.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    found: dict[str, Any] = kept.get("numbers", {})

    def measure(part: str, run: Callable[[], dict[str, Any]]) -> None:
        found[part] = run()
        print(f"{part} {json.dumps(found[part])}", flush=True)
        path.write_text(json.dumps({"verdicts": claims(found), "numbers": found}, indent=1))

    if cold := int(option("cold", "20")):
        measure("cold", lambda: cold_runs(out, cold))
    if kills := int(option("kills", "10")):
        measure("allranks", lambda: by_hand("allranks", folder / "allranks", kills))
    if late := int(option("late", "20")):
        measure("late", lambda: late_restarts(folder / "late", late))
    torchft = option("torchft", "")
    if count := int(option("starts", "0")):
        variables = dict(os.environ)
        os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{torchft}"
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "30"
        libraries = ["allranks", *(["torchft"] if torchft else [])]
        measure("starts", lambda: starts(folder / "starts", count, libraries))
        os.environ |= variables
    if torchft and option("peer", "1") != "0":
        os.environ["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{torchft}"
        os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = "30"
        measure("torchft", lambda: by_hand("torchft", folder / "torchft", 1))
    held = claims(found)
    for claim, holds in held.items():
        print(f"{'PASS' if holds else 'FAIL'}  {claim}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
