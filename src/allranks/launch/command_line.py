"""Splits the arguments of `allranks run` into our flags, torchrun's flags and the script; and the environment of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from allranks.errors import InputError

# torchrun's flags without a value
_ALONE = frozenset({"standalone", "module", "no-python", "run-path", "virtual-local-rank", "help"})
_SHORT_ALONE = frozenset({"-m", "-h"})
#: its flags with a value; importing torch to ask takes seconds
_VALUED = frozenset({
    "duplicate-stderr-filters", "duplicate-stdout-filters", "event-log-handler", "local-addr",
    "local-ranks-filter", "log-dir", "log-line-prefix-template", "logs-specs", "master-addr", "master-port",
    "max-restarts", "monitor-interval", "nnodes", "node-rank", "nproc-per-node", "numa-binding",
    "print-completion", "rdzv-backend", "rdzv-conf", "rdzv-endpoint", "rdzv-id", "redirects", "role",
    "shutdown-timeout", "signals-to-handle", "start-method", "tee",
})  # fmt: skip
_NUMBER = re.compile(r"\d+")
_DEVICES = ("auto", "cpu", "gpu", "xpu", "npu", "hpu", "mtia", "mps", "privateuseone")
_VALUES = {
    "nnodes": (re.compile(r"\d+(:\d+)?"), "a number, or MIN:MAX"),
    "nproc-per-node": (re.compile(rf"\d+|{'|'.join(_DEVICES)}"), "a number, or auto, cpu, gpu"),
    **dict.fromkeys(("max-restarts", "node-rank", "master-port"), (_NUMBER, "a number")),
}


def check(theirs: Sequence[str], ours: Iterable[str]) -> None:
    """Raises InputError for flags that neither allranks nor torchrun knows, before any process is started."""
    left = iter(theirs)
    for word in left:
        flag, equals, value = word.partition("=")
        if not equals and not _stands_alone(flag):
            value = next(left, "")
        name = flag[2:].replace("_", "-")
        if not flag.startswith("--"):
            continue
        if not _is_known(name):
            near = get_close_matches(flag, [*ours, *(f"--{known}" for known in _VALUED | _ALONE)], 1, 0.75)
            hint = f"Did you mean {near[0]}?" if near else "`allranks run --help` lists the flags."
            raise InputError(f"unknown flag {flag}: not a flag of allranks run or torchrun", hint=hint)
        pattern, meaning = _VALUES.get(name, (None, ""))
        if pattern is not None and not pattern.fullmatch(value):
            raise InputError(f"{flag} takes {meaning}, not {value!r}")


def _is_known(name: str) -> bool:
    """Whether this is a torchrun flag or the beginning of one; asks torch about an unknown name."""
    if any(known.startswith(name) for known in _VALUED | _ALONE):
        return True
    try:
        from torch.distributed.run import get_args_parser
    except ImportError:
        return False
    flags = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    return any(flag.replace("_", "-").startswith(f"--{name}") for flag in flags)


def arrange(words: Sequence[str], ours: dict[str, bool]) -> tuple[list[str], list[str], list[str]]:
    """(our words, torchrun's words, script and its arguments). `ours` maps our flags to "takes a value"."""
    mine: list[str] = []
    theirs: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        name, _, value = word.partition("=")
        target = mine if name in ours else theirs
        takes = ours[name] if name in ours else not _stands_alone(name)
        target.append(word)
        position += 1
        if takes and not value and "=" not in word and position < len(words):
            target.append(words[position])
            position += 1
    return mine, theirs, list(words[position:])


def _stands_alone(name: str) -> bool:
    if name.startswith("--"):
        return name[2:].replace("_", "-") in _ALONE
    return name in _SHORT_ALONE or (len(name) > 2 and not name.startswith("--"))


def has_flag(words: Sequence[str], *names: str) -> bool:
    """Whether a torchrun flag is present, in either spelling."""
    wanted = {name.replace("_", "-") for name in names}
    return any(word.partition("=")[0].replace("_", "-") in wanted for word in words)


def flag_value(words: Sequence[str], name: str) -> str | None:
    """The last value given to a torchrun flag, in either spelling."""
    found = None
    for index, word in enumerate(words):
        head, equals, value = word.partition("=")
        if head.replace("_", "-") == name:
            found = value if equals else (words[index + 1] if index + 1 < len(words) else None)
    return found


#: The PET_* variables that allranks needs; torchrun reads the others by itself.
_READ = ("nnodes", "nproc-per-node", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "max-restarts",
         "log-dir", "local-addr", "standalone", "module", "no-python")  # fmt: skip


def from_environment(environment: Mapping[str, str], given: Sequence[str]) -> list[str]:
    """torchrun's flags from PET_* variables (set by Kubeflow), unless given on the command line."""
    words = []
    for name in _READ:
        value = environment.get(f"PET_{name.upper().replace('-', '_')}")
        if not value or has_flag(given, f"--{name}"):
            continue
        if name not in _ALONE:
            words.append(f"--{name}={value}")
        elif value != "0":
            words.append(f"--{name}")
    return words


@dataclass(frozen=True)
class JobEnvironment:
    """The variables of one job that every rank gets."""

    job: str
    token: str = ""
    lighthouse: str = ""  # host:port; "": none
    folder: Path | None = None  # of the black boxes; None: the recorder's default
    snapshots: str = ""  # host:port of this node's snapshot keeper; "": none
    record: bool = True

    def variables(self) -> dict[str, str]:
        found = {"ALLRANKS_JOB_ID": self.job, "ALLRANKS_RECORD": "1" if self.record else "0"}
        found |= {"ALLRANKS_TOKEN": self.token, "ALLRANKS_LIGHTHOUSE": self.lighthouse}
        found |= {"ALLRANKS_DIR": str(self.folder or ""), "ALLRANKS_SNAPSHOTS": self.snapshots}
        return {name: value for name, value in found.items() if value}


def job_token(environment: Mapping[str, str]) -> str:
    """The job token: from the environment, or a new one."""
    import secrets

    from allranks.channel.keys import find_token

    return find_token(environment) or secrets.token_urlsafe(24)
