"""Slurm: reads a job's environment and makes srun and sbatch command lines. Pure, except `find_nodes`.

One agent per node: `srun --ntasks-per-node=1 allranks run …`. Ranks are the agent's children, so that Slurm does not kill
the survivors of a failed rank.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from allranks.errors import InputError

BASE_PORT = 20000
PORTS = 20000
SQUEUE_S = 60.0  # a busy controller answers late


@dataclass(frozen=True)
class Allocation:
    """A running allocation, read from SLURM_* variables."""

    job: str
    nodes: tuple[str, ...]
    ranks_per_node: int
    restart: int = 0

    @property
    def port(self) -> int:
        """A rendezvous port that two jobs on one node are unlikely to share."""
        digits = re.sub(r"\D", "", self.job) or "0"
        return BASE_PORT + int(digits) % PORTS


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `allranks slurm submit` for sbatch. Empty values leave sbatch's default."""

    nodes: int = 1
    gpus_per_node: str = ""
    partition: str = ""
    time: str = ""
    name: str = "allranks"
    output: str = "slurm-%j.out"
    requeue: bool = True
    extra: tuple[str, ...] = ()  # further sbatch options


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """The allocation of this process; InputError outside of one."""
    if "SLURM_JOB_ID" not in environment:
        raise InputError(
            "this is not inside a Slurm allocation (SLURM_JOB_ID is not set)",
            hint="Use `allranks slurm submit … SCRIPT`, or call `allranks slurm wrap … SCRIPT` inside sbatch or salloc.",
        )
    nodes = expand_nodes(
        environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST") or "localhost"
    )
    gpus = environment.get("SLURM_GPUS_ON_NODE") or environment.get("SLURM_GPUS_PER_NODE") or ""
    digits = re.findall(r"\d+", gpus)
    ranks = (
        int(digits[-1]) if digits else int((environment.get("SLURM_NTASKS_PER_NODE") or "1").split("(")[0])
    )
    return Allocation(
        environment["SLURM_JOB_ID"], nodes, max(1, ranks), int(environment.get("SLURM_RESTART_COUNT") or 0)
    )


def expand_nodes(text: str) -> tuple[str, ...]:
    """Slurm's node list in full: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login."""
    found: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        found += _expand(part)
    return tuple(found)


def _expand(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    names = []
    for piece in match.group(1).split(","):
        first, _, last = piece.partition("-")
        width = len(first)
        for number in range(int(first), int(last or first) + 1):
            names += _expand(part[: match.start()] + f"{number:0{width}d}" + part[match.end() :])
    return names


def find_nodes(job: str) -> tuple[str, ...]:
    """Slurm's node names of a running job; () without Slurm, or if the job is unknown."""
    if shutil.which("squeue") is None:
        return ()
    command = ["squeue", "--noheader", "--jobs", job, "--format=%N"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SQUEUE_S)
    names = done.stdout.split()
    return expand_nodes(names[0]) if names else ()


def srun_words(
    allocation: Allocation,
    flags: list[str],
    script: list[str],
    command: str = "allranks",
    chosen: Collection[str] = (),
    srun: Collection[str] = (),
) -> list[str]:
    """The srun command that starts one agent per node. Does not override given flags, or those `chosen` in a file.

    `srun`: further options of srun, such as pyxis' `--container-image`.
    """
    given = {word.partition("=")[0].replace("_", "-") for word in flags}
    words = [
        "srun", f"--nodes={len(allocation.nodes)}", f"--ntasks={len(allocation.nodes)}", "--ntasks-per-node=1",
        "--kill-on-bad-exit=0", "--label", *srun, command, "run",
    ]  # fmt: skip
    if "--replicas" in given:
        return [*words, *flags, "--", *script]
    defaults = {
        "--nnodes": str(len(allocation.nodes)),
        "--nproc-per-node": str(allocation.ranks_per_node),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{allocation.nodes[0]}:{allocation.port}",
        "--rdzv-id": f"{allocation.job}.{allocation.restart}",
    }
    words += [f"{flag}={value}" for flag, value in defaults.items() if flag not in given | set(chosen)]
    return [*words, *flags, "--", *script]


def replicas_of_node(environment: Mapping[str, str], replicas: int) -> tuple[int, int]:
    """(number of this node's first replica, replicas over all nodes) when srun starts the same command on every node."""
    nodes = int(environment.get("SLURM_STEP_NUM_NODES") or 1)  # set by srun only
    if nodes == 1:
        return 0, replicas
    return int(environment["SLURM_NODEID"]) * replicas, nodes * replicas


def sbatch_script(options: SubmitOptions, run_words: list[str], command: str = "allranks") -> str:
    """A batch script for the job, which Slurm requeues when a node fails."""
    given: dict[str, object] = {"job-name": options.name, "nodes": options.nodes, "ntasks-per-node": 1}
    given |= {"output": options.output, "open-mode": "append", "gpus-per-node": options.gpus_per_node}
    given |= {"partition": options.partition, "time": options.time}
    words = [f"--{name}={value}" for name, value in given.items() if value != ""]
    words += [*(["--requeue"] if options.requeue else []), *options.extra]
    lines = ["#!/bin/bash", *(f"#SBATCH {word}" for word in words)]
    return "\n".join([*lines, "", f"exec {command} slurm wrap {shlex.join(run_words)}", ""])


def collect_words(
    job: str, nodes: int | None, stack_words: list[str], command: str = "allranks", srun: Collection[str] = ()
) -> list[str]:
    """The srun command that collects stacks of a running job, on all its nodes, in parallel with its steps.

    With `-o DIR` every node writes to its own folder below DIR.
    """
    words = ["srun", f"--jobid={job}", "--overlap", "--ntasks-per-node=1", "--mem=0", "--label"]
    if nodes:
        words += [f"--nodes={nodes}", f"--ntasks={nodes}"]
    return [*words, *srun, command, "stacks", "--job", job, *_folder_per_node(stack_words)]


def _folder_per_node(words: list[str]) -> list[str]:
    """Replaces `-o DIR` with `-o DIR/{host}`, unless DIR has a field already."""
    found = list(words)
    for index, word in enumerate(words):
        if word in ("-o", "--output") and index + 1 < len(words) and "{" not in words[index + 1]:
            found[index + 1] = f"{words[index + 1].rstrip('/')}/{{host}}"
        elif word.startswith("--output=") and "{" not in word:
            found[index] = f"{word.rstrip('/')}/{{host}}"
    return found
