"""Restart recovery: `allranks run` with snapshots in its memory against plain torchrun with torch.save.

    python benchmarks/elastic.py [--quick] [--json]

The same script with two ranks; both save equally often; rank 1 gets kill -9. Lost time runs from the kill to the end
of the first step that had not been done before: noticing, restart, loading and the steps done again. The kill comes
when the job has settled (our spare processes are warm: a real job has run for hours). Plain torchrun often needs
several restarts on torch 2.13, or never comes back; so it is measured with the fix of `allranks run` in its environment
(the harder comparison), and without it too unless --quick.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "_elastic_script.py"
SETTING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
EVERY, PACE_S, SETTLE_S, LIMIT_S = 25, 0.02, 6.0, 60.0
RANKS = 2


class NoRecovery(Exception):
    """The job did not come back within the limit."""


def main() -> int:
    """Measures, prints, and with --json ends with one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one fault each, a small model: within 60 s")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # folders and processes are cleaned up on the way
    rounds, width = (1, 512) if args.quick else (3, 2048)
    ours = [measure("allranks", width, {}) for _ in range(rounds)]
    with_setting = [measure("torch", width, SETTING) for _ in range(rounds)]
    plain = [] if args.quick else [measure("torch", width, {}) for _ in range(rounds)]
    numbers: dict[str, object] = {"saved every steps": EVERY, "model MB": round(width * width * 4 / 1e6, 1)}
    ratios: dict[str, float] = {}
    for name, found in (
        ("allranks", ours),
        ("torchrun", with_setting),
        ("torchrun without the setting", plain),
    ):
        if found:
            numbers[name] = {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
    lost = statistics.median(one["lost_s"] for one in ours)
    for what, found in (("torchrun", with_setting), ("plain_torchrun", plain)):
        if found:
            ratios[f"lost_time_vs_{what}"] = round(
                lost / statistics.median(one["lost_s"] for one in found), 3
            )
    for name, value in {**numbers, **ratios}.items():
        print(f"{name:32} {value}", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        print(json.dumps({"name": "elastic", "ratios": ratios, "numbers": numbers, "machine": machine}))
    return 0


def measure(how: str, width: int, extra: dict[str, str]) -> dict[str, float]:
    """One run with one fault; the lost time and its parts in seconds. A job that stays away has lost the limit."""
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as name:
        folder = Path(name)
        words = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=5", str(SCRIPT)]
        words += [how, name, str(width), str(EVERY), str(PACE_S)]
        entry = ["-m", "torch.distributed.run"] if how == "torch" else ["-m", "allranks", "run", "--no-watch"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ALLRANKS_DIR": str(folder / "box"), **extra}
        with open(folder / "output", "wb") as out:
            agent = subprocess.Popen(
                [sys.executable, *entry, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
            )
        try:
            return _fault(folder, agent, how)
        except NoRecovery as error:
            print(f"{how}: {error}: counted as {LIMIT_S:g} s", file=sys.stderr)
            return {"lost_s": LIMIT_S, "restarts": 0.0}
        finally:
            _end(agent)


def _fault(folder: Path, agent: subprocess.Popen[bytes], how: str) -> dict[str, float]:
    try:
        _wait(agent, lambda: _rows(folder, 0) and _rows(folder, 1), folder, 120.0)
    except NoRecovery as error:
        raise SystemExit(f"{how}: the job did not start: {error}") from error
    settled = time.monotonic() + SETTLE_S
    while time.monotonic() < settled or (how == "allranks" and not _spares_warm(agent.pid)):
        if time.monotonic() > settled + LIMIT_S:
            print("the spare processes did not get warm", file=sys.stderr)
            break
        time.sleep(0.2)
    # in the middle between two saves
    _wait(agent, lambda: _last(folder) % EVERY == EVERY // 2, folder)
    victim = next(row["pid"] for row in reversed(_rows(folder, 1)) if "pid" in row)
    killed, before = time.time(), _last(folder)
    os.kill(victim, signal.SIGKILL)
    _wait(agent, lambda: any(_new(row, before, killed) for row in _rows(folder, 0)), folder)
    rows = _rows(folder, 0)
    back = [row for row in rows if "start" in row and row["restored"] > killed]
    caught_up = next(row["at"] for row in rows if _new(row, before, killed))
    last = back[-1]
    began = max(last["began"], killed)
    return {
        "lost_s": caught_up - killed, "until the script runs_s": began - killed,
        "importing_s": max(0.0, last["imported"] - began), "joining_s": last["joined"] - max(last["imported"], killed),
        "loading_s": last["restored"] - last["joined"], "steps again_s": caught_up - last["restored"],
        "steps again": float(before - last["start"]), "restarts": float(len(back)),
    }  # fmt: skip


def _new(row: dict[str, float], before: int, killed: float) -> bool:
    return "step" in row and row["step"] > before + 1 and row["at"] > killed + 0.2


def _last(folder: Path) -> int:
    return int(next((row["step"] for row in reversed(_rows(folder, 0)) if "step" in row), 0))


def _rows(folder: Path, rank: int) -> list[dict[str, float]]:
    path = folder / f"log-{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _wait(agent: subprocess.Popen[bytes], condition, folder: Path, limit_s: float = LIMIT_S) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + limit_s
    while not condition():
        if agent.poll() is not None:
            raise NoRecovery(
                f"the job ended with {agent.returncode}: {(folder / 'output').read_text()[-600:]}"
            )
        if time.monotonic() > deadline:
            raise NoRecovery(f"nothing for {limit_s:g} s")
        time.sleep(0.005)


def _spares_warm(agent: int) -> bool:
    """All spares are there and have not used the CPU for a moment."""
    first = _spare_ticks(agent)
    time.sleep(0.5)
    return len(first) == RANKS and first == _spare_ticks(agent)


def _spare_ticks(agent: int) -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
            if (
                int(fields[1]) == agent
                and b"allranks.launch.spares" in (path.parent / "cmdline").read_bytes()
            ):
                found[int(path.parent.name)] = int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return found


def _end(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    try:
        agent.wait(20)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


if __name__ == "__main__":
    sys.exit(main())
