"""`allranks slurm submit|wrap|collect`: starts one agent per node under Slurm, and collects stacks of a running job."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.parser import read_flags, takes_value, words_after
from allranks.cli.run import OURS
from allranks.cli.run_job import chosen_flags, embed_lighthouse, read_settings
from allranks.cli.terminal import answer, note
from allranks.errors import InputError
from allranks.launch.command_line import arrange, flag_value, has_flag, job_token
from allranks.model.options import argument, option

if TYPE_CHECKING:
    from allranks.launch.slurm import Allocation
    from allranks.model.stacks import Capture


@dataclass(frozen=True)
class SlurmFlags:
    action: str = argument(
        "",
        "submit: a batch job; wrap: start the job inside sbatch or salloc; collect: stacks of a running job",
        choices=("submit", "wrap", "collect"),
        required=True,
    )
    nodes: int = option(1, "nodes to ask for")
    gpus_per_node: str = option("", "GPUs on each, also the ranks on each", metavar="N")
    partition: str = option("", "partition to submit to", metavar="NAME")
    time: str = option("", "time limit", metavar="HH:MM:SS")
    name: str = option("allranks", "name of the job", metavar="NAME")
    output: str = option("slurm-%j.out", "output of the job", metavar="FILE")
    sbatch: tuple[str, ...] = option(
        (), "a further sbatch option, e.g. --sbatch=--account=x", metavar="OPTION"
    )
    srun: tuple[str, ...] = option(
        (), "wrap, collect: a further srun option, e.g. --srun=--container-name=x", metavar="OPTION"
    )
    exclude_bad_nodes: bool = option(False, "submit: leave out nodes that `allranks history` lists")
    no_requeue: bool = option(False, "do not let Slurm requeue the job when a node fails")
    dry_run: bool = option(False, "print what would be run")
    json: bool = option(False, "submit: print one JSON object")


FLAGS = (SlurmFlags,)
USAGE = "allranks slurm ACTION [options] [arguments of `run` or `stacks`]"


def arrange_words(words: Sequence[str]) -> list[str]:
    """Puts our flags before the action, since argparse reads all words after it as the rest. Everything from the first other word on
    belongs to `run` or `stacks`."""
    takes = {**takes_value(SlurmFlags), "-h": False, "--help": False}
    head, action, rest = list(words[:1]), list(words[1:2]), list(words[2:])
    while rest and rest[0].startswith("-"):
        name = rest[0].partition("=")[0]
        if name not in takes:
            break
        head.append(rest.pop(0))
        if takes[name] and "=" not in head[-1] and rest:
            head.append(rest.pop(0))
    return [*head, *action, "--", *rest] if rest else [*head, *action]


def main(args: argparse.Namespace) -> int:
    flags, words = read_flags(SlurmFlags, args), words_after(args)
    command = shutil.which("allranks") or str(Path(sys.executable).parent / "allranks")
    if flags.action == "wrap":
        return _wrap(flags, words, command)
    if flags.action == "collect":
        if not words:
            raise InputError("no job was given", hint="allranks slurm collect JOBID [-o DIR]")
        from allranks.launch import slurm

        nodes = len(slurm.find_nodes(words[0])) or None  # otherwise srun would start only one collector
        return _call(flags, slurm.collect_words(words[0], nodes, words[1:], command, flags.srun), {})
    return _submit(flags, words, command)


def _wrap(flags: SlurmFlags, words: list[str], command: str) -> int:
    from allranks.launch import slurm

    if not words:
        raise InputError("no script was given", hint="allranks slurm wrap [flags of allranks run] SCRIPT")
    mine, theirs, script = arrange(words, OURS)
    words = [*mine, *theirs]
    allocation = slurm.read_allocation(os.environ)
    file = flag_value(words, "--config")
    chosen = chosen_flags(Path(file)) if file else ()
    line = slurm.srun_words(allocation, words, script, command, chosen, flags.srun)
    with ExitStack() as stack:
        return _call(flags, line, {} if flags.dry_run else _lighthouse(allocation, words, stack))


def _lighthouse(allocation: Allocation, flags: list[str], stack: ExitStack) -> dict[str, str]:
    """Starts a lighthouse for the agents of all nodes; returns the variables with its address and the token."""
    found = {"ALLRANKS_TOKEN": job_token(os.environ)}
    if has_flag(flags, "--lighthouse", "--no-lighthouse") or os.environ.get("ALLRANKS_LIGHTHOUSE"):
        return found
    file = flag_value(flags, "--config")
    settings = read_settings(Path(file)) if file else {}
    if settings and (settings["lighthouse"]["address"] or not settings["lighthouse"]["embedded"]):
        return found
    least, each = flag_value(flags, "--min-replicas"), flag_value(flags, "--replicas")
    replicas = int(flag_value(flags, "--total-replicas") or int(each or 0) * len(allocation.nodes))
    address = embed_lighthouse(
        "0.0.0.0:0", found["ALLRANKS_TOKEN"], int(least) if least else None, replicas, settings, stack
    )
    return {**found, "ALLRANKS_LIGHTHOUSE": f"{os.uname().nodename}:{address.rpartition(':')[2]}"}


def _call(flags: SlurmFlags, line: list[str], variables: dict[str, str]) -> int:
    if flags.dry_run:
        print(shlex.join(line))
        return 0
    import subprocess

    _need("srun")
    return subprocess.call(line, env={**os.environ, **variables})


def _submit(flags: SlurmFlags, words: list[str], command: str) -> int:
    from allranks.launch import slurm

    if not words:
        raise InputError("no script was given", hint="allranks slurm submit --nodes 2 SCRIPT")
    asked = (flags.nodes, flags.gpus_per_node, flags.partition, flags.time, flags.name, flags.output)
    bad = bad_nodes() if flags.exclude_bad_nodes else ""
    more = (*flags.sbatch, *([f"--exclude={bad}"] if bad else ()))
    options = slurm.SubmitOptions(*asked, not flags.no_requeue, more)
    script = slurm.sbatch_script(options, words, command)
    if flags.dry_run:
        print(script, end="")
        return 0
    import subprocess

    _need("sbatch")
    done = subprocess.run(["sbatch", "--parsable"], input=script, text=True, capture_output=True, check=False)
    if done.returncode:
        raise InputError(f"sbatch refused the job: {done.stderr.strip()}")
    job = done.stdout.strip().split(";")[0]
    output = flags.output.replace("%j", job)
    text = f"Submitted job {job}; output in {output}; stacks: allranks slurm collect {job}"
    answer(flags.json, {"job": job, "output": output}, text)
    return 0


def bad_nodes() -> str:
    """The nodes that fail repeatedly, for Slurm's --exclude; "" for none, and without a history."""
    from allranks.ledger.history import NodeHistory, default_place

    place = default_place(os.environ)
    try:
        return ",".join(one.node for one in NodeHistory(place).bad_nodes(time.time())) if place else ""
    except OSError as error:
        note(f"[allranks] no node is excluded: {error}")
        return ""


def sample_through_slurm(job: str, output: str, args: argparse.Namespace) -> Capture:
    """The stacks of every node of a Slurm job, for `allranks stacks --all-nodes`."""
    import subprocess
    import tempfile

    from allranks.launch.slurm import collect_words, find_nodes
    from allranks.stacktraces import read_capture

    job = job or os.environ.get("SLURM_JOB_ID", "")
    if not job or shutil.which("srun") is None:
        raise InputError(
            "--all-nodes needs a job under `allranks run` with a lighthouse, or a Slurm job and srun",
            hint="give --job (a job of this node) or ALLRANKS_LIGHTHOUSE and ALLRANKS_TOKEN; elsewhere run `allranks stacks -o SHARED/{host}` on each node, then `allranks stacks --from SHARED`",
        )
    folder = Path(output) if output else Path(tempfile.mkdtemp(prefix=f"stacks-{job}-", dir="."))
    words = ["-o", f"{folder.absolute()}/{{host}}", "--force", "--json"]
    given = (("--rounds", args.rounds), ("--interval", args.interval_s), ("--config", args.config))
    words += [text for name, value in given if value is not None for text in (name, str(value))]
    switches = {"--native": args.native_frames, "--no-native": args.no_native, "--gdb": args.gdb}
    words += [flag for flag, on in {**switches, "--cuda-gdb": args.cuda_gdb}.items() if on]
    command = shutil.which("allranks") or str(Path(sys.executable).parent / "allranks")
    nodes = find_nodes(job)
    if not nodes:
        note(
            f"allranks stacks: the nodes of job {job} are not known (squeue does not list it): srun chooses the nodes"
        )
    done = subprocess.run(
        collect_words(job, len(nodes) or None, words, command), stdout=subprocess.DEVNULL, check=False
    )
    silent = [node for node in nodes if not (folder / node / "bundle.json").exists()]
    if silent:
        note(f"allranks stacks: {len(silent)} of {len(nodes)} nodes gave no stacks: {', '.join(silent)}")
    elif done.returncode > 1:
        note(f"allranks stacks: srun ended with {done.returncode}: some nodes may be missing")
    note(f"allranks stacks: Wrote {folder}")
    return read_capture(folder)


def _need(tool: str) -> None:
    if shutil.which(tool) is None:
        hint = "Run this where Slurm's commands are (a login node)."
        raise InputError(f"{tool} is not installed on this machine", hint=hint)
