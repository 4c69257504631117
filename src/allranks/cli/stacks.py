"""`allranks stacks`: what is every rank doing, live on this node or from captures made earlier."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from allranks.errors import InputError
from allranks.model.stacks import Capture, StacksReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    who = parser.add_argument_group("which processes (default: every rank on this node)")
    who.add_argument(
        "--pid", type=int, action="append", default=[], metavar="P", help="this process; repeatable"
    )
    who.add_argument(
        "--name", metavar="PATTERN", help="processes whose title or command line matches this expression"
    )
    who.add_argument(
        "--job", metavar="ID", help="ranks of this job (black box, SLURM_JOB_ID, TORCHELASTIC_RUN_ID)"
    )
    who.add_argument(
        "--from", dest="folder", metavar="FOLDER", help="read captures made earlier instead of looking"
    )
    who.add_argument(
        "--all-nodes",
        action="store_true",
        help="every node of the job, joined: through the agents of `allranks run`, else through Slurm",
    )
    how = parser.add_argument_group("how to look")
    how.add_argument(
        "--rounds", type=int, help="number of looks (default 2): one cannot tell stuck from slow"
    )
    how.add_argument("--interval", type=float, metavar="S", help="seconds between two looks (default 1)")
    how.add_argument(
        "--native",
        action="store_true",
        help="native frames of every rank, not only of suspects (stops each for ~60 ms)",
    )
    how.add_argument("--no-native", action="store_true", help="never stop a process, not even a suspect")
    how.add_argument(
        "--gdb", action="store_true", help="gdb backtraces where py-spy fails (stops the process for seconds)"
    )
    how.add_argument(
        "--cuda-gdb",
        action="store_true",
        help="device kernels by cuda-gdb (10-60 s each; never near a timeout)",
    )
    how.add_argument(
        "--faulthandler",
        metavar="SIGNAL",
        help="send this signal to ranks that catch it, and read what faulthandler prints",
    )
    how.add_argument(
        "--gpu-core-dump",
        action="store_true",
        help="FATAL to the processes: write GPU core dumps through CUDA's user-triggered pipe",
    )
    how.add_argument("--config", metavar="FILE", help="YAML with a `debug:` section (see docs/stacks.md)")
    how.add_argument(
        "--still",
        type=float,
        default=None,
        metavar="S",
        help="silence that counts as standing still (default 10)",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="keep the bundle and the raw files in this folder; {host} is this node",
    )
    out.add_argument("--json", action="store_true", help="one JSON object on stdout")
    out.add_argument(
        "--html", metavar="FILE", help="write a self-contained page with the tree and a flame graph"
    )
    out.add_argument(
        "--all-threads", action="store_true", help="put every thread into the tree, not only the main ones"
    )
    out.add_argument("--force", action="store_true", help="overwrite FILE or the bundle in DIR")


def main(args: argparse.Namespace) -> int:
    """0 nothing is hung, 1 a hung job or an unclear one, 2 could not look."""
    from allranks.stacks import classify, read_capture
    from allranks.stacks.progress import Stillness

    if args.html and Path(args.html).exists() and not args.force:
        raise InputError(f"{args.html} exists", hint="give another name, or --force to overwrite it")
    if args.folder:
        captures = {"": read_capture(args.folder)}
    else:
        captures = {"": _look_everywhere(args)} if args.all_nodes else _look(args)
    stillness = Stillness() if args.still is None else Stillness(still_s=args.still)
    reports = {job: classify(capture, stillness=stillness) for job, capture in captures.items()}
    _show(args, captures, reports)
    return 0 if all(report.hung is False for report in reports.values()) else 1


def _look(args: argparse.Namespace) -> dict[str, Capture]:
    """A live look at this node, job by job (one that was chosen, or is alone, has no name); the bundle and the raw files
    are kept where -o or the configuration says."""
    from allranks.stacks import CollectOptions, Selection, collect, write_bundle
    from allranks.stacks.debug_config import DebugOptions, read_debug_options
    from allranks.stacks.find import find_jobs
    from allranks.stacks.titles import RANK_TITLES

    debug = read_debug_options(args.config) if args.config else DebugOptions(interval_s=1.0)
    folder = _folder(args.output or (str(debug.folder()) if args.config else ""), args.force)
    native = "never" if args.no_native else "all" if args.native else debug.native
    options = CollectOptions(
        rounds=debug.rounds if args.rounds is None else args.rounds,
        interval_s=debug.interval_s if args.interval is None else args.interval,
        native=native,
        gdb=args.gdb,
        cuda_gdb=args.cuda_gdb or debug.cuda_gdb,
        faulthandler_signal=_signal_number(args.faulthandler) if args.faulthandler else None,
        gpu_core_dump=args.gpu_core_dump,
        raw_folder=folder,
    )
    titles = (*RANK_TITLES, *debug.patterns)
    jobs = find_jobs(Selection(tuple(args.pid), args.name or "", args.job or "", titles))
    captures = {}
    for job, targets in jobs.items():
        ranks = [target for target in targets if target.child is None]
        of_job = f" of job {job}" if job else ""
        _say(f"{len(ranks)} ranks and {len(targets) - len(ranks)} child processes{of_job}")
        place = folder / _file_name(job) if folder is not None and job else folder
        captures[job] = collect(targets, replace(options, raw_folder=place), _say)
        if place is not None:
            _say(f"Wrote {write_bundle(captures[job], place)}")
    return captures


def _file_name(job: str) -> str:
    return re.sub(r"[^\w.-]", "_", job)


def _look_everywhere(args: argparse.Namespace) -> Capture:
    """One look on every node of a job, joined into one capture: its agents are asked, or Slurm starts a step there."""
    from allranks.incidents.job_evidence import find_lighthouse, gather_everywhere
    from allranks.stacks import read_capture

    lighthouse = find_lighthouse(args.job)
    if lighthouse is None:
        return _look_through_slurm(args)
    folder = _folder(args.output or "", args.force) or Path(tempfile.mkdtemp(prefix="stacks-", dir="."))
    found = gather_everywhere(lighthouse, folder, stacks=True)
    for text in found.missing:
        _say(f"missing: {text}")
    _say(f"{len(found.agents)} agents were asked; Wrote {folder}")
    return read_capture(folder / "stacks")


def _look_through_slurm(args: argparse.Namespace) -> Capture:
    from allranks.launch.slurm import collect_words
    from allranks.stacks import read_capture

    job = args.job or os.environ.get("SLURM_JOB_ID", "")
    if not job or shutil.which("srun") is None:
        raise InputError(
            "--all-nodes needs a job under `allranks run` with a lighthouse, or a Slurm job and srun",
            hint="give --job (a job of this node) or ALLRANKS_LIGHTHOUSE and ALLRANKS_TOKEN; elsewhere run `allranks stacks -o SHARED/{host}` on each node, then `allranks stacks --from SHARED`",
        )
    folder = Path(args.output) if args.output else Path(tempfile.mkdtemp(prefix=f"stacks-{job}-", dir="."))
    given = (("--rounds", args.rounds), ("--interval", args.interval), ("--config", args.config))
    flags = (
        ("--native", args.native),
        ("--no-native", args.no_native),
        ("--gdb", args.gdb),
        ("--cuda-gdb", args.cuda_gdb),
    )
    words = ["-o", f"{folder.absolute()}/{{host}}", "--force", "--json"]
    words += [text for name, value in given if value is not None for text in (name, str(value))]
    words += [name for name, wanted in flags if wanted]
    command = shutil.which("allranks") or str(Path(sys.executable).parent / "allranks")
    nodes = os.environ.get("SLURM_NNODES", "")
    line = collect_words(job, int(nodes) if nodes.isdigit() else None, words, command)
    done = subprocess.run(line, stdout=subprocess.DEVNULL, check=False)
    if done.returncode > 1:
        _say(f"srun ended with {done.returncode}: some nodes may be missing")
    _say(f"Wrote {folder}")
    return read_capture(folder)


def _folder(name: str, force: bool) -> Path | None:
    """The output folder. Several nodes of a Slurm step share a file system: each gets a folder of its own."""
    if not name:
        return None
    host = socket.gethostname()
    nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or "1"
    folder = Path(name.replace("{host}", host))
    if nodes != "1" and "{host}" not in name:
        folder = folder / host
    if (folder / "bundle.json").exists() and not force:
        raise InputError(
            f"{folder} holds a bundle already", hint="give another folder, or --force to overwrite it"
        )
    return folder


def _say(text: str) -> None:
    print(f"allranks stacks: {text}", file=sys.stderr)


def _signal_number(name: str) -> int:
    """A signal by name or number."""
    import signal

    text = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    number = int(name) if name.isdigit() else int(getattr(signal, text, 0))
    if not 0 < number < 65:
        raise InputError(f"{name!r} is no signal", hint="for example --faulthandler SIGUSR1")
    return number


def _show(args: argparse.Namespace, captures: dict[str, Capture], reports: dict[str, StacksReport]) -> None:
    from allranks.stacks.as_json import report_json
    from allranks.stacks.text import render_text
    from allranks.stacks.tree import grow_tree

    trees = {job: grow_tree(capture, args.all_threads) for job, capture in captures.items()}
    for job, report in reports.items() if args.html else ():
        from allranks.stacks.html import render_html

        page = Path(args.html)
        page = page.with_name(f"{page.stem}-{_file_name(job)}{page.suffix}") if job else page
        text = render_html(report, trees[job], job=job or args.job or "", made_s=time.time())
        page.write_text(text, encoding="utf-8", errors="replace")
        _say(f"Wrote {page}")
    if args.json:
        shapes = {job: report_json(report, trees[job]) for job, report in reports.items()}
        alone = next(iter(shapes.values())) if len(shapes) == 1 else {"jobs": shapes}
        print(json.dumps(alone, indent=1))
        return
    for job, report in reports.items():
        for line in [*([f"job {job}:"] if job else []), *render_text(report, trees[job])]:
            print(line.encode("utf-8", "replace").decode(sys.stdout.encoding or "utf-8", "replace"))
