"""Checks a whole configuration and reports every problem at once, with its place, in our words. Pure, with pydantic.

Relations between fields are checked too. Values that are themselves wrong are None there (they have their own problem), and
a relation with a None is not judged: one mistake gives one message.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from allranks.checkpoint.config import folder_problem
from allranks.elastic.config.schema import ALIASES, FOREIGN, JobConfig
from allranks.elastic.config.yaml_tree import ConfigProblem, KeyPath, Tree, dotted, missing_space
from allranks.model.parsing import hide_secrets
from allranks.stacks.debug_config import bad_patterns

MAX_PROBLEMS = 100  # that are shown
Get = Callable[[str], Any]  # dotted path -> value, default included; None: absent or invalid


@dataclass(frozen=True)
class Breach:
    """A relation that does not hold; `path` is where to look."""

    path: str
    message: str
    warning: bool = False


#: (a value that must not exceed another, the other, what is said when it does)
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
    low, high = get("elastic.min_nodes"), get("elastic.max_nodes")
    if low is not None and low > 1 and get("elastic.rdzv_endpoint") == "":
        text = (
            f"no rdzv_endpoint: {low} nodes can only meet if it (host:port) is given when the job is started"
        )
        yield Breach("elastic.rdzv_endpoint", text, warning=True)
    base, procs = get("elastic.base_world_size"), get("elastic.nproc_per_node")
    if base is None or not isinstance(procs, int) or low is None or high is None:
        return
    if not low * procs <= base <= high * procs:
        text = f"base_world_size ({base}) is outside the {low * procs} to {high * procs} ranks that "
        text += f"{low} to {high} nodes of {procs} ranks can have"
        yield Breach("elastic.base_world_size", text, warning=True)


def _scaling(get: Get) -> Iterator[Breach]:
    lr, top = get("training.lr"), get("scaling.max_lr")
    if lr is not None and top is not None and lr > top:
        text = f"max_lr ({top}) is below training.lr ({lr}): the rate would be cut"
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
        text += "some steps are saved twice at short distance"
    yield Breach("checkpoint.checkpoint_interval", text, warning=True)


def _timeouts(get: Get) -> Iterator[Breach]:
    for interval, timeout in _HEARTBEATS:
        a, b = get(interval), get(timeout)
        if a is not None and b is not None and b < 2 * a:
            names = interval.split(".")[1], timeout.split(".")[1]
            text = f"{names[1]} ({b:g} s) must be at least twice {names[0]} ({a:g} s): "
            yield Breach(timeout, text + "one late heartbeat would be a death")
    tick, join = get("lighthouse.quorum_tick_s"), get("lighthouse.join_timeout_s")
    if tick is not None and join is not None and tick >= join:
        text = f"quorum_tick_s ({tick:g}) must be below join_timeout_s ({join:g})"
        yield Breach("lighthouse.quorum_tick_s", text)


Model = type[BaseModel]


@dataclass
class Checked:
    """`config` is the typed configuration, None when there are errors."""

    config: JobConfig | None
    errors: list[ConfigProblem]
    warnings: list[ConfigProblem]


@dataclass
class ConfigCheck:
    """One run over one tree. `sections` collects those that hold by themselves."""

    tree: Tree
    errors: list[ConfigProblem] = field(default_factory=list)
    warnings: list[ConfigProblem] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)  # a section model each; `model` a plain dict
    bad: set[str] = field(default_factory=set)  # dotted paths that have a problem of their own

    def run(self) -> Checked:
        """The configuration, or what is wrong with it in the order of the file."""
        self.errors += self.tree.problems
        if self.tree.values is not None or not self.tree.problems:
            self._top(self.tree.values)
        config = None if self.errors else JobConfig(**self.sections)
        return Checked(config, _shortened(self.errors), _shortened(self.warnings))

    def _top(self, values: object) -> None:
        if not isinstance(values, Mapping):
            self._error((), _not_a_mapping("the configuration", values))
            return
        for name, value in values.items():
            if name in FOREIGN:
                self._warn((name,), f"section '{name}' is not read: {FOREIGN[name]}")
            elif name not in JobConfig.model_fields:
                self._error((name,), f"Unknown section '{name}'.{_near(name, JobConfig.model_fields)}")
            elif value is not None:  # "training:" with nothing below it: the defaults
                self._section(name, value)
        for breach in find_breaches(self._get):
            path = tuple(breach.path.split("."))
            (self._warn if breach.warning else self._error)(path, breach.message)

    def _section(self, name: str, value: object) -> None:
        if not isinstance(value, Mapping):
            self.bad.add(name)
            self._error((name,), _not_a_mapping(f"section '{name}'", value))
            return
        keys = dict(value)
        for (section, old), new in ALIASES.items():
            if section == name and old in keys and new not in keys:
                keys[new] = keys.pop(old)
                if mark := self.tree.marks.get((name, old)):
                    self.tree.marks[(name, new)] = mark
        if name == "model":
            self.sections[name] = keys
            return
        model = _model_of(name)
        if model.model_config.get("extra") == "allow":
            self._own_keys(name, keys, model)
        try:
            self.sections[name] = model.model_validate(keys)
        except ValidationError as error:
            # Of a union's several complaints about one text, the list of valid words says most.
            found = error.errors(include_url=False)
            found.sort(key=lambda e: e["type"] != "literal_error" or not isinstance(e["input"], str))
            for entry in found:
                path = (name, *_written(model, entry["loc"]))
                # the second branch of a union says the same thing again
                if dotted(path) not in self.bad:
                    self.bad.add(dotted(path))
                    self._error(path, _sentence(model, path, entry))

    def _own_keys(self, name: str, value: Iterable[str], model: Model) -> None:
        """Keys of a section that may hold the user's own: a typo is an error, anything else a warning."""
        for key in value:
            if key in model.model_fields:
                continue
            if close := _near(key, model.model_fields):
                self._error((name, key), f"Unknown key '{key}' in section '{name}'.{close}")
            else:
                self._warn((name, key), f"'{key}' is kept for your script; allranks does not read it")

    def _get(self, where: str) -> Any:
        """A value for relations; with a trailing "?" whether something was written, however wrong."""
        names = where.rstrip("?").split(".")
        if where.endswith("?"):
            value = self.tree.values
            for part in names:
                value = value.get(part) if isinstance(value, Mapping) else None
            return value
        if any(".".join(names[: i + 1]) in self.bad for i in range(len(names))):
            return None
        section = self.sections.get(names[0]) or self._partial(names[0])
        for part in names[1:]:
            section = getattr(section, part, None)
        return section

    def _partial(self, name: str) -> BaseModel:
        """The section from those of its values that are right: others still take part in relations."""
        model = _model_of(name)
        raw = self.tree.values.get(name) if isinstance(self.tree.values, Mapping) else None
        good = {
            key: value
            for key, value in (raw.items() if isinstance(raw, Mapping) else ())
            if key in model.model_fields and not any(f"{b}.".startswith(f"{name}.{key}.") for b in self.bad)
        }
        try:
            return model.model_validate(good)
        except ValidationError:
            return model()

    def _error(self, path: KeyPath, message: str) -> None:
        self.errors.append(ConfigProblem(message, dotted(path), self.tree.mark(path)))

    def _warn(self, path: KeyPath, message: str) -> None:
        self.warnings.append(ConfigProblem(message, dotted(path), self.tree.mark(path)))


def _shortened(problems: list[ConfigProblem]) -> list[ConfigProblem]:
    """In the order of the file, and only so many of them."""
    problems = sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([ConfigProblem(f"and {more} more")] if more > 0 else [])]


def _model_of(section: str) -> Model:
    model = JobConfig.model_fields[section].annotation
    assert isinstance(model, type)
    return model


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text (put it in quotes)",
    "list": "a list",
}
_BOUNDS = {
    "greater_than": "{name} ({value}) must be {word}",
    "greater_than_equal": "{name} must be >= {ge:g} (got {value})",
    "less_than_equal": "{name} must be <= {le:g} (got {value})",
    "finite_number": "{name} ({value}) must be a finite number",
    "missing": "{name} is required",
    "string_pattern_mismatch": "{name} must start with {starts} (not shown: it may hold a secret)",
}
_STARTS = {  # of the keys that hold addresses
    "webhooks": "http://, https://, slack:https://, otlp:http://, tensorboard: or wandb:",
    "incident_store": "the kind of the store, as in s3://BUCKET/PREFIX",
}


def _sentence(model: Model, path: KeyPath, entry: ErrorDetails) -> str:
    """pydantic's finding in our words; the documented messages are made here."""
    kind, value, context = entry["type"], entry["input"], entry.get("ctx", {})
    owner, info = _field(model, path[1:])
    key = next((str(part) for part in reversed(path) if not isinstance(part, int)), "value")
    name = (info.title if info is not None else None) or key
    if kind == "extra_forbidden":
        near = _near(path[-1], owner.model_fields)
        return f"Unknown key '{path[-1]}' in section '{dotted(path[:-1])}'.{near}"
    if kind == "literal_error" and info is not None:
        options: list[str] = []
        inner: list[object] = [info.annotation]
        while inner:
            for argument in getattr(inner.pop(0), "__args__", ()):
                (options if isinstance(argument, str) else inner).append(argument)
        return f"Unknown {name} {value!r}. Valid options: {options}{_near(value, options)}"
    if kind in _BOUNDS:
        word = "positive" if context.get("gt") == 0 else f"greater than {context.get('gt', 0):g}"
        starts = _STARTS.get(key, "")
        return _BOUNDS[kind].format(name=name, value=value, word=word, starts=starts, **context)
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return _not_a_mapping(f"'{name}'", value)
    wanted = _WANTED.get(kind.split("_")[0])
    if wanted is None:
        return f"{name}: {entry['msg']} (got {_shown(value)})"
    if value is None:
        return f"{name} is empty: give it a value, or leave the line out ('#' starts a comment)"
    return f"{name} must be {wanted}, not {_shown(value)}"


def _written(model: Model | None, loc: KeyPath) -> KeyPath:
    """A location without the branches of unions that pydantic adds to it."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(part, int):
            path.append(part)
        elif model is not None:
            path.append(part)
            model = _model_in(model.model_fields.get(part))
    return tuple(path)


def _field(model: Model, path: KeyPath) -> tuple[Model, FieldInfo | None]:
    """The model that owns the last part of a path, and that field (None for an unknown key)."""
    info = None
    for i, part in enumerate(path):
        if isinstance(part, str):
            info = model.model_fields.get(part)
            model = (_model_in(info) if i + 1 < len(path) else None) or model
    return model, info


def _model_in(info: FieldInfo | None) -> Model | None:
    """The section class inside a field such as list[Webhook], or None."""
    annotation = info.annotation if info is not None else None
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)


def _near(word: object, options: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or nothing when no option is near."""
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
