"""`allranks stacks`: shows what every rank is doing, live on this node or from earlier captures."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.api.debug_server import fetch, is_address
from allranks.cli.parser import read_flags
from allranks.cli.terminal import check_folder, check_target, note, write_whole
from allranks.errors import InputError, why
from allranks.model.debug_options import DebugOptions, read_debug_options
from allranks.model.formatting import count
from allranks.model.options import argument, check_options, option
from allranks.model.parsing import printable

if TYPE_CHECKING:  # heavy: numpy comes with some
    from allranks.model.stacks import (
        Capture,
        JobLook,
        Process,
        ProcessFinding,
        StacksReport,
        ThreadLook,
        Where,
    )
    from allranks.stacktraces.find import Target
    from allranks.stacktraces.procfs import ProcessEntry
    from allranks.stacktraces.tree import TreeLook

Json = dict[str, object]
DEFAULTS = DebugOptions(interval_s=1.0)
#: Of a process, in the JSON of --tree.
_FACTS = "pid ppid node role number group title rank world alive ended ticks switches"
_which = partial(option, group="which processes (default: every rank on this node)")
_output = partial(option, group="output")


@dataclass(frozen=True)
class StacksFlags:
    """The processes to sample and the files to write. DebugOptions has the options of the samples."""

    of_job: tuple[str, ...] = argument(
        (),
        "a job that was recorded here, or a part of its name; or folders of --bundle, one of each node",
        metavar="JOB",
    )
    pid: tuple[int, ...] = _which((), "this process; repeatable", metavar="P")
    name: str = _which("", "processes whose title or command line matches this expression", metavar="PATTERN")
    job: str = _which("", "ranks of this job (black box, SLURM_JOB_ID, TORCHELASTIC_RUN_ID)", metavar="ID")
    container: str = _which(
        "", "ranks in this container, seen from outside: docker, podman, enroot/pyxis", metavar="NAME"
    )
    folder: str = _which(
        "", "read captures made earlier instead of sampling", flags="--from", metavar="FOLDER"
    )
    ray: bool = _which(False, "the actors of Ray on this node, and their drivers")
    bundle: str = option(
        "", "write what was seen of this node's processes into this folder, to be joined", metavar="DIR"
    )
    tree: bool = _which(
        False, "the process of --pid and all below it, with their roles and who waits for whom"
    )
    role: str = _which("", "show only processes whose role contains this text", metavar="R")
    for_s: float = option(5.0, "how long to sample", flags="--for", unit="s", above=0)
    all_nodes: bool = _which(
        False, "every node of the job, joined: through the agents of `allranks run`, else through Slurm"
    )
    native_frames: bool = option(
        False, "native frames of every rank, not only of suspects (stops each for ~60 ms)", flags="--native"
    )
    no_native: bool = option(False, "never stop a process, not even a suspect")
    gdb: bool = option(False, "gdb backtraces where py-spy fails (stops the process for seconds)")
    faulthandler: str = option(
        "", "send this signal to ranks that catch it, and read what faulthandler prints", metavar="SIGNAL"
    )
    gpu_core_dump: bool = option(
        False, "FATAL to the processes: write GPU core dumps through CUDA's user-triggered pipe"
    )
    config: str = option("", "YAML with a `debug:` section (see docs/reference/job_file.md)", metavar="FILE")
    still: float | None = option(
        None, "time without progress that counts as a stall (default: 10)", unit="s", above=0
    )
    output: str = _output(
        "",
        "keep the bundle and the stacks as text in this folder; {host} is this node",
        flags="-o --output",
        metavar="DIR",
    )
    json: bool = _output(False, "one JSON object on stdout")
    html: str = _output("", "write a self-contained page with the tree and a flame graph", metavar="FILE")
    all_threads: bool = _output(False, "put every thread into the tree, not only the main ones")
    force: bool = _output(False, "overwrite FILE or the bundle in DIR")

    def __post_init__(self) -> None:
        check_options(self)


FLAGS = (StacksFlags, (DEFAULTS, ("rounds", "interval_s", "cuda_gdb")))


def main(args: argparse.Namespace) -> int:
    """0 nothing is hung, 1 a hung job or an unclear one, 2 could not run."""
    from allranks.stacktraces import Stillness, classify, read_capture

    options, begun = read_flags(StacksFlags, args), None
    failures: list[str] = []  # files that could not be written: the answer comes first
    check_target(options.html, options.force)
    if (code := _several_roles(options, args.of_job)) is not None:
        return code
    if len(args.of_job) > 1:
        raise InputError(f"one job at a time, not {' '.join(args.of_job)}")
    args.of_job = args.of_job[0] if args.of_job else ""
    captures: dict[str, Capture] = {}
    if is_address(args.of_job or ""):
        captures = {"": _from_server(args.of_job)}
        args.of_job = ""
    elif args.of_job or options.job:
        options = replace(options, job=_known_name(args.of_job or options.job, bool(args.of_job)))
    if options.folder:
        captures = {"": read_capture(options.folder)}
    elif options.all_nodes and not captures:
        captures = {"": _sample_all_nodes(options, args)}
    elif not captures:
        if options.pid:
            _check_one_job(options.pid)
        begun = _begin_tree(options)
        captures = _sample(options if begun is None else replace(options, no_native=True), args, failures)
    stillness = Stillness() if options.still is None else Stillness(still_s=options.still)
    reports = {job: classify(capture, stillness=stillness) for job, capture in captures.items()}
    if (look := _tree_instead(options, reports.values(), begun)) is not None:
        from allranks.diagnosis.process_verdict import explain_processes
        from allranks.stacktraces.text import grow_tree, report_json

        ranks = report_json(reports[""], grow_tree(captures[""]))
        hung = {"stuck": True, "moving": False}.get(explain_processes(look).state)
        return show_tree(look, options.html, options.json, more={**ranks, "hung": hung})
    _show(options, captures, reports, failures)
    if failures:
        sys.stdout.flush()
        raise InputError("; ".join(failures), hint="Name another folder.")
    return 0 if all(report.hung is False for report in reports.values()) else 1


def _below(options: StacksFlags) -> tuple[list[ProcessEntry], bool]:
    """(all processes of --pid and below, [] unless several are Python; whether they are known as ranks)"""
    from allranks.stacktraces import Selection, find_targets, tree
    from allranks.stacktraces.find import is_rank_title

    if not options.pid or options.folder or options.all_nodes:
        return [], False
    try:
        entries = tree.find_tree(options.pid)
        ranks = [target for target in find_targets(Selection(pids=options.pid)) if target.child is None]
    except InputError:  # they have ended meanwhile
        return [], False
    known = any(one.reason in ("black box", "RANK") or is_rank_title(one.title) for one in ranks)
    return (entries if sum(entry.python for entry in entries) > 1 else []), known


def _begin_tree(options: StacksFlags) -> TreeLook | None:
    """If --pid names processes that are not ranks, starts the inspection of all processes below before the ranks are sampled, so
    that both run at the same time. The ranks are then sampled without stopping them."""
    from allranks.stacktraces import tree

    stops = options.native_frames or options.gdb or options.faulthandler or options.gpu_core_dump
    entries, known = ([], False) if stops or options.output or options.config else _below(options)
    if not entries or known:
        return None
    look = tree.TreeLook(entries, tree.LookOptions(options.for_s))
    look.sample()
    return look


def _tree_instead(
    options: StacksFlags, reports: Collection[StacksReport], begun: TreeLook | None
) -> JobLook | None:
    """The inspection of all processes below --pid, if that process is not a rank, or if the state of its ranks is unclear and the
    inspection shows that they are stuck."""
    from allranks.diagnosis.process_verdict import explain_processes
    from allranks.stacktraces import tree

    hung = [report.hung for report in reports]
    if False in hung:
        return None
    if begun is not None:
        time.sleep(max(0.0, begun.began + options.for_s - time.monotonic()))
        begun.sample()
        return begun.finish()
    entries, known = _below(options)
    if not entries or (known and None not in hung):
        return None
    _say("inspecting all processes below, as with --tree")
    look = tree.look_at_processes(entries, tree.LookOptions(options.for_s))
    return look if not known or explain_processes(look).state == "stuck" else None


def _several_roles(options: StacksFlags, given: list[str]) -> int | None:
    """Shows all processes of a job and returns the exit code; None when only its ranks are requested."""
    from allranks.stacktraces import tree

    if given and all(Path(one).is_dir() and any(Path(one).rglob(tree.LOOK)) for one in given):
        return show_tree(tree.read_looks(given), options.html, options.json, options.role)
    chosen = any((options.pid, options.name, options.job, options.folder, options.container, given))
    # ranks in Ray's actors are recognised only by their black boxes: without these all processes are shown
    alone = not chosen and not options.all_nodes and tree.only_roles()
    if options.tree or options.ray or options.bundle or alone:
        pids = options.pid or tuple(tree.find_roots(options.ray))
        if not pids:
            raise InputError(
                "no process of Ray or of a serving engine found",
                hint="name the first process: --pid P --tree",
            )
        return _look_at_tree(pids, options)
    return None


def _look_at_tree(pids: tuple[int, ...], options: StacksFlags) -> int:
    """0 moving, 1 stuck or unclear."""
    import msgspec

    from allranks.stacktraces import tree
    from allranks.stacktraces.roles import with_roles

    check_folder(options.bundle)
    rules = with_roles(read_debug_options(options.config).roles) if options.config else ()
    look = tree.look_at_processes(tree.find_tree(pids), tree.LookOptions(options.for_s, rules=rules))
    if options.bundle:
        Path(options.bundle).mkdir(parents=True, exist_ok=True)
        write_whole(str(Path(options.bundle, tree.LOOK)), [msgspec.json.encode(look)])
    return show_tree(look, options.html, options.json, options.role)


def show_tree(look: JobLook, html: str, as_json: bool, role: str = "", more: Json | None = None) -> int:
    """`more`: further keys of the JSON."""
    from allranks.diagnosis.process_verdict import explain_processes

    finding = explain_processes(look)
    if html:
        from allranks.stacktraces.html import render_processes

        write_whole(html, [render_processes(look, finding, time.time())])
    shown = [json.dumps({**(more or {}), **finding_json(finding, look, role)}, indent=1)] if as_json else None
    for line in shown or render(finding, look, role):
        print(printable(line, 100_000) if shown is None else line)
    return 0 if finding.state == "moving" else 1


def _from_server(address: str) -> Capture:
    """Fetches the stacks of torch's debug server of a job."""
    import tempfile

    from allranks.stacktraces import read_capture

    with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
        for line in fetch(address, Path(folder)):
            _say(line)
        return read_capture(folder)


def _known_name(given: str, must: bool) -> str:
    """The name of the recorded job that matches; unless `must`, a name without a match, as of a Slurm job, is returned unchanged."""
    from allranks.incidents.job_overview import find_job, read_job

    try:
        folder = find_job(given)
    except InputError:
        if must and Path(given).is_dir():
            hint = f"Of captures made earlier: allranks stacks --from {given}"
            raise InputError(
                f"{given} holds no bundle of --bundle, and no job has this name", hint=hint
            ) from None
        if must:
            raise
        return given
    return str(read_job(folder).get("job") or folder.name)


def _check_one_job(pids: tuple[int, ...]) -> None:
    """InputError when ranks of several jobs are at or below these processes: one answer would mix them."""
    from allranks.stacktraces.find import UNNAMED, Selection, find_targets, split_jobs
    from allranks.stacktraces.procfs import scan
    from allranks.stacktraces.tree import find_tree

    below, ranks = {entry.pid for entry in find_tree(pids)}, []
    with contextlib.suppress(InputError):  # none is known as a rank
        ranks = [one for one in find_targets(Selection()) if one.child is None and one.pid in below]
    jobs = split_jobs(ranks, {entry.pid: entry.ppid for entry in scan([one.pid for one in ranks])})
    apart = len({one.environ.get("RANK", "") for one in ranks}) == len(ranks)
    if len(jobs) < 2 or (apart and sum(not job.startswith(UNNAMED) for job in jobs) < 2):
        return
    hint = ["Choose one:"]
    for job, own in sorted(jobs.items()):
        which = f"--pid {job[len(UNNAMED) :]}" if job.startswith(UNNAMED) else job
        hint.append(f"  allranks stacks {which}  # {count(len(own), 'rank')}")
    hint.append("All of them, each by itself: allranks stacks. As one job: add --tree.")
    raise InputError(
        f"ranks of {len(jobs)} jobs are below process {', '.join(map(str, pids))}", hint="\n".join(hint)
    )


def _sample(options: StacksFlags, args: argparse.Namespace, failures: list[str]) -> dict[str, Capture]:
    """Samples this node, all jobs at once (a job that was chosen, or is alone, has no name); keeps the bundles in -o."""
    from allranks.stacktraces import CollectOptions, Selection, collect, write_bundle
    from allranks.stacktraces.find import RANK_TITLES, find_jobs, find_others
    from allranks.stacktraces.procfs import scan

    base = read_debug_options(options.config) if options.config else DEFAULTS
    debug = read_flags(DebugOptions, args, base)
    folder = _folder(options.output or (str(debug.folder()) if options.config else ""), options.force)
    if args.rounds is None and args.interval_s is None and not options.config:
        debug = replace(debug, rounds=3, interval_s=options.for_s / 2)
    how = CollectOptions(
        rounds=debug.rounds,
        interval_s=debug.interval_s,
        native="never" if options.no_native else "all" if options.native_frames else debug.native,
        gdb=options.gdb,
        cuda_gdb=debug.cuda_gdb,
        faulthandler_signal=_signal_number(options.faulthandler) if options.faulthandler else None,
        gpu_core_dump=options.gpu_core_dump,
        raw_folder=folder,
    )
    titles = (*RANK_TITLES, *debug.patterns)
    jobs = find_jobs(Selection(options.pid, options.name, options.job, titles, container=options.container))

    def take(job: str, targets: list[Target]) -> Capture:
        ranks = sum(target.child is None for target in targets)
        _say(f"sampling {count(ranks, 'rank')}{f' of job {job}' if job else ''}")
        path = folder / _file_name(job) if folder is not None and job else folder
        found = collect(targets, replace(how, raw_folder=path), _say)
        if others := find_others(scan(), targets):
            found = replace(found, notes=(*found.notes, f"beside the ranks: {', '.join(others)}"))
        if path is not None:
            try:
                _say(f"Wrote {write_bundle(found, path)}")
            except OSError as error:
                failures.append(f"cannot write {path}: {why(error)}")
        return found

    with ThreadPoolExecutor(
        8, "allranks-jobs"
    ) as pool:  # each job takes --for, all of them together no longer
        return dict(zip(jobs, pool.map(take, jobs, jobs.values()), strict=True))


def _file_name(job: str) -> str:
    return re.sub(r"[^\w.-]", "_", job)


def _sample_all_nodes(options: StacksFlags, args: argparse.Namespace) -> Capture:
    """Samples every node of a job into one capture, through its agents or a Slurm step."""
    import tempfile

    from allranks.incidents.peers import find_lighthouse, gather_everywhere
    from allranks.stacktraces import read_capture

    lighthouse = find_lighthouse(options.job)
    if lighthouse is None:
        from allranks.cli.slurm import sample_through_slurm

        return sample_through_slurm(options.job, options.output, args)
    with tempfile.TemporaryDirectory(prefix="allranks-stacks-") as unnamed:
        folder = _folder(options.output, options.force) or Path(unnamed)
        found = gather_everywhere(lighthouse, folder, stacks=True)
        for text in found.missing:
            _say(f"missing: {text}")
        _say(f"asked {count(len(found.agents), 'agent')}")
        if options.output:
            _say(f"Wrote {folder}")
        return read_capture(folder / "stacks")


def _folder(name: str, force: bool) -> Path | None:
    """The output folder. Each node of a Slurm step gets its own folder, since they share a file system."""
    import socket

    if not name:
        return None
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or "1"
    folder = Path(name.replace("{host}", host))
    if nodes != "1" and "{host}" not in name:
        folder = folder / host
    if (folder / "bundle.json").exists() and not force:
        raise InputError(
            f"{folder} holds a bundle already", hint="give another folder, or --force to overwrite it"
        )
    check_folder(str(folder))
    return folder


def _say(text: str) -> None:
    note(f"allranks stacks: {text}")


def _signal_number(name: str) -> int:
    import signal

    text = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    number = int(name) if name.isdigit() else int(getattr(signal, text, 0))
    if not 0 < number < 65:
        raise InputError(f"{name!r} is not a signal", hint="for example --faulthandler SIGUSR1")
    return number


def _show(
    options: StacksFlags, captures: dict[str, Capture], reports: dict[str, StacksReport], failures: list[str]
) -> None:
    from allranks.stacktraces.text import grow_tree, render_text, report_json

    trees = {job: grow_tree(capture, options.all_threads) for job, capture in captures.items()}
    for job, report in reports.items() if options.html else ():
        from allranks.stacktraces.html import render_html

        page = Path(options.html)
        page = page.with_name(f"{page.stem}-{_file_name(job)}{page.suffix}") if job else page
        html = render_html(report, trees[job], job=job or options.job, made_s=time.time())
        try:
            write_whole(str(page), [html])
        except InputError as error:
            failures.append(str(error))
    if options.json:
        shapes = {job: report_json(report, trees[job]) for job, report in reports.items()}
        alone = next(iter(shapes.values())) if len(shapes) == 1 else {"jobs": shapes}
        print(json.dumps(alone, indent=1))
        return
    for job, report in reports.items():
        for line in [*([f"job {job}:"] if job else []), *render_text(report, trees[job])]:
            print(printable(line, 100_000))


def finding_json(finding: ProcessFinding, look: JobLook, role: str = "") -> Json:
    """The public JSON; fields may be added, never removed."""
    return {
        "schema": 1,
        "state": finding.state,
        "sentence": finding.sentence,
        "reason": finding.reason,
        "guilty": [asdict(one) for one in finding.guilty],
        "chain": [{"pid": one.pids[0], **asdict(one)} for one in finding.chain],
        "edges": [{"waits": _place(a), "for": _place(b)} for a, b in finding.edges],
        "processes": [_process(one) for one in look.processes if role in one.name],
        "notes": list(look.notes),
    }


def _place(where: Where) -> Json:
    return {"node": where[0], "pid": where[1]}


def _process(one: Process) -> Json:
    return {
        "name": one.name,
        **{name: getattr(one, name) for name in _FACTS.split()},
        "threads": [_thread(thread) for thread in one.threads if thread.frames or thread.main],
    }


def _thread(one: ThreadLook) -> Json:
    stack = [f"{f.file.rsplit('/', 1)[-1]}:{f.line} in {f.name}" for f in one.frames[:40]]
    kind = {"wait": one.wait.kind, "says": one.wait.says, "moved": one.moved, "busy": one.busy}
    return {"tid": one.tid, "name": one.name, "task": one.task, **kind, "stack": stack}


def render(finding: ProcessFinding, look: JobLook, role: str = "") -> Iterator[str]:
    """The answer first, then the culprit, then the tree of roles."""
    yield f"{finding.state.upper()}: {finding.sentence}"
    if finding.reason:
        yield f"  {finding.reason}"
    guilty = {(one.node, one.pid) for one in finding.guilty}
    several = len({p.node for p in look.processes}) > 1
    for one in finding.guilty:
        place = f"{one.file}:{one.line} in {one.function}" if one.file else "no line"
        yield f"  {one.role} (pid {one.pid}{f' on {one.node}' * several}): {place}: {one.wait}"
    yield ""
    groups: dict[tuple[str, str], list[Process]] = {}
    for process in look.processes:
        if role in process.name and not process.ours:
            does = " at ".join(filter(None, process.does))
            groups.setdefault((process.role, does), []).append(process)
    for (name, does), members in sorted(groups.items(), key=lambda item: _order(item[1], guilty)):
        numbers = f" ×{len(members)}" if len(members) > 1 else ""
        pids = ", ".join(str(p.pid) for p in members[:6]) + (" …" if len(members) > 6 else "")
        sign = " ◄" if guilty & {p.where for p in members} else ""
        nodes = f" on {', '.join(dict.fromkeys(p.node for p in members))}" * several
        yield f"{name}{numbers}{sign} (pid {pids}{nodes}): {does}"
    yield from (f"note: {text}" for text in look.notes)


def _order(members: list[Process], guilty: set[Where]) -> tuple[bool, bool, int, int]:
    return not guilty & {p.where for p in members}, members[0].system, len(members), members[0].pid
