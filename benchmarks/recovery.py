"""How long training stalls: seconds from a fault to the survivor's next committed step, and the like.

    python benchmarks/recovery.py [--quick] [--json] [--only allranks|torchft]

allranks and torchft 0.2.0 (in its own virtual environment, its crashing DDP hook repaired) train the same model
on the same machine, two replicas over gloo, both at their default settings. Each number is the median of its
rounds. Faults: kill -9, good-bye, SIGSTOP, a cut network (where network namespaces can be made), a hanging main
thread (evicted through the lighthouse), a killed lighthouse. Also: healing a 100 MB model, rounds of both
libraries in turn (the stall also against its floor, an ordinary step of the two); the cost of a step; crashes of
survivors; members lost by mistake on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _lighthouse_torchft import find_server
from _recovery_replicas import HERE, Library, Lighthouse, Replica, pair, say, second_network

TINY = {"width": 64, "layers": 2, "steps": 10**9, "compute_s": 0.005}
# 100.8 MB of parameters, all of them trained; as much again of optimizer state; a twelfth trained (a short step).
HEAVY = {"width": 1024, "layers": 24, "steps": 10**9, "rows": 2}
HEAVIER = {**HEAVY, "momentum": 0.9}
HEAVY_FROZEN = {**HEAVY, "frozen": 22}


# ---- what is measured -------------------------------------------------------------------------------------


def kill(library: Library, rounds: int) -> tuple[list[float], int]:
    """kill -9 at a random moment: seconds until the survivor's next commit, and how many survivors crashed."""
    times, crashes = [], 0
    for _ in range(rounds):
        try:
            with pair(library, TINY) as (survivor, victim, _lighthouse):
                time.sleep(random.uniform(0, 0.05))
                at = time.monotonic()
                os.kill(victim.pid, signal.SIGKILL)
                times.append(survivor.wait("commit", after=at, participants=1).at - at)
        except RuntimeError as error:
            say(f"  {error}")
            crashes += 1
    return times, crashes


def leave(library: Library, rounds: int) -> tuple[list[float], int]:
    """A good-bye between two steps: seconds until the survivor's next commit; steps that it had to retry."""
    times, retries = [], 0
    for _ in range(rounds):
        with pair(library, TINY) as (survivor, victim, _lighthouse):
            os.kill(victim.pid, signal.SIGUSR1)
            at = victim.wait("leave").at
            times.append(survivor.wait("commit", after=at, participants=1).at - at)
            retries += sum(e.kind == "retry" and e.at > at for e in survivor.events())
    return times, retries


def freeze(library: Library) -> float:
    with pair(library, TINY) as (survivor, victim, _lighthouse):
        at = time.monotonic()
        os.kill(victim.pid, signal.SIGSTOP)
        return survivor.wait("commit", after=at, participants=1).at - at


def hang(library: Library) -> float:
    """The victim's main thread hangs inside a step; an operator (or the closed loop) evicts it."""
    from allranks.lighthouse.client.client import Client, ClientOptions

    with pair(library, TINY) as (survivor, victim, lighthouse):
        os.kill(victim.pid, signal.SIGUSR2)
        victim.wait("hang")
        with Client(ClientOptions(addresses=(lighthouse.address,), role="observer")) as client:
            at = time.monotonic()
            client.evict("b", "no progress")
            return survivor.wait("commit", after=at, participants=1).at - at


def lighthouse_away(library: Library, for_s: float) -> tuple[float, int]:
    """The lighthouse is killed and back after some seconds: longest pause between commits, steps retried."""
    with pair(library, TINY) as (survivor, _other, lighthouse):
        at = time.monotonic()
        lighthouse.kill()
        time.sleep(for_s)
        lighthouse.start()
        back = time.monotonic()
        survivor.wait("commit", after=back, count=20)
        return longest_gap(survivor, at, time.monotonic()), sum(
            e.kind == "retry" and e.at > at for e in survivor.events()
        )


def heal(libraries: list[Library], model: dict[str, object], rounds: int) -> dict[str, dict[str, float]]:
    """A replica of a 100 MB model dies and comes back: ready -> healed -> its gradients count; the other's pause.

    Rounds of the libraries in turn: what else the machine does meanwhile hits all of them alike.
    """
    found: dict[str, list[dict[str, float]]] = {library.name: [] for library in libraries}
    for _ in range(rounds):
        for library in libraries:
            found[library.name].append(heal_once(library, model))
    return {
        name: {what: statistics.median(one[what] for one in taken) for what in taken[0]}
        for name, taken in found.items()
    }


def heal_once(library: Library, model: dict[str, object]) -> dict[str, float]:
    with pair(library, model, warm=5) as (survivor, victim, lighthouse):
        usual = [e.at for e in survivor.events() if e.kind == "commit" and e.participants == 2]
        normal = statistics.median(b - a for a, b in itertools.pairwise(usual))
        at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        survivor.wait("commit", after=at, participants=1, count=3)
        back = library.start("b", lighthouse.address, **model)
        ready = back.wait("ready").at
        healed = back.wait("healed").at - ready
        full = survivor.wait("commit", after=ready, participants=2, count=2)
        joined = back.wait("commit", after=ready, participants=2).at - ready
        stall = longest_gap(survivor, ready, full.at)
    return {
        "healed_s": healed,
        "first_common_step_s": joined,
        "longest_stall_s": stall,
        "stall_beyond_a_step_s": stall - normal,
        "normal_step_s": normal,
    }


def busy(library: Library, seconds: float) -> tuple[int, int]:
    """Default settings, and four processes that never rest: steps with a member missing, and steps retried."""
    with pair(library, TINY) as (first, _second, _lighthouse):
        code = "while True: pass"
        hogs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2 * (os.cpu_count() or 2))]
        try:
            at = time.monotonic()
            time.sleep(seconds)
            first.wait("commit", after=time.monotonic())
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        seen = [e for e in first.events() if e.at > at]
    return (
        sum(e.kind == "commit" and e.participants != 2 for e in seen),
        sum(e.kind == "retry" for e in seen),
    )


def cut(library: Library) -> float | None:
    """The victim's network goes away; its process and its connections stay. None: no namespaces here."""
    with second_network() as network:
        if network is None:
            return None
        name, here, there = network
        far = Library(library.name, library.python, library.folder, ("ip", "netns", "exec", name))
        lighthouse = Lighthouse(library, here)
        try:
            far.open()
            far.wait_ready()
            far.count = 10_000
            lighthouse.start()
            survivor = library.start("a", lighthouse.address, host=here, **TINY)
            victim = far.start("b", lighthouse.address, host=there, **TINY)
            for replica in (survivor, victim):
                replica.wait("commit", participants=2, count=10)
            at = time.monotonic()
            subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)
            return survivor.wait("commit", after=at, participants=1).at - at
        finally:
            library.end()
            far.close()
            lighthouse.kill()


def longest_gap(replica: Replica, after: float, until: float) -> float:
    times = [e.at for e in replica.events() if e.kind == "commit" and after - 1.0 < e.at <= until]
    return max((b - a for a, b in itertools.pairwise(times) if b > after), default=0.0)


def step_cost(libraries: list[Library], steps: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step of a tiny model, with nothing else to do; rounds of all taken in turn.

    The fastest tenth of the steps: what a step costs, not what else the machine does meanwhile.
    """
    found: dict[str, list[float]] = {library.name: [] for library in libraries}
    tiny = {"width": 64, "layers": 2, "steps": steps}
    for _ in range(rounds):
        for library in libraries:
            if library.name == "plain":
                store = library.folder / f"store{library.count}"
                both = [library.start(str(r), rank=r, store=str(store), **tiny) for r in (0, 1)]
                both[0].wait("commit", count=steps)
                events = both[0].events()
                library.end()
            else:
                with pair(library, {**tiny, "steps": 10**9}) as (first, _second, _lighthouse):
                    first.wait("commit", participants=2, count=steps)
                    events = [e for e in first.events() if e.participants == 2]
            times = [e.at for e in events if e.kind == "commit"][steps // 10 :]
            gaps = sorted(b - a for a, b in itertools.pairwise(times))
            found[library.name].append(gaps[len(gaps) // 10] * 1e3)
    return {name: min(values) for name, values in found.items()}


def bandwidth() -> dict[str, float]:
    """Healing between two threads' sockets against plain socket copies and a memory copy, GB/s."""
    code = (HERE / "_recovery_bandwidth.py").read_text()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


# ---- the run ----------------------------------------------------------------------------------------------


def measure(library: Library, quick: bool, numbers: dict[str, float]) -> None:
    """All numbers of one library, under `NAME_...`."""
    name, ours = library.name, library.name == "allranks"
    rounds = (3 if ours else 1) if quick else (50 if ours else 5)

    def note(what: str, value: float) -> None:
        numbers[f"{name}_{what}"] = round(value, 4)
        say(f"  {name} {what}: {value:.4f}")

    times, crashes = kill(library, rounds)
    if times:
        note("kill_s", statistics.median(times))
        note("kill_worst_s", max(times))
    note("kill_survivor_crashes", crashes)
    note("kill_rounds", rounds)
    if ours or not quick:
        times, retries = leave(library, 1 if quick else 5)
        note("leave_s", statistics.median(times))
        note("leave_retried_steps", retries)
        note("freeze_s", freeze(library))
    if ours:
        found = cut(library)
        if found is not None:
            note("cut_s", found)
        note("hang_evicted_s", hang(library))
        gap, retries = lighthouse_away(library, 1.0 if quick else 3.0)
        note("lighthouse_away_gap_s", gap)
        note("lighthouse_away_retried_steps", retries)
        missing, retries = busy(library, 3.0 if quick else 15.0)
        note("busy_steps_with_a_member_missing", missing)
        note("busy_retried_steps", retries)


def measure_healing(libraries: list[Library], quick: bool, numbers: dict[str, float]) -> None:
    """Under `NAME_heal_...` with all parameters trained; `heal_momentum` and `heal_frozen` beside it."""
    parts = {"heal": (HEAVY, 1 if quick else 7)}
    if not quick:
        parts |= {"heal_momentum": (HEAVIER, 3), "heal_frozen": (HEAVY_FROZEN, 3)}
    for part, (model, rounds) in parts.items():
        for name, values in heal(libraries, model, rounds).items():
            for what, value in values.items():
                numbers[f"{name}_{part}_{what}"] = round(value, 4)
                say(f"  {name} {part}_{what}: {value:.4f}")


_HEALING = ("healed_s", "longest_stall_s", "stall_beyond_a_step_s", "first_common_step_s")


def ratios(numbers: dict[str, float]) -> dict[str, float]:
    found = {}
    for what in (
        "kill_s",
        "leave_s",
        "freeze_s",
        *(f"{part}_{what}" for part in ("heal", "heal_momentum", "heal_frozen") for what in _HEALING),
    ):
        ours, theirs = numbers.get(f"allranks_{what}"), numbers.get(f"torchft_{what}")
        if ours is not None and theirs:
            found[f"{what.removesuffix('_s')}_vs_torchft"] = round(ours / theirs, 4)
    plain = numbers.get("step_plain_ms")
    for name in ("allranks", "torchft"):
        if plain and f"step_{name}_ms" in numbers:
            numbers[f"step_overhead_{name}_ms"] = round(numbers[f"step_{name}_ms"] - plain, 3)
    ours, theirs = numbers.get("step_overhead_allranks_ms"), numbers.get("step_overhead_torchft_ms")
    if ours is not None and theirs is not None and theirs > 0:
        found["step_overhead_vs_torchft"] = round(max(ours, 0.0) / theirs, 3)
    for name in ("allranks", "torchft"):  # the floor: an ordinary step of the two
        stall, step = (numbers.get(f"{name}_heal_{what}_s") for what in ("longest_stall", "normal_step"))
        if stall and step:
            found[f"heal_stall_vs_a_step_{name}"] = round(stall / step, 3)
    if "heal_gb_per_s" in numbers:
        found["heal_bandwidth_vs_loopback"] = round(
            numbers["heal_gb_per_s"] / numbers["loopback_gb_per_s"], 3
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, within a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--only", choices=("allranks", "torchft"), help="measure one side")
    args = parser.parse_args()
    numbers: dict[str, float] = {}
    os.environ["ALLRANKS_TOKEN"] = secrets.token_hex(16)  # for the lighthouse and the workers of this run
    with tempfile.TemporaryDirectory(prefix="allranks-recovery-") as folder:
        libraries = [Library("allranks", sys.executable, Path(folder))]
        script = find_server() if args.only != "allranks" else None
        if script is not None:
            libraries.append(Library("torchft", str(script.with_name("python")), Path(folder)))
        elif args.only != "allranks":
            say("torchft could not be installed here: left out")
        if args.only:
            libraries = [library for library in libraries if library.name == args.only]
        plain = Library("plain", sys.executable, Path(folder))
        try:
            for library in [*libraries, plain]:
                library.open()
            for library in [*libraries, plain]:
                library.wait_ready()
            for library in libraries:
                say(f"{library.name}:")
                measure(library, args.quick, numbers)
            measure_healing(libraries, args.quick, numbers)
            costs = step_cost([plain, *libraries], 500 if args.quick else 1000, 1 if args.quick else 4)
            numbers |= {f"step_{name}_ms": round(value, 3) for name, value in costs.items()}
            if args.only != "torchft":
                numbers |= bandwidth()
        finally:
            for library in [*libraries, plain]:
                library.close()
    found = ratios(numbers)
    for what, value in sorted({**numbers, **found}.items()):
        say(f"{what:40} {value}")
    if args.json:
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
        print(json.dumps({"name": "recovery", "ratios": found, "numbers": numbers, "machine": machine}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
