"""The `debug:` section that people know, with triggers beyond the fixed wait. Reading is the only I/O.

debug:
  enabled: true
  wait_seconds: 600                     # collect once, this long after the start; 0 = never
  output_dir: "{log_dir}/backtraces"
  triggers:
    no_progress_seconds: 60             # black boxes stand still
    collective_overdue_seconds: 300     # one call is open for so long
    no_output_seconds: 900              # log files stand still
    rank_lost: true                     # a rank ended while others run
    at_seconds: [600, 1800]             # several fixed points
  rounds: 2
  interval_seconds: 5
  native: suspects                      # suspects, all, never
  cuda_gdb: false
  patterns: ["^my_worker"]              # further process titles that are ranks
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from allranks.errors import ConfigurationError, InputError


@dataclass(frozen=True)
class DebugOptions:
    """When and how to collect by itself. Times in seconds; 0 turns a trigger off."""

    enabled: bool = True
    wait_s: float = 600.0
    output_dir: str = "{log_dir}/backtraces"
    at_s: tuple[float, ...] = ()
    no_progress_s: float = 60.0
    collective_overdue_s: float = 0.0
    no_output_s: float = 0.0
    rank_lost: bool = True
    repeats: int = 3  # collections of one standstill, each after twice the time
    rounds: int = 2
    interval_s: float = 5.0
    native: str = "suspects"
    cuda_gdb: bool = False
    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        times = {"wait_seconds": self.wait_s, "no_progress_seconds": self.no_progress_s,
                 "collective_overdue_seconds": self.collective_overdue_s, "no_output_seconds": self.no_output_s,
                 "interval_seconds": self.interval_s}  # fmt: skip
        for name, value in times.items():
            if value < 0:
                raise ConfigurationError(f"debug.{name} is {value}: a time cannot be negative")
        if self.rounds < 1 or self.repeats < 1:
            raise ConfigurationError("debug.rounds and debug.repeats must be 1 or more")
        if self.native not in ("suspects", "all", "never"):
            raise ConfigurationError(f"debug.native is {self.native!r}: suspects, all or never")

    def fixed_points(self) -> tuple[float, ...]:
        """Seconds after the start at which to collect whatever happens."""
        points = {*self.at_s, *((self.wait_s,) if self.wait_s else ())}
        return tuple(sorted(point for point in points if point > 0))

    def folder(self, environment: Mapping[str, str] | None = None) -> Path:
        """The output folder; {log_dir} is $LOG_DIR, else ./logs."""
        values = os.environ if environment is None else environment
        log_dir = values.get("LOG_DIR") or values.get("ALLRANKS_LOG_DIR") or "logs"
        return Path(
            self.output_dir.replace("{log_dir}", log_dir).replace(
                "{job_id}", values.get("SLURM_JOB_ID", "job")
            )
        )


_TOP = {
    "enabled": ("enabled", bool), "wait_seconds": ("wait_s", float), "output_dir": ("output_dir", str),
    "rounds": ("rounds", int), "interval_seconds": ("interval_s", float), "native": ("native", str),
    "cuda_gdb": ("cuda_gdb", bool), "patterns": ("patterns", tuple), "repeats": ("repeats", int),
}  # fmt: skip
_TRIGGERS = {
    "no_progress_seconds": ("no_progress_s", float), "at_seconds": ("at_s", tuple), "rank_lost": ("rank_lost", bool),
    "collective_overdue_seconds": ("collective_overdue_s", float), "no_output_seconds": ("no_output_s", float),
}  # fmt: skip
#: Keys of the same section that `allranks run` reads: one job file serves every command.
OF_RUN = frozenset({"record", "watch", "hang_floor_s", "hang_cap_s", "startup_s", "incidents", "log_level"})


def read_debug_options(path: str | Path, base: DebugOptions | None = None) -> DebugOptions:
    """The `debug:` section of a YAML file, which may have none; other sections are none of our business."""
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} is no YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} has no sections", hint="see docs/stacks.md for a debug section")
    return parse_debug(document.get("debug") or {}, base)


def parse_debug(section: object, base: DebugOptions | None = None) -> DebugOptions:
    """Options from the section's data; unknown keys and wrong kinds are named."""
    if not isinstance(section, dict):
        raise ConfigurationError("debug must be a mapping")
    triggers = section.get("triggers") or {}
    if not isinstance(triggers, dict):
        raise ConfigurationError("debug.triggers must be a mapping")
    values: dict[str, object] = {}
    for prefix, table, rows in (("debug", _TOP, section), ("debug.triggers", _TRIGGERS, triggers)):
        for key, value in rows.items():
            if prefix == "debug" and (key == "triggers" or key in OF_RUN):
                continue
            if key not in table:
                raise ConfigurationError(f"{prefix}.{key} is unknown; known are {', '.join(sorted(table))}")
            name, kind = table[key]
            if value is not None:
                values[name] = _convert(value, kind, f"{prefix}.{key}")
    return replace(base or DebugOptions(), **values)  # type: ignore[arg-type]


def _convert(value: object, kind: type, name: str) -> object:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is tuple and isinstance(value, list):
        return tuple(float(one) if isinstance(one, int | float) else str(one) for one in value)
    if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return kind(value)
    if kind is str and isinstance(value, str):
        return value
    raise ConfigurationError(f"{name} is {value!r}: expected {kind.__name__.replace('tuple', 'a list')}")
