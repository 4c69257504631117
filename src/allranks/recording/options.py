"""What a recorder may be told, and where each default comes from: argument, then environment, then default.

Runs in the rank. The names that PyTorch's and torchcomms' recorders read are honoured where they mean the same.
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

#: What asking torch may end with where a version, a backend or an unfinished group does not know the answer.
TORCH_ERRORS = (AttributeError, KeyError, RuntimeError, TypeError, ValueError)
EXPECTED = 7  # VERSION in _fast.c: raised with every change of what the two sides say to each other
BUILD = "install a wheel of allranks, or a C compiler and Python's headers and then allranks again"
DEFAULT_STACK_DEPTH = 8
MIN_CAPACITY = 16


@dataclass(frozen=True)
class RecorderOptions:
    """Settings of one process's recorder. `from_environment` fills them; arguments of `record()` override."""

    enabled: bool = True
    capacity: int = DEFAULT_CAPACITY  # records kept
    heap_bytes: int = DEFAULT_HEAP_BYTES  # room for names, sizes, stacks
    stack_depth: int = DEFAULT_STACK_DEPTH  # frames per call; 0 records no stacks
    folder: Path | None = None  # None: a per-job folder under shared memory, else the temp dir
    job: str = "job"
    attempt: int = 0
    rank: int = -1  # -1: not known yet; taken from the first process group
    world_size: int = -1
    local_rank: int = -1
    dump_prefix: str = ""  # "" = next to the black box; else PREFIX + rank, as torch names its dumps
    dump_whole_name: bool = False  # the prefix is the whole file name (…DYNAMIC_FILE_NAME=1)
    dump_on: frozenset[str] = frozenset({"timeout", "exception"})  # of timeout, exception, exit
    late: bool = False  # torch is hooked when the program imports it, and not now
    poll_s: float = 0.1  # how often the side thread looks for completed calls

    def __post_init__(self) -> None:
        if self.capacity < MIN_CAPACITY:
            raise ConfigurationError(
                f"a ring of {self.capacity} records is too small: at least {MIN_CAPACITY}"
            )
        if self.stack_depth < 0 or self.poll_s <= 0:
            raise ConfigurationError("stack_depth must be 0 or more, and poll_s more than 0")
        unknown = self.dump_on - {"timeout", "exception", "exit"}
        if unknown:
            raise ConfigurationError(f"dump_on knows timeout, exception and exit, not {sorted(unknown)}")


def from_environment(env: Mapping[str, str] | None = None, **arguments: Any) -> RecorderOptions:
    """Options of this process; `arguments` that are not None win over the environment."""
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
    """Options of this process with as many of these arguments as make sense, and a complaint about every other one.

    For `record()`: a mistake in a setting must not stop a training.
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
    """The value as the type of its setting, converted where nothing is lost."""
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
    """torch's switch for dumps on a time-out or an exception works for ours too; it is on by default."""
    off = {"0", "n", "no", "f", "false"}
    text = _first(values, "TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT").strip().lower()
    return RecorderOptions.dump_on - ({"timeout", "exception"} if text in off else set())


def _capacity(values: Mapping[str, str]) -> int:
    """Records to keep; a native buffer size of 0 turns torch's recorder off, not ours."""
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
    """The first of these variables that holds a whole number; a malformed one is passed over."""
    for name in names:
        try:
            return int(values.get(name, ""))
        except ValueError:
            continue
    return default


def fast() -> ModuleType:
    """The part of the recorder in C; NotRecording where it was not built, or was built from another source."""
    try:
        from allranks.recording import _fast
    except ImportError as error:
        missing = "cannot import name" in str(error)
        why = "is missing" if missing else f"cannot be loaded ({error})"
        raise NotRecording(f"its part in C {why}: {BUILD}") from error
    if getattr(_fast, "VERSION", None) != EXPECTED:
        raise NotRecording(f"its part in C is of another version: {BUILD}")
    return _fast
