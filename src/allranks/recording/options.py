"""Options of a recorder: argument, then environment, then default. Runs in the rank.

Variables of PyTorch's and torchcomms' recorders are used if they have the same meaning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.blackbox.layout import DEFAULT_CAPACITY, DEFAULT_HEAP_BYTES
from allranks.errors import ConfigurationError, NotRecording

#: Errors of queries to torch that a version, a backend or an unfinished group does not support.
TORCH_ERRORS = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
EXPECTED = 7  # VERSION in _fast.c, increased with every change of the interface
BUILD = "install a wheel of allranks, or install a C compiler and Python's headers and reinstall allranks"
DEFAULT_STACK_DEPTH = 8
MIN_CAPACITY = 16


@dataclass(frozen=True)
class RecorderOptions:
    """Settings of the recorder of one process. Arguments of `record()` override the environment."""

    enabled: bool = True
    capacity: int = DEFAULT_CAPACITY  # records kept
    heap_bytes: int = DEFAULT_HEAP_BYTES  # room for names, sizes, stacks
    stack_depth: int = DEFAULT_STACK_DEPTH  # frames per call; 0 records no stacks
    folder: Path | None = None  # None: a folder per job in shared memory, else in the temporary folder
    job: str = "job"
    attempt: int = 0
    rank: int = -1  # -1: unknown until the first process group
    world_size: int = -1
    local_rank: int = -1
    dump_prefix: str = ""  # "" = next to the black box; else PREFIX + rank, as torch names its dumps
    dump_whole_name: bool = False  # the prefix is the whole file name (…DYNAMIC_FILE_NAME=1)
    dump_on: frozenset[str] = frozenset({"timeout", "exception"})  # any of timeout, exception, exit
    late: bool = False  # hook torch when the program imports it
    poll_s: float = 0.1  # interval of the side thread

    def __post_init__(self) -> None:
        if self.capacity < MIN_CAPACITY:
            raise ConfigurationError(
                f"a ring of {self.capacity} records is too small: at least {MIN_CAPACITY}"
            )
        if self.stack_depth < 0 or self.poll_s <= 0:
            raise ConfigurationError("stack_depth must be 0 or more, and poll_s more than 0")
        unknown = self.dump_on - {"timeout", "exception", "exit"}
        if unknown:
            raise ConfigurationError(
                f"dump_on may contain timeout, exception and exit, not {sorted(unknown)}"
            )


def from_environment(env: Mapping[str, str] | None = None, **arguments: Any) -> RecorderOptions:
    """Options of this process; `arguments` that are not None override the environment."""
    values = os.environ if env is None else env
    options = RecorderOptions(
        enabled=values.get("ALLRANKS_RECORD", "1").lower() not in {"0", "false", "off", "no"},
        capacity=max(MIN_CAPACITY, _capacity(values)),
        stack_depth=_number(values, "ALLRANKS_STACK_DEPTH", default=DEFAULT_STACK_DEPTH),
        folder=Path(values["ALLRANKS_DIR"]) if values.get("ALLRANKS_DIR") else None,
        job=_first(values, "ALLRANKS_JOB_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID") or "job",
        attempt=_number(
            values, "ALLRANKS_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", default=0
        ),
        rank=_number(values, "ALLRANKS_RANK", "RANK", "SLURM_PROCID", default=-1),
        world_size=_number(values, "ALLRANKS_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS", default=-1),
        local_rank=_number(values, "LOCAL_RANK", "SLURM_LOCALID", default=-1),
        dump_prefix=_first(
            values,
            "TORCH_FR_DUMP_TEMP_FILE",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
            "TORCHCOMM_FR_DUMP_TEMP_FILE",
        ),
        dump_whole_name=any(
            is_true(values.get(f"{library}_FR_DUMP_DYNAMIC_FILE_NAME")) for library in ("TORCH", "TORCHCOMM")
        ),
        dump_on=_dump_on(values),
    )
    return replace(options, **{name: value for name, value in arguments.items() if value is not None})


def tolerant(arguments: dict[str, Any]) -> tuple[RecorderOptions, list[str]]:
    """Options of this process with the valid arguments, and a message for each invalid one.

    For `record()`: a wrong setting must not stop the training.
    """
    options, complaints = from_environment(), []
    known = {setting.name for setting in fields(RecorderOptions)}
    for name, value in arguments.items():
        if name not in known:
            complaints.append(f"record() has no setting {name!r}; it has {', '.join(sorted(known))}")
        elif value is not None:
            try:
                options = replace(options, **{name: _as_declared(name, value)})
            except (TypeError, ValueError, ConfigurationError) as error:
                complaints.append(f"record({name}={value!r:.80}) is ignored: {error}")
    return options, complaints


def _as_declared(name: str, value: Any) -> Any:
    """The value converted to the type of its setting; TypeError if that changes it."""
    if name == "folder":
        return Path(value)
    if name == "dump_on":
        return frozenset([value] if isinstance(value, str) else value)
    default = getattr(RecorderOptions, name)
    if isinstance(default, (bool, str)):
        if type(value) is not type(default):
            raise TypeError(f"{type(default).__name__} expected, not {type(value).__name__}")
        return value
    number = type(default)(value)
    if isinstance(value, bool) or number != float(value):
        raise TypeError(f"a {type(default).__name__} is expected")
    return number


def is_true(text: str | None) -> bool:
    return (text or "").strip().lower() in {"1", "y", "yes", "t", "true"}


def _dump_on(values: Mapping[str, str]) -> frozenset[str]:
    """When to dump: torch's variable for dumps on timeouts turns ours off, too."""
    off = {"0", "n", "no", "f", "false"}
    text = _first(values, "TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT").strip().lower()
    return RecorderOptions.dump_on - ({"timeout", "exception"} if text in off else set())


def _capacity(values: Mapping[str, str]) -> int:
    """Size of the ring; a size of 0 turns torch's recorder off, but not ours."""
    names = (
        "ALLRANKS_BUFFER_SIZE",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "TORCHCOMM_FR_BUFFER_SIZE",
    )
    number = _number(values, *names, default=DEFAULT_CAPACITY)
    return number if number > 0 else DEFAULT_CAPACITY


def _first(values: Mapping[str, str], *names: str) -> str:
    return next((values[name] for name in names if values.get(name)), "")


def _number(values: Mapping[str, str], *names: str, default: int) -> int:
    """The first of these variables that is an integer; others are ignored."""
    for name in names:
        try:
            return int(values.get(name, ""))
        except ValueError:
            continue
    return default


def fast() -> ModuleType:
    """The C extension of the recorder; NotRecording if it was not built, or from another version."""
    try:
        from allranks.recording import _fast
    except ImportError as error:
        missing = "cannot import name" in str(error)
        why = "is missing" if missing else f"cannot be loaded ({error})"
        raise NotRecording(f"its C extension {why}: {BUILD}") from error
    if getattr(_fast, "VERSION", None) != EXPECTED:
        raise NotRecording(f"its C extension has another version: {BUILD}")
    return _fast
