"""`allranks watch -- COMMAND` and `allranks watch --pid P`: a sidecar that collects stacks when a job stalls."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from allranks.cli.parser import read_flags, words_after
from allranks.cli.terminal import check_folder, note
from allranks.errors import InputError
from allranks.model.debug_options import DebugOptions, read_debug_options
from allranks.model.options import argument, option

if TYPE_CHECKING:
    from allranks.watch.role_sidecar import RoleReport
    from allranks.watch.sidecar import Collection

#: Options of a collection with a flag; the others are for the job file only.
OF_WATCH = ("wait_s", "output_dir", "at_s", "no_progress_s", "slow_ms", "rounds", "interval_s", "cuda_gdb")


@dataclass(frozen=True)
class WatchFlags:
    """Options of the command besides those of a collection."""

    words: tuple[str, ...] = argument((), "the job to start and watch", nargs="...", metavar="-- COMMAND")
    pid: tuple[int, ...] = option((), "watch this process and its children instead; repeatable", metavar="P")
    tree: bool = option(
        False,
        "watch every process below it, whatever its role, and report when the job is stuck; default for a job of several "
        "processes without ranks",
        flags="--tree",
    )
    config: str = option(
        "",
        "YAML with a `debug:` section (docs/reference/job_file.md); flags win over it",
        metavar="FILE",
    )
    json: bool = option(False, "one JSON line for each collection on stderr")


FLAGS = (WatchFlags, (DebugOptions, OF_WATCH))
EPILOG = (
    "kill -QUIT of this process collects at once. The exit code is the command's\n(128 + N after signal N).\n"
)


def main(args: argparse.Namespace) -> int:
    """Runs the sidecar; the exit code is that of the watched command."""
    from allranks.watch.role_sidecar import RoleSidecar
    from allranks.watch.sidecar import Sidecar

    words = words_after(args)
    if bool(words) == bool(args.pid):
        hint = "allranks watch -- torchrun --nproc-per-node 8 train.py"
        raise InputError("give either a command or --pid", hint=hint)
    base = read_debug_options(args.config) if args.config else DebugOptions()
    options = read_flags(DebugOptions, args, base)

    def show(done: Collection | RoleReport, verdict: str, sentence: str, **facts: object) -> None:
        row = {"reason": done.reason, "folder": str(done.folder), **facts, "sentence": sentence}
        if args.json:
            note(json.dumps(row))
            return
        _say(f"{verdict}: {sentence}")
        _say(f"Wrote {done.folder}")

    def show_ranks(done: Collection) -> None:
        found = done.report
        verdict = {True: "HUNG", False: "not hung", None: "unclear"}[found.hung]
        show(done, verdict, found.sentence, hung=found.hung, culprits=list(found.culprits))

    def show_roles(done: RoleReport) -> None:
        found = done.finding
        guilty = [asdict(one) for one in found.guilty]
        show(done, "STUCK", found.sentence, state=found.state, guilty=guilty)

    def watch_roles(reason: str) -> int:
        _say(f"{reason}: the job has several processes and no ranks, so all of them are watched (--tree)")
        return RoleSidecar(options, folder, _say, show_roles).continue_watch(sidecar, reason)

    folder = options.folder()
    try:
        check_folder(str(folder))
    except InputError as error:  # the job runs nevertheless
        _say(f"{error}: stacks cannot be written there. Give another folder with -o DIR")
    if args.tree:
        sidecar: Sidecar = RoleSidecar(options, folder, _say, show_roles)
    else:
        sidecar = Sidecar(options, folder, _say, show_ranks)
        sidecar.on_several = watch_roles
    if words:
        sidecar.start_command(words)
    else:
        sidecar.take(args.pid)
    try:
        return sidecar.run()
    except KeyboardInterrupt:  # ends a watch of running processes
        _say("stopped")
        return 130


def _say(text: str) -> None:
    note(f"allranks watch: {text}")
