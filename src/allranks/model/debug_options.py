"""Options of stack collection, in the `debug:` section of a YAML file.

debug:
  enabled: true
  wait_seconds: 600                     # collect once, this long after the start; 0 = never
  output_dir: "{log_dir}/backtraces"
  triggers:
    no_progress_seconds: 60             # no rank makes progress
    rank_lost: true                     # a rank ended while others run
    at_seconds: [600, 1800]             # several fixed times
  rounds: 2
  interval_seconds: 5
  native: suspects                      # suspects, all, never
  cuda_gdb: false
  patterns: ["^my_worker"]              # further process titles that are ranks
  roles: ["reward=^my_judge"]           # further roles of processes
  restart: ["reward=systemctl --user restart judge"]   # what may be restarted when it is stuck, and how
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from allranks.errors import ConfigurationError, InputError
from allranks.model.options import check_options, key_of, meanings, option


def _seconds(default: Any, help: str, key: str, flags: str) -> Any:
    """An option with one or several times in seconds."""
    return option(default, help, key=key, flags=flags, unit="s", at_least=0)


@dataclass(frozen=True)
class DebugOptions:
    """When and how stacks are collected automatically. Times in seconds; 0 turns a trigger off."""

    enabled: bool = option(True, "collect stacks at all")
    wait_s: float = _seconds(
        600.0, "collect once this long after the start; 0: never", "wait_seconds", "--wait"
    )
    output_dir: str = option(
        "{log_dir}/backtraces",
        "output folder; {log_dir} is $LOG_DIR or ./logs",
        metavar="DIR",
        flags="-o --output",
    )
    at_s: tuple[float, ...] = _seconds(
        (), "also collect this long after the start", "triggers.at_seconds", "--at"
    )
    no_progress_s: float = _seconds(
        60.0,
        "collect when the ranks make no progress for this long, measured by their black boxes, or else by CPU time and "
        "context switches of their main threads; 0: never",
        "triggers.no_progress_seconds",
        "--no-progress",
    )
    slow_ms: float = option(
        0.0,
        "collect when the time between two calls of a recorded rank is longer; 0: never",
        key="triggers.slow_ms",
        flags="--slow-ms",
        unit="ms",
        at_least=0,
    )
    rank_lost: bool = option(
        True, "collect when a rank exited while others are running", key="triggers.rank_lost"
    )
    repeats: int = option(3, "collections per stall, each after twice the time", at_least=1)
    rounds: int = option(2, "samples per collection; one sample cannot tell stuck from slow", at_least=1)
    interval_s: float = _seconds(5.0, "between two samples", "interval_seconds", "--interval")
    native: str = option(
        "suspects", "ranks whose native frames are collected", choices=("suspects", "all", "never")
    )
    cuda_gdb: bool = option(False, "also collect device kernels with cuda-gdb")
    patterns: tuple[str, ...] = option(
        (), "regular expressions for titles of further processes that are ranks"
    )
    roles: tuple[str, ...] = option((), "further roles of processes, by title: ROLE=EXPRESSION")
    restart: tuple[str, ...] = option(
        (), "roles that `allranks watch --tree` may restart when they are stuck: ROLE=COMMAND"
    )

    def __post_init__(self) -> None:
        check_options(self, "debug: ")
        for complaint in bad_patterns(self.patterns):
            raise ConfigurationError(f"debug: patterns: {complaint}")
        for one in self.roles:
            for complaint in bad_patterns([one.partition("=")[2]]) if "=" in one else ["no ROLE=EXPRESSION"]:
                raise ConfigurationError(f"debug: roles: {one!r}: {complaint}")
        for one in self.restart:
            if not all(part.strip() for part in one.partition("=")):
                raise ConfigurationError(f"debug: restart: {one!r} is not ROLE=COMMAND")

    def fixed_points(self) -> tuple[float, ...]:
        """Fixed times, in seconds after the start."""
        points = {*self.at_s, *((self.wait_s,) if self.wait_s else ())}
        return tuple(sorted(point for point in points if point > 0))

    def folder(self, environment: Mapping[str, str] | None = None) -> Path:
        """The output folder; {log_dir} is $LOG_DIR, else ./logs."""
        values = os.environ if environment is None else environment
        log_dir = values.get("LOG_DIR") or values.get("ALLRANKS_LOG_DIR") or "logs"
        named = self.output_dir.replace("{log_dir}", log_dir)
        return Path(named.replace("{job_id}", values.get("SLURM_JOB_ID", "job")))


def bad_patterns(patterns: Iterable[str]) -> Iterator[str]:
    """A message for each pattern that is not a regular expression."""
    for one in patterns:
        try:
            re.compile(one)
        except re.error as error:
            yield f"{one!r} is not a regular expression: {error}"


#: Keys of the same section that only `allranks run` reads.
OF_RUN = frozenset({"record", "watch", "hang_floor_s", "hang_cap_s", "startup_s", "incidents", "log_level"})


def read_debug_options(path: str | Path, base: DebugOptions | None = None) -> DebugOptions:
    """Reads the `debug:` section of a YAML file; other sections are ignored."""
    from allranks.model.yaml_tree import read_yaml

    try:
        document = read_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigurationError(
            f"{path} has no sections", hint="see docs/reference/job_file.md for a debug section"
        )
    return parse_debug(document.get("debug") or {}, base)


def parse_debug(section: object, base: DebugOptions | None = None) -> DebugOptions:
    """Options from the section's data; ConfigurationError for unknown keys and wrong types."""
    if not isinstance(section, dict):
        raise ConfigurationError("debug must be a mapping")
    triggers = section.get("triggers") or {}
    if not isinstance(triggers, dict):
        raise ConfigurationError("debug.triggers must be a mapping")
    kinds, values = get_type_hints(DebugOptions), {}
    names = {key_of(one): one.name for one, _ in meanings(DebugOptions)}
    written = {key: value for key, value in section.items() if key != "triggers" and key not in OF_RUN}
    for key, value in {**written, **{f"triggers.{key}": value for key, value in triggers.items()}}.items():
        if key not in names:
            raise ConfigurationError(f"debug.{key} is unknown; known are {', '.join(sorted(names))}")
        if value is not None:
            values[names[key]] = _convert(value, kinds[names[key]], f"debug.{key}")
    return replace(base or DebugOptions(), **values)


_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}  # of YAML 1.1


def _convert(value: object, kind: Any, name: str) -> Any:
    import msgspec

    from allranks.model.parsing import convert

    if kind is bool and isinstance(value, str):
        value = _SWITCHES.get(value.lower(), value)
    try:
        return convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{name} is {value!r}: {str(error)[0].lower()}{str(error)[1:]}") from None
