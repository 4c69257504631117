"""Reads and checks the YAML file of a job. All problems are reported at once, with line and column.

config = load_config("job.yaml")          # raises ConfigurationError with every problem in it
result = validate_config("job.yaml")      # or a dict, or an OmegaConf container; never raises for content
result.valid, result.errors, result.warnings

Relations between fields are checked, too. An invalid value is None there, and a relation with a None is skipped, so that one
mistake gives one message.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, get_args, get_origin

import msgspec

from allranks.checkpoint.config import folder_problem
from allranks.checkpoint.stores import StoreSpec, reason_of
from allranks.checkpoint.stores.object_store import try_access
from allranks.elastic.config.schema import (
    ALIASES,
    FOREIGN,
    SECTIONS,
    JobConfig,
    Key,
    Training,
    Value,
    json_schema,
    keys_of,
)
from allranks.errors import ConfigurationError, InputError, MissingExtra
from allranks.model.debug_options import bad_patterns
from allranks.model.options import missed
from allranks.model.parsing import convert, hide_secrets
from allranks.model.yaml_tree import ConfigProblem, KeyPath, Tree, dotted, missing_space, read_tree

__all__ = [
    "ConfigProblem",
    "JobConfig",
    "ValidationResult",
    "check",
    "json_schema",
    "load_config",
    "validate_config",
    "validate_elastic_config",
    "validate_s3_access",
]
MAX_PROBLEMS = 100  # shown
Get = Callable[[str], Value]  # dotted path -> value, default included; None: absent or invalid
_CREDENTIALS = "Configure credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or attach an IAM role"


def check(source: object) -> ValidationResult:
    """Checks a YAML file (a path), YAML text (several lines), a mapping or an OmegaConf container.

    Raises InputError if a file cannot be read.
    """
    return ConfigCheck(_tree(source)).run()


def validate_config(source: object, validate_s3: bool = False) -> ValidationResult:
    """All problems of a configuration; with `validate_s3`, also tests access to the bucket."""
    found = check(source)
    if validate_s3 and found.config is not None and found.config.checkpoint.s3_bucket:
        section = found.config.checkpoint
        access = validate_s3_access(section.s3_bucket, section.s3_region, endpoint=section.s3_endpoint_url)
        found.errors += access.errors
        found.warnings += access.warnings
        found.valid = not found.errors
    return found


def validate_elastic_config(source: object) -> ValidationResult:
    """As `validate_config`, without network access."""
    return validate_config(source)


def load_config(source: object) -> JobConfig:
    """The typed JobConfig; ConfigurationError with all problems."""
    checked = check(source)
    if checked.config is None:
        name = source if isinstance(source, (str, Path)) else "the configuration"
        count = len(checked.errors)
        lines = "\n".join(f"  {problem}" for problem in checked.errors)
        raise ConfigurationError(f"{count} problem{'s' * (count > 1)} in {name}:\n{lines}")
    return checked.config


def _tree(source: object) -> Tree:
    if isinstance(source, str) and "\n" in source:
        return read_tree(source)
    if isinstance(source, (str, Path)):
        try:
            return read_tree(Path(source).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise InputError(f"{source} is not UTF-8 text: {error}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {source}: {getattr(error, 'strerror', None) or error}") from error
    if type(source).__module__.split(".")[0] != "omegaconf":
        return Tree(source)
    from omegaconf import OmegaConf, errors

    try:
        return Tree(OmegaConf.to_container(source, resolve=True))
    except errors.OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        return Tree(problems=[ConfigProblem(f"cannot resolve the container: {first}")])


def validate_s3_access(
    bucket: str, region: str | None = None, *, endpoint: str | None = None
) -> ValidationResult:
    """Lists, writes, reads and deletes one small object; an error names the IAM action that was refused.

    `endpoint` is the URL of an S3-compatible server (default: AWS_ENDPOINT_URL). A missing library, missing credentials
    or no network give a warning.
    """
    given = {"region": region or "", "endpoint": endpoint or "", "timeout_s": "15", "max_retries": "1"}
    url = bucket if "://" in bucket else f"s3://{bucket}"
    errors: list[str] = []
    try:
        for action, error in try_access(
            StoreSpec(url, {key: value for key, value in given.items() if value})
        ):
            message, fatal = _s3_problem(error, bucket, action)
            if not fatal:
                return ValidationResult(not errors, errors, [message])
            errors.append(message)
    except MissingExtra as error:
        return ValidationResult(warnings=[f"cannot check S3 bucket '{bucket}': {error}"])
    return ValidationResult(not errors, errors)


def _s3_problem(error: OSError, bucket: str, action: str) -> tuple[str, bool]:
    """(message, whether it is an error)."""
    message = reason_of(error)
    if isinstance(error, FileNotFoundError):
        return f"S3 bucket '{bucket}' does not exist. Create it: aws s3 mb s3://{bucket}", True
    if "NoCredentials" in message:
        return f"AWS credentials not configured, cannot check S3 bucket '{bucket}'. {_CREDENTIALS}", False
    if isinstance(error, PermissionError):
        text = f"Access denied to S3 bucket '{bucket}'. Check IAM permissions: {action} is missing, "
        return text + "or the credentials are wrong", True
    return f"Could not verify S3 bucket '{bucket}' ({action}): {message[:200]}", False


class Breach(NamedTuple):
    """A relation that does not hold, reported at `path`."""

    path: str
    message: str
    warning: bool = False


#: (a value that must not exceed another, the other, message)
_NOT_ABOVE = (
    ("elastic.min_nodes", "elastic.max_nodes", "min_nodes cannot exceed max_nodes ({a} > {b})"),
    ("scaling.min_lr", "scaling.max_lr", "min_lr ({a}) cannot exceed max_lr ({b})"),
    ("debug.hang_floor_s", "debug.hang_cap_s", "hang_floor_s ({a:g}) exceeds hang_cap_s ({b:g})"),
    ("recovery.back_off_s", "recovery.window_s", "back_off_s ({a:g}) exceeds window_s ({b:g})"),
)
_HEARTBEATS = (
    ("elastic.heartbeat_interval", "elastic.heartbeat_timeout"),
    ("lighthouse.heartbeat_interval_s", "lighthouse.heartbeat_timeout_s"),
)
_TARGET = "scaling.target_global_batch_size"


def find_breaches(get: Get) -> Iterator[Breach]:
    """Every relation that does not hold, errors and warnings."""
    for low, high, message in _NOT_ABOVE:
        a, b = get(low), get(high)
        if a is not None and b is not None and a > b:
            yield Breach(low, message.format(a=a, b=b))
    yield from _nodes(get)
    yield from _scaling(get)
    yield from _checkpoint(get)
    yield from _timeouts(get)
    for complaint in bad_patterns(get("debug.patterns") or ()):
        yield Breach("debug.patterns", complaint)
    if get("recovery.on_hang") == "command" and not get("recovery.command"):
        yield Breach("recovery.command", "command is required because on_hang is 'command'")
    if get("data.enabled") and get("data.files") and not get("data.index"):
        text = "no index: build it with `allranks index build FILES -o INDEX` and name it in data.index"
        yield Breach("data.index", text, warning=True)


def _nodes(get: Get) -> Iterator[Breach]:
    low = get("elastic.min_nodes")
    if low is not None and low > 1 and get("elastic.rdzv_endpoint") == "":
        text = f"no rdzv_endpoint: give it (host:port) when starting the job, or {low} nodes cannot find each other"
        yield Breach("elastic.rdzv_endpoint", text, warning=True)


def _scaling(get: Get) -> Iterator[Breach]:
    lr, top = get("training.lr"), get("scaling.max_lr")
    if lr is not None and top is not None and lr > top:
        text = f"max_lr ({top}) is below training.lr ({lr}): the rate would be reduced to it"
        yield Breach("scaling.max_lr", text, warning=True)
    if get("scaling.strategy") != "constant_batch":
        return
    target, local = get(_TARGET), get("training.batch_size")
    if target is None:
        if get(f"{_TARGET}?") is None:
            yield Breach(_TARGET, "target_global_batch_size is required for 'constant_batch' strategy")
        return
    procs, high = get("elastic.nproc_per_node"), get("elastic.max_nodes")
    small = f"target_global_batch_size ({target}) is smaller than"
    if isinstance(procs, int) and high is not None and target < procs * high:
        ranks = f"the {procs * high} ranks of {high} nodes"
        yield Breach(_TARGET, f"{small} {ranks}: some ranks would have no sample")
    if local is not None and target < local:
        yield Breach(_TARGET, f"{small} one rank's batch_size ({local})", warning=True)


def _checkpoint(get: Get) -> Iterator[Breach]:
    path = get("checkpoint.nvme_path")
    if path is not None and (problem := folder_problem(path)):
        yield Breach("checkpoint.nvme_path", f"nvme_path is {path!r}: {problem}")
    disk, memory = get("checkpoint.checkpoint_interval"), get("checkpoint.memory_snapshot_interval")
    if disk is None or not memory or disk % memory == 0:
        return
    if disk < memory:
        text = f"checkpoint_interval ({disk}) < memory_snapshot_interval ({memory}). "
        text += "Memory snapshots may be unnecessary."
    else:
        text = f"checkpoint_interval ({disk}) is not a multiple of memory_snapshot_interval ({memory}): "
        text += "some saves follow each other closely"
    yield Breach("checkpoint.checkpoint_interval", text, warning=True)


def _timeouts(get: Get) -> Iterator[Breach]:
    for interval, timeout in _HEARTBEATS:
        a, b = get(interval), get(timeout)
        if a is not None and b is not None and b < 2 * a:
            names = interval.split(".")[1], timeout.split(".")[1]
            text = f"{names[1]} ({b:g} s) must be at least twice {names[0]} ({a:g} s): "
            yield Breach(timeout, text + "one late heartbeat would count as a death")
    tick, join = get("lighthouse.quorum_tick_s"), get("lighthouse.join_timeout_s")
    if tick is not None and join is not None and tick >= join:
        text = f"quorum_tick_s ({tick:g}) must be below join_timeout_s ({join:g})"
        yield Breach("lighthouse.quorum_tick_s", text)


@dataclass
class ValidationResult:
    """`valid` is True without errors, whatever the warnings; `config` is set if valid."""

    valid: bool = True
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    config: JobConfig | None = None


class InvalidValue(ValueError):
    """A value that its key does not accept; `inner` is the path inside the value."""

    def __init__(self, message: str, inner: KeyPath = ()) -> None:
        super().__init__(message)
        self.inner = inner


@dataclass
class ConfigCheck:
    """Checks one tree. `values` are the valid values and defaults, with None for invalid values."""

    tree: Tree
    errors: list[ConfigProblem] = field(default_factory=list)
    warnings: list[ConfigProblem] = field(default_factory=list)
    values: dict[str, dict[str, Value]] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)

    def run(self) -> ValidationResult:
        """The configuration, or its problems in the order of the file."""
        self.errors += self.tree.problems
        if self.tree.values is not None or not self.tree.problems:
            self._top(self.tree.values)
        config = None
        if not self.errors:
            sections = {name: _filled(kind, self.values[name]) for name, kind in SECTIONS.items()}
            model = self.values.get("model", {})
            config = JobConfig(model=model, **sections, written=frozenset(self.written))
        return ValidationResult(not self.errors, _shortened(self.errors), _shortened(self.warnings), config)

    def _top(self, values: object) -> None:
        if not isinstance(values, Mapping):
            self._error((), _not_a_mapping("the configuration", values))
            return
        for name, value in values.items():
            if name in FOREIGN:
                self._warn((name,), f"section '{name}' is not read: {FOREIGN[name]}")
            elif name not in SECTIONS and name != "model":
                self._error((name,), f"Unknown section '{name}'.{_near(name, ['model', *SECTIONS])}")
            elif value is not None:  # "training:" with nothing below it: the defaults
                self._section(name, value)
        for name, kind in SECTIONS.items():
            self.values.setdefault(name, self._keys(kind, {}, (name,)))
        for breach in find_breaches(self._get):
            path = tuple(breach.path.split("."))
            (self._warn if breach.warning else self._error)(path, breach.message)

    def _section(self, name: str, value: object) -> None:
        if not isinstance(value, Mapping):
            self._error((name,), _not_a_mapping(f"section '{name}'", value))
            self.values[name] = {}
            return
        keys = dict(value)
        for (section, old), new in ALIASES.items():
            if section == name and old in keys and new not in keys:
                keys[new] = keys.pop(old)
                if mark := self.tree.marks.get((name, old)):
                    self.tree.marks[(name, new)] = mark
        self.written |= {f"{name}.{key}" for key in keys}
        self.values[name] = keys if name == "model" else self._keys(SECTIONS[name], keys, (name,))

    def _keys(self, kind: Value, given: Mapping[Value, object], path: KeyPath) -> dict[str, Value]:
        """The values of a section; adds its problems."""
        known, own = keys_of(kind), {}
        for key, value in given.items():
            if key in known:
                continue
            near = _near(key, known)
            if kind is Training and not near:
                own[str(key)] = value
                self._warn((*path, key), f"'{key}' is kept for your script; allranks does not read it")
            else:
                self._error((*path, key), f"Unknown key '{key}' in section '{dotted(path)}'.{near}")
        found: dict[str, Value] = {"own": own} if kind is Training else {}
        for name, key in known.items():
            found[name] = self._value(name, key, given, (*path, name))
        return found

    def _value(self, name: str, key: Key, given: Mapping[Value, object], path: KeyPath) -> Value:
        if key.section:
            inner = given.get(name, {})
            if isinstance(inner, Mapping):
                return self._keys(key.kind, inner, path)
            self._error(path, _not_a_mapping(f"'{name}'", inner))
            return None
        if name not in given:
            return key.default
        try:
            return _converted(name, key, given[name])
        except InvalidValue as error:
            self._error((*path, *error.inner), str(error))
            return None

    def _get(self, where: str) -> Value:
        """A value for relations; with a trailing "?" the raw value, even if invalid."""
        value: Value = self.tree.values if where.endswith("?") else self.values
        for part in where.rstrip("?").split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _error(self, path: KeyPath, message: str) -> None:
        self.errors.append(ConfigProblem(message, dotted(path), self.tree.mark(path)))

    def _warn(self, path: KeyPath, message: str) -> None:
        self.warnings.append(ConfigProblem(message, dotted(path), self.tree.mark(path)))


def _shortened(problems: list[ConfigProblem]) -> list[str]:
    """At most MAX_PROBLEMS, in the order of the file."""
    ordered = sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
    more = len(problems) - MAX_PROBLEMS
    return [*ordered[:MAX_PROBLEMS], *([ConfigProblem(f"and {more} more")] if more > 0 else [])]


def _filled(kind: Value, values: Mapping[str, Value]) -> Value:
    """Builds a section from its values."""
    inner = {name: _filled(key.kind, values[name]) for name, key in keys_of(kind).items() if key.section}
    return kind(**{**values, **inner})


_WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text (put it in quotes)",
    list: "a list",
}
_SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "y", "t", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "f", "0"), False),
}
#: Keys that hold addresses: (pattern, description) of how they begin.
_ADDRESSES = {
    "webhooks": (
        r"(slack:)?https?://|otlp:https?://|tensorboard:.|wandb:.",
        "http://, https://, slack:https://, otlp:http://, tensorboard: or wandb:",
    ),
    "incident_store": (r"\w+://", "the kind of the store, as in s3://BUCKET/PREFIX"),
}
_ONE_OR_MORE = ("files", "webhooks")  # a single text is accepted as a list of one


def _converted(name: str, key: Key, value: object) -> Value:
    """Converts a value for its key ("4" may become 4); raises InvalidValue."""
    title = key.meaning.title or name
    if value is None:
        if key.default is None:
            return None
        raise InvalidValue(f"{title} is empty: give it a value, or remove the line ('#' starts a comment)")
    if get_origin(key.kind) is dict:
        return _table(name, key, value)
    if get_origin(key.kind) is list:
        items = [value] if isinstance(value, str) and name in _ONE_OR_MORE else value
        if not isinstance(items, (list, tuple)):
            raise InvalidValue(f"{title} must be {_WANTED[list]}, not {_shown(value)}")
        return [_inside(name, title, key, at, item) for at, item in enumerate(items)]
    return _scalar(name, title, key, key.kind, value)


def _table(name: str, key: Key, value: object) -> dict[str, Value]:
    if not isinstance(value, Mapping):
        raise InvalidValue(_not_a_mapping(f"'{key.meaning.title or name}'", value))
    return {str(at): _inside(name, str(at), key, str(at), item) for at, item in value.items()}


def _inside(name: str, title: str, key: Key, at: str | int, value: object) -> Value:
    try:
        return _scalar(name, title, key, get_args(key.kind)[-1], value)
    except InvalidValue as error:
        raise InvalidValue(str(error), (at,)) from error


def _scalar(name: str, title: str, key: Key, kind: Value, value: object) -> Value:
    """Converts one bool, number or text."""
    if key.words:
        word = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else value
        if word in key.words:
            return word
        if kind is str or (isinstance(value, str) and _typed(kind, value) is None):
            options = list(key.words)
            raise InvalidValue(f"Unknown {title} {value!r}. Valid options: {options}{_near(value, options)}")
    if kind is str and name in _ADDRESSES and isinstance(value, str):
        pattern, words = _ADDRESSES[name]
        if not re.match(pattern, value):
            raise InvalidValue(f"{title} must start with {words} (not shown: it may hold a secret)")
    found = _typed(kind, value)
    if found is None:
        raise InvalidValue(f"{title} must be {_WANTED[kind]}, not {_shown(value)}")
    if isinstance(found, float) and not math.isfinite(found):
        raise InvalidValue(f"{title} ({_shown(value)}) must be a finite number")
    if kind in (int, float) and (bound := missed(found, key.meaning)):
        raise InvalidValue(f"{title} ({value}) must {bound}")
    return found


def _typed(kind: Value, value: Value) -> Value:
    """The value converted to this kind; None if that is not possible."""
    if kind is str:
        return value if isinstance(value, str) else None
    if kind is bool and isinstance(value, (int, float, str)):
        return _SWITCHES.get(str(value).lower().removesuffix(".0"))
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return convert(value, kind, strict=False)
    except (msgspec.ValidationError, OverflowError):
        return None


def _near(word: object, options: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or "" if no option is similar."""
    close = difflib.get_close_matches(str(word), [str(option) for option in options], n=1, cutoff=0.7)
    return f" Did you mean '{close[0]}'?" if close else ""


def _not_a_mapping(what: str, value: object) -> str:
    fix = missing_space(value) if isinstance(value, str) else None
    if fix:
        return f"{what} holds no keys; {fix}"
    return f"{what} must hold 'key: value' lines, not {_shown(value)}"


def _shown(value: object) -> str:
    text = repr(hide_secrets(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
