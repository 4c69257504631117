"""The `allranks` command: dispatches to the sub-command's file, and turns errors into exit codes. Only cli prints or exits.

Each sub-command is a file with FLAGS or ACTIONS (see allranks.cli.parser.declare) and `main(args) -> int`; its one-line help is
here. Files import what they need inside functions, so that `--help` takes 30 ms. Exit codes: 0 nothing wrong, 1 fault found,
2 could not run.
"""

from __future__ import annotations

import codecs
import errno
import gc
import importlib
import os
import sys

TYPE_CHECKING = False  # known to type checkers; importing typing would take longer
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

#: Heading -> sub-command -> one-line help, in the order of `allranks --help`.
GROUPS: dict[str, dict[str, str]] = {
    "My job hangs now": {
        "diagnose": "find out why a job hangs, from dumps: rank, line and cause",
        "stacks": "show what every rank is doing now, and what it is stuck on",
        "dump": "copy black boxes, also of a job that hangs; convert dumps",
        "replay": "write a recorded hang as one small Python program; run it",
        "status": "show the ranks of a job: step, call, who waits for whom",
        "top": "show the ranks of a job, live",
        "page": "open the page of a job in the browser",
    },
    "Keep my job running": {
        "run": "start a job with torchrun's command line; record it, keep it alive",
        "record": "record every process group of a command, without touching its code",
        "watch": "collect stacks when a job stalls, also one that already runs",
        "lighthouse": "track which replicas of a job are alive and train together",
        "slurm": "submit or start a job under Slurm, or collect its stacks",
        "drill": "run a job under planned faults; report what was noticed",
    },
    "Where does the time go": {
        "goodput": "show where the time of a job went, and what it cost",
        "slow": "show what slow ranks cost each step, and why",
        "advise": "show what would raise the goodput of a job, and by how much",
        "history": "list nodes that failed in earlier jobs",
    },
    "Lose nothing": {
        "checkpoint": "list, verify, copy, prune, export and import checkpoints",
        "config": "check, show or describe a job file",
        "index": "build, show or verify a token index",
    },
    "Read dumps": {
        "frtrace": "take torchfrtrace's command line, print its output",
    },
    "This machine": {
        "demo": "show a hang, its verdict and a recovery on CPU, in a minute",
        "doctor": "check a node before a job, or explain the logs after it",
        "mcp": "offer these commands to an AI agent as tools (MCP, on stdio)",
        "etcd": "start, check or stop an etcd on this machine",
        "completion": "print a completion script for bash, zsh or fish",
    },
}
#: sub-command -> (module under allranks.cli, one-line help).
COMMANDS = {
    name: ("status" if name == "top" else name, text)
    for names in GROUPS.values()
    for name, text in names.items()
}
#: Commands that read dumps with numpy, and must start fast.
READING = frozenset({"diagnose", "frtrace", "dump", "replay"})
#: Commands that may use obstore, whose threads can abort the interpreter at its end.
STORING = frozenset({"checkpoint", "doctor"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. Never raises for errors that the user can fix."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    program = f"allranks {name}" if name in COMMANDS else "allranks"
    try:
        code = _main(words, name)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except Exception as error:
        return _explain(program, error)


def _main(words: list[str], name: str | None) -> int:
    if not words or words in (["-h"], ["--help"]):  # needs no parser
        print(program_help(), end="")
        return 0 if words else 2
    if name == words[0] and name not in COMMANDS:
        return _unknown(name)
    parser = make_parser(name, alone=words[0] == name)
    if name in COMMANDS:
        module = importlib.import_module(f"allranks.cli.{COMMANDS[name][0]}")
        if hasattr(module, "arrange_words"):  # `run` also takes flags of torchrun
            words = module.arrange_words(words)
    args = parser.parse_args(words)
    if args.command is None:
        print(program_help(), end="")
        return 2
    code: int = importlib.import_module(f"allranks.cli.{COMMANDS[args.command][0]}").main(args)
    return code


def _explain(program: str, error: Exception) -> int:
    """Prints the error and its hint on stderr, with a traceback only for bugs."""
    from allranks.errors import AllranksError, why
    from allranks.model.parsing import printable, without_secrets

    hint, text = getattr(error, "hint", ""), str(error)
    if isinstance(error, OSError) and not isinstance(error, AllranksError) and error.errno == errno.ENOSPC:
        text, hint = why(error), "Free some space there, or name another folder."
        if not error.filename:
            _drop_output()  # else the interpreter would try to write it again
            text, hint = "no space left where the output goes", "The output is incomplete."
    elif not isinstance(error, AllranksError | PermissionError | FileNotFoundError):
        import traceback

        traceback.print_exc()
        print(f"{program}: this is a bug in allranks; please report it with the lines above", file=sys.stderr)
        return 2
    elif isinstance(error, OSError) and isinstance(error.filename, str | bytes) and error.strerror:
        text = f"{os.fsdecode(error.filename)}: {error.strerror}"
        if isinstance(error, PermissionError) and not hint:
            hint = "Is it yours? `ls -ld` shows its owner and permissions."
    if isinstance(error, FileNotFoundError) and not error.filename and not _has_working_folder():
        text, hint = "the working folder was removed", "Change to another folder (cd), then start again."
    # text may begin with the program's name: "allranks run needs the extra …"
    text = f"{program}: {text}".replace(f"{program}: {program} ", f"{program} ")
    for line in f"{text}\n{hint}".rstrip().split("\n"):
        print(printable(without_secrets(line)), file=sys.stderr)
    return 2


def _has_working_folder() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


def _drop_output() -> None:
    """Discards buffered output after stdout was closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run() -> None:
    """Console entry point. Reading commands run without garbage collection and exit without freeing memory, since with the rings
    of a thousand ranks both take longer than the diagnosis. OpenBLAS gets one thread, since its threads spin for longer than a
    small diagnosis takes."""
    _prepare_output()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in READING:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        gc.disable()
    code = main()
    if name not in READING | STORING:
        sys.exit(code)
    sys.stderr.flush()
    os._exit(code)


#: Replacements for terminals that only support ASCII.
ASCII = dict(zip("…→←─│├└·µ◄×", ("...", "->", "<-", "-", "|", "|", "`", "-", "u", "<", "x"), strict=True))


def _prepare_output() -> None:
    """Makes output robust: unsupported characters are replaced, closed streams discard output."""
    codecs.register_error("allranks", _as_ascii)
    # otherwise a socket may get one of these numbers, and torch's store aborts the job when it closes that
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="allranks")


def _as_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replaces a character: bytes of file names are unchanged, known ones become ASCII, others their number."""
    assert isinstance(error, UnicodeEncodeError)
    char = error.object[error.start]
    if "\udc80" <= char <= "\udcff":
        return bytes([ord(char) - 0xDC00]), error.start + 1
    return ASCII.get(char) or f"\\u{ord(char):04x}", error.start + 1


def program_help() -> str:
    """The text of `allranks --help`: commands by purpose."""
    about = "Finds out why a distributed PyTorch job hangs, and keeps it training when\nmachines fail."
    lines = ["usage: allranks COMMAND …", "", about, ""]
    for heading, names in GROUPS.items():
        lines += [f"{heading}:", *(f"  {name:<12}{text}" for name, text in names.items()), ""]
    lines += ["`allranks COMMAND --help` shows arguments and examples."]
    return "\n".join(lines) + "\n"


def make_parser(chosen: str | None, *, alone: bool) -> argparse.ArgumentParser:
    """The parser of the chosen command, or of all; see allranks.cli.parser."""
    from allranks.cli import parser

    return parser.make_parser(chosen, alone=alone)


def _unknown(name: str) -> int:
    """Reports an unknown command, with similar names."""
    from difflib import get_close_matches

    actions = {one: f"`allranks lighthouse {one}`" for one in ("evict", "readmit", "collect")}
    actions |= {"explain": "`allranks doctor explain LOG`", "incidents": "`allranks status JOB`"}
    near = get_close_matches(name, COMMANDS, 3, 0.7)
    near = [actions[one] for one in get_close_matches(name, actions, 1, 0.8)] or near
    print(f"allranks: there is no command {name!r}", file=sys.stderr)
    hint = f"Did you mean {' or '.join(near)}?" if near else "`allranks --help` lists the commands."
    print(hint, file=sys.stderr)
    return 2
