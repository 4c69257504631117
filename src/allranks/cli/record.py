"""`allranks record -- COMMAND` and `allranks record --env`: records every Python process that a command starts."""

from __future__ import annotations

import argparse
import os
import shlex
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from allranks.cli.parser import read_flags, words_after
from allranks.cli.terminal import check_folder
from allranks.errors import InputError
from allranks.model.options import argument, option

PTH = "allranks_record.pth"


@dataclass(frozen=True)
class RecordFlags:
    words: tuple[str, ...] = argument((), "the job to start and record", nargs="...", metavar="-- COMMAND")
    env: bool = option(False, 'print the variables for a shell: eval "$(allranks record --env)"')
    job: str = option(
        "", "name of the job (default: the present one of Slurm, else the time)", metavar="NAME"
    )
    output: str = option(
        "", "folder of the black boxes (default: shared memory)", metavar="DIR", flags="-o --output"
    )


FLAGS = (RecordFlags,)
EPILOG = """\
Every Python process that the command starts records its process groups,
also Ray workers and the processes of an engine.
`allranks diagnose` and `allranks dump` read them.
"""


def main(args: argparse.Namespace) -> int:
    """Prints the variables, or becomes the command."""
    flags, words = read_flags(RecordFlags, args), words_after(args)
    if bool(words) == flags.env:
        hint = "allranks record -- python -m mypackage.train"
        raise InputError("give either a command or --env", hint=hint)
    if not any(Path(folder, PTH).is_file() for folder in _site_folders()):
        raise InputError(
            f"{PTH} is not installed next to the package: processes cannot record by themselves",
            hint="Install allranks again with pip. allranks.record() in the script works without it.",
        )
    check_folder(flags.output)
    wanted = variables(flags, dict(os.environ))
    if flags.env:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in wanted.items()))
        return 0
    try:
        os.execvpe(words[0], words, {**os.environ, **wanted})
    except OSError as error:
        raise InputError(f"cannot start {words[0]!r}: {error.strerror}") from error


def variables(flags: RecordFlags, environment: dict[str, str]) -> dict[str, str]:
    """The variables for the command."""
    known = environment.get("ALLRANKS_JOB_ID") or environment.get("SLURM_JOB_ID")
    found = {
        "ALLRANKS_RECORD": "auto",
        "ALLRANKS_JOB_ID": flags.job or known or time.strftime("job-%m%d-%H%M%S"),
    }
    if flags.output:
        found["ALLRANKS_DIR"] = os.path.abspath(flags.output)
    return found


def _site_folders() -> list[str]:
    """Where Python reads .pth files."""
    import site

    return [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
