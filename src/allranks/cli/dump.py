"""`allranks dump`: copies the black boxes of a job, without help from its ranks, or converts dumps."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.api.debug_server import is_address
from allranks.cli.terminal import answer, note
from allranks.errors import InputError, why
from allranks.model.formatting import ranks_text
from allranks.model.options import argument, option
from allranks.model.parsing import printable

if TYPE_CHECKING:
    from allranks.blackbox.header import Header

ENDINGS = {".json": "json", ".pickle": "pickle", ".pkl": "pickle"}


@dataclass(frozen=True)
class DumpFlags:
    """The boxes to copy, and the format. All options are off or empty by default."""

    paths: tuple[str, ...] = argument(
        (),
        "name of a job, black boxes, dumps, archives or folders of them, or the address of torch's debug server, "
        "http://HOST:25999 (default: the job that runs on this machine)",
        metavar="JOB",
    )
    job: str = option("", "of this job (ALLRANKS_JOB_ID, TORCHELASTIC_RUN_ID, SLURM_JOB_ID)", metavar="ID")
    pid: tuple[int, ...] = option((), "only this process; repeatable", metavar="P")
    rank: tuple[int, ...] = option((), "only this rank; repeatable", metavar="R")
    format: str | None = option(
        None,
        "a copy of the black box (of a job), or PyTorch's dump formats (default: by the ending of -o, else box for jobs and pickle for files)",
        choices=("box", "pickle", "json"),
    )
    active: bool = option(False, "pickle and json: only calls that are not finished")
    all_attempts: bool = option(False, "also ranks of earlier attempts")
    output: str = option(
        "",
        "folder to write to, or a file for one rank (default: allranks-dump-JOB)",
        flags="-o --output",
        metavar="DIR",
    )
    force: bool = option(False, "overwrite existing files")
    list: bool = option(False, "only show what there is")
    native: str = option(
        "",
        "also ask the ranks for torch's own NCCL dump through TORCH_NCCL_DEBUG_INFO_PIPE_FILE=STEM",
        metavar="STEM",
    )
    all_nodes: bool = option(False, "every node of a job under `allranks run`, through its agents")
    json: bool = option(False, "one JSON object on stdout")


FLAGS = (DumpFlags,)


def main(args: argparse.Namespace) -> int:
    """Writes one file per rank; 1 when a file is damaged, 2 when there is no box."""
    import tempfile

    args.path = args.paths[0] if args.paths else None
    if _are_files(args):
        return _convert(args)
    args.format = args.format or "box"
    if is_address(args.path or ""):
        return _fetch_from_server(args)
    if not args.all_nodes:
        return _dump(args)
    with tempfile.TemporaryDirectory(prefix="allranks-dump-") as folder:
        args.job = args.job or args.path
        args.path = _fetch(args, folder)
        args.output = args.output or f"allranks-dump-{args.job or 'all-nodes'}"
        return _dump(args)


def _are_files(args: argparse.Namespace) -> bool:
    """Whether the arguments are files to convert: dumps, several files, or an output file with a known ending."""
    from allranks.blackbox.reader import find_boxes

    paths = [Path(path) for path in args.paths if not is_address(path)]
    if not paths or args.list or not all(path.exists() for path in paths):
        return False
    boxes = all(path.suffix == ".box" if path.is_file() else find_boxes(path) for path in paths)
    return not boxes or len(paths) > 1 or Path(args.output or "").suffix in ENDINGS


def _put(path: Path, data: str | bytes, force: bool, mode: int = 0o600) -> None:
    """Writes a file; InputError when it exists, or cannot be written."""
    from allranks.model.files import write_atomically

    if path.exists() and not force:
        raise InputError(f"{path} exists", hint="Choose another name with -o, or --force.")
    try:
        write_atomically(path, data, mode)
    except OSError as error:
        raise InputError(f"cannot write {path}: {why(error)}") from error


def _convert(args: argparse.Namespace) -> int:
    """Writes each rank's calls in another format; 1 when some files were damaged or left out."""
    from allranks.load import LoadOptions, load_paths
    from allranks.model.torch_dump import to_torch_json, to_torch_pickle

    output = Path(args.output or f"allranks-dump-{Path(args.paths[0]).stem}")
    ending = ENDINGS.get(output.suffix.lower(), "")
    form = args.format or ending or "pickle"
    if form == "box":
        raise InputError("files cannot be made into black boxes", hint="Use --format pickle or json.")
    result = load_paths(args.paths, LoadOptions(number_unknown=True))
    one_file = len(result.traces) == 1 and ending and not output.is_dir()
    encode = to_torch_pickle if form == "pickle" else to_torch_json
    written = []
    for trace in result.traces:
        # the name under which torch's tools and ours find the rank
        name = f"trace_{trace.header.rank or 0}" + (".json" if form == "json" else "")
        path = output if one_file else output / name
        _put(path, encode(trace, include_completed=not args.active), args.force, 0o666)
        written.append({"path": str(path), "rank": trace.header.rank})
    bad = [one for one in result.files if one.status != "ok"]
    for one in bad:
        note(f"{one.path}: {one.status}: {one.note}")
    facts = {"files": written, "left_out": [one.path for one in bad]}
    answer(args.json, facts, [f"Wrote {one['path']}" for one in written])
    return 1 if bad else 0


def _fetch_from_server(args: argparse.Namespace) -> int:
    """Fetches the dumps of torch's debug server of a job."""
    from allranks.api.debug_server import fetch

    folder = Path(args.output or "allranks-dump-debug-server")
    if folder.is_dir() and any(folder.iterdir()) and not args.force:
        raise InputError(f"{folder} is not empty", hint="choose another folder with -o, or --force")
    for line in fetch(args.path, folder):
        note(f"allranks dump: {line}")
    paths = sorted(str(path) for path in folder.iterdir())
    answer(args.json, {"written": paths}, (f"Wrote {path}" for path in paths))
    return 0


def _fetch(args: argparse.Namespace, folder: str) -> str:
    """Gathers the boxes of all nodes in a folder; returns its path."""
    from allranks.incidents.peers import find_lighthouse, gather_everywhere

    lighthouse = find_lighthouse(args.job)
    if lighthouse is None:
        raise InputError(
            "--all-nodes needs a job under `allranks run` with a lighthouse",
            hint="give --job (a job of this node), or ALLRANKS_LIGHTHOUSE and ALLRANKS_TOKEN",
        )
    for text in gather_everywhere(lighthouse, Path(folder), stacks=False).missing:
        note(f"allranks dump: missing: {text}")
    return str(Path(folder) / "boxes")


def _dump(args: argparse.Namespace) -> int:
    from allranks.recording.dump import ask_through_pipe

    headers = _choose(args)
    if args.list:
        _print_list(headers, args.json)
        return 0
    written = _write(args, headers)
    asked = [h.rank for h in headers if args.native and ask_through_pipe(args.native, h.rank)]
    lines = [f"Wrote {e['path']} (rank {e['rank']}, {e['calls']} calls, {e['state']})" for e in written]
    answer(args.json, {"files": written, "asked_native": asked}, lines)
    for rank in asked if not args.json else ():
        note(f"asked rank {rank} for its NCCL dump")
    silent = [h.rank for h in headers if args.native and h.rank not in asked]
    if silent:
        note(
            f"allranks dump: no NCCL dump of {ranks_text(silent)}: there is no pipe {args.native}RANK.pipe. Start the job with "
            f"TORCH_NCCL_DEBUG_INFO_PIPE_FILE={args.native} and TORCH_NCCL_DUMP_ON_TIMEOUT=1"
        )
    return 0


def _choose(args: argparse.Namespace) -> list[Header]:
    """The chosen boxes: of the newest attempt of each rank, unless all attempts are requested."""
    from allranks.blackbox.files import hint_at_other_users, recorded_users
    from allranks.blackbox.layout import job_prefix

    prefix = job_prefix(args.job) if args.job and not args.path else ""
    every = {header.path: header for path in _sources(args) for header in _headers(path)}
    found = [
        header
        for header in every.values()
        if (not args.pid or header.pid in args.pid)
        and (not args.rank or header.rank in args.rank)
        and header.path.name.startswith(prefix)
    ]
    if not found:
        words = [f"job {args.job}"] if args.job else []
        words += [f"pid {pid}" for pid in args.pid or ()] + [f"rank {rank}" for rank in args.rank or ()]
        hint = f"Is the job recorded (allranks.record() or allranks run)? {hint_at_other_users(recorded_users())}"
        hint += " `allranks dump --list` lists all boxes." if words else ""
        name = ", ".join(words) or args.path or "any job"
        raise InputError(f"no black box of {name} on this machine", hint=" ".join(hint.split()))
    if args.list:
        return found
    if args.pid:
        found = _of_these_processes(found)
    elif not (args.path or args.job):
        found = _only_job(found)
    return found if args.all_attempts or args.pid else _newest(found)


def _only_job(headers: list[Header]) -> list[Header]:
    """The boxes of the only running job on this machine, or of the only recorded one."""
    running = {header.path.parent for header in headers if _state(header) == "running"}
    jobs = running or {header.path.parent for header in headers}
    if len(jobs) > 1:
        names = ", ".join(sorted(path.name for path in jobs)[:8])
        raise InputError(
            f"{len(jobs)} jobs {'run' if running else 'were recorded'} here: {names}{' …' if len(jobs) > 8 else ''}",
            hint="Choose one with --job; `allranks dump --list` shows their ranks.",
        )
    return [header for header in headers if header.path.parent in jobs]


def _of_these_processes(headers: list[Header]) -> list[Header]:
    """Without boxes of ended processes whose pid a running process has now."""
    running = {header.pid for header in headers if _state(header) == "running"}
    return [header for header in headers if header.pid not in running or _state(header) == "running"]


def _sources(args: argparse.Namespace) -> list[Path]:
    from allranks.blackbox.files import job_folders
    from allranks.blackbox.reader import boxes_of_process, processes
    from allranks.incidents.job_overview import find_job

    if args.path:
        return [Path(args.path) if Path(args.path).exists() else find_job(args.path)]
    chosen = os.environ.get("ALLRANKS_DIR")
    folders = [Path(chosen)] if chosen else []
    folders += job_folders() if args.job or not chosen else []
    running = args.pid or (processes() if args.job else ())
    return [*folders, *(box for pid in running for box in boxes_of_process(pid))]


def _headers(path: Path) -> list[Header]:
    from allranks.blackbox.header import read_header
    from allranks.blackbox.reader import find_boxes

    found = []
    for box in [path] if path.is_file() else find_boxes(path):
        try:
            found.append(read_header(box))
        except InputError as error:
            note(f"allranks dump: skipped {box}: {error}")
    return found


def _newest(headers: list[Header]) -> list[Header]:
    """One box per rank: the latest attempt, then the latest start."""
    best: dict[int, Header] = {}
    for header in headers:
        known = best.get(header.rank)
        if known is None or (header.attempt, header.start_ns) > (known.attempt, known.start_ns):
            best[header.rank] = header
    return [best[rank] for rank in sorted(best)]


def _state(header: Header) -> str:
    from allranks.blackbox.header import is_alive

    if header.closed:  # the process may still run, without a recorder
        return header.closed
    return "running" if is_alive(header.pid, header.start_ticks) else "exited without shutting down"


def _write(args: argparse.Namespace, headers: list[Header]) -> list[dict[str, object]]:
    from allranks.recording.dump import dump_bytes

    folder = Path(args.output or f"allranks-dump-{headers[0].path.parent.name}")
    many = len({header.rank for header in headers}) < len(headers)
    written: list[dict[str, object]] = []
    for header in headers:
        # a copy keeps its name; torch's formats are named as torchfrtrace wants them
        extra = f"a{header.attempt}_p{header.pid}_" if many else ""
        name = f"{extra}rank_{max(header.rank, 0)}" + (".json" if args.format == "json" else "")
        target = folder / (header.path.name if args.format == "box" else name)
        _put(target, dump_bytes(header.path, args.format, include_completed=not args.active), args.force)
        facts = {"path": str(target), "rank": header.rank, "pid": header.pid, "attempt": header.attempt}
        written.append(
            {**facts, "calls": header.calls_started, "state": _state(header), "box": str(header.path)}
        )
    return written


def _print_list(headers: list[Header], as_json: bool) -> None:
    rows = []
    for header in sorted(headers, key=lambda h: (str(h.path.parent), h.attempt, h.rank)):
        row = {"job": header.path.parent.name, "rank": header.rank, "world_size": header.world_size}
        row |= {"attempt": header.attempt, "pid": header.pid, "state": _state(header), "step": header.step}
        row |= {"calls": header.calls_started, "completed": header.calls_completed, "path": str(header.path)}
        rows.append(row)
    lines = [
        f"{row['job']}  rank {row['rank']}/{row['world_size']}  attempt {row['attempt']}  pid {row['pid']}  "
        f"step {'-' if row['step'] == -1 else row['step']}  calls {row['completed']}/{row['calls']}  {row['state']}"
        for row in rows
    ]
    answer(as_json, {"boxes": rows}, map(printable, lines))
