"""`allranks slurm submit|wrap|collect`: one agent per node under Slurm, and stacks out of a running job."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from allranks.cli.run import FLAGS
from allranks.cli.run_job import chosen_flags, embed_lighthouse, read_settings
from allranks.cli.terminal import answer, note
from allranks.errors import InputError
from allranks.launch import slurm
from allranks.launch.command_line import arrange, flag_value, has_flag, job_token

_FLAGS = {"--nodes", "--gpus-per-node", "--partition", "--time", "--name", "--output", "--sbatch", "--srun"}
_ALONE = {"--exclude-bad-nodes", "--no-requeue", "--dry-run", "--json", "-h", "--help"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "allranks slurm ACTION [options] [arguments of `run` or `stacks`]"
    add(
        "action",
        choices=["submit", "wrap", "collect"],
        metavar="ACTION",
        help="submit: a batch job; wrap: start the job inside sbatch or salloc; collect: stacks of a running job",
    )
    add("--nodes", type=int, default=1, metavar="N", help="nodes to ask for (default: 1)")
    add("--gpus-per-node", default="", metavar="N", help="GPUs on each, also the ranks on each")
    add("--partition", default="", metavar="NAME", help="partition to submit to")
    add("--time", default="", metavar="HH:MM:SS", help="time limit")
    add("--name", default="allranks", help="name of the job (default: %(default)s)")
    add("--output", default="slurm-%j.out", metavar="FILE", help="output of the job (default: slurm-%%j.out)")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a further sbatch option, e.g. --sbatch=--account=x",
    )
    add(
        "--srun",
        action="append",
        default=[],
        metavar="OPTION",
        help="wrap, collect: a further srun option, e.g. --srun=--container-name=x",
    )
    add(
        "--exclude-bad-nodes",
        action="store_true",
        help="submit: leave out nodes that `allranks history` lists",
    )
    add("--no-requeue", action="store_true", help="do not let Slurm requeue the job when a node fails")
    add("--dry-run", action="store_true", help="print what would be run")
    add("--json", action="store_true", help="submit: print one JSON object")
    add("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def arrange_words(words: Sequence[str]) -> list[str]:
    """Our flags first; everything from the first word that is not ours belongs to `run` or `stacks`.

    The flags go before the action: argparse would take what follows it as the rest.
    """
    head, action, rest = list(words[:1]), list(words[1:2]), list(words[2:])
    while rest and rest[0].startswith("-"):
        name = rest[0].partition("=")[0]
        if name not in _FLAGS | _ALONE:
            break
        head.append(rest.pop(0))
        if name in _FLAGS and "=" not in head[-1] and rest:
            head.append(rest.pop(0))
    return [*head, *action, "--", *rest] if rest else [*head, *action]


def main(args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    command = shutil.which("allranks") or str(Path(sys.executable).parent / "allranks")
    if args.action == "wrap":
        return _wrap(args, words, command)
    if args.action == "collect":
        if not words:
            raise InputError("no job was given", hint="allranks slurm collect JOBID [-o DIR]")
        nodes = len(slurm.find_nodes(words[0])) or None  # else srun would start one collector only
        return _call(args, slurm.collect_words(words[0], nodes, words[1:], command, args.srun), {})
    return _submit(args, words, command)


def _wrap(args: argparse.Namespace, words: list[str], command: str) -> int:
    if not words:
        raise InputError("no script was given", hint="allranks slurm wrap [flags of allranks run] SCRIPT")
    mine, theirs, script = arrange(words, FLAGS)
    flags = [*mine, *theirs]
    allocation = slurm.read_allocation(os.environ)
    file = flag_value(flags, "--config")
    chosen = chosen_flags(Path(file)) if file else ()
    line = slurm.srun_words(allocation, flags, script, command, chosen, args.srun)
    with ExitStack() as stack:
        return _call(args, line, {} if args.dry_run else _lighthouse(allocation, flags, stack))


def _lighthouse(allocation: slurm.Allocation, flags: list[str], stack: ExitStack) -> dict[str, str]:
    """One lighthouse and one token for the agents of all nodes, as the variables that tell them."""
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
    return {**found, "ALLRANKS_LIGHTHOUSE": f"{socket.gethostname()}:{address.rpartition(':')[2]}"}


def _call(args: argparse.Namespace, line: list[str], variables: dict[str, str]) -> int:
    if args.dry_run:
        print(shlex.join(line))
        return 0
    _need("srun")
    return subprocess.call(line, env={**os.environ, **variables})


def _submit(args: argparse.Namespace, words: list[str], command: str) -> int:
    if not words:
        raise InputError("no script was given", hint="allranks slurm submit --nodes 2 SCRIPT")
    asked = (args.nodes, args.gpus_per_node, args.partition, args.time, args.name, args.output)
    bad = bad_nodes() if args.exclude_bad_nodes else ""
    more = (*args.sbatch, *([f"--exclude={bad}"] if bad else ()))
    options = slurm.SubmitOptions(*asked, not args.no_requeue, more)
    script = slurm.sbatch_script(options, words, command)
    if args.dry_run:
        print(script, end="")
        return 0
    _need("sbatch")
    done = subprocess.run(["sbatch", "--parsable"], input=script, text=True, capture_output=True, check=False)
    if done.returncode:
        raise InputError(f"sbatch refused the job: {done.stderr.strip()}")
    job = done.stdout.strip().split(";")[0]
    output = args.output.replace("%j", job)
    text = f"Submitted job {job}; output in {output}; stacks: allranks slurm collect {job}"
    answer(args.json, {"schema": 1, "job": job, "output": output}, text)
    return 0


def bad_nodes() -> str:
    """The nodes that failed again and again, as Slurm's --exclude takes them; "" for none, and without a history."""
    from allranks.ledger.history import NodeHistory, default_place

    place = default_place(os.environ)
    try:
        return ",".join(one.node for one in NodeHistory(place).bad_nodes(time.time())) if place else ""
    except OSError as error:
        note(f"[allranks] no node is left out: {error}")
        return ""


def _need(tool: str) -> None:
    if shutil.which(tool) is None:
        hint = "Run this where Slurm's commands are (a login node)."
        raise InputError(f"{tool} is not installed on this machine", hint=hint)
