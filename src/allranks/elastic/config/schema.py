"""The schema of a job file: frozen dataclasses of options, most of them derived from the options of the parts.

Each default is defined once, here or in the options class of the part. An option's `title` is its name in messages. Relations
between keys are checked in `__init__.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from allranks.checkpoint.config import CheckpointConfig
from allranks.elastic.scaling import ScalingConfig
from allranks.elastic.world import ElasticTrainingConfig
from allranks.incidents.policy import PolicyOptions
from allranks.lighthouse.options import Options
from allranks.model.debug_options import DebugOptions
from allranks.model.options import Meaning, default_of, key_of, meanings, option
from allranks.watch.silence import NoticeOptions

Kind: TypeAlias = Any  # a type as a value: int, str, list[str] … or the class of a section
Value: TypeAlias = Any  # the value of a key


@dataclass(frozen=True)
class GradientClipping:
    enabled: bool = option(True, "")
    max_norm: float = option(1.0, "", above=0, title="gradient_clipping.max_norm")
    norm_type: float = option(2.0, "", above=0)
    log_clipping: bool = option(False, "")


@dataclass(frozen=True)
class Training:
    """Read by your script. Unknown keys are kept, with a warning."""

    script: str | None = option(None, "script that `allranks run --config` starts if none is given")
    args: list[str] = option(list, "arguments of the script")
    lr: float = option(1e-4, "", above=0, title="Learning rate")
    weight_decay: float = option(0.01, "", at_least=0)
    batch_size: int = option(8, "samples per rank and micro-batch", above=0, title="Batch size")
    max_steps: int = option(100_000, "", above=0)
    log_interval: int = option(10, "", above=0)
    seed: int = option(0, "")
    gradient_clipping: GradientClipping = option(GradientClipping, "")
    own: Mapping[str, object] = field(default_factory=dict)  # the user's own keys

    def __getattr__(self, name: str) -> Value:
        own = self.__dict__.get("own", {})
        if name not in own:
            raise AttributeError(name)
        return own[name]


@dataclass(frozen=True)
class Data:
    enabled: bool = option(True, "")
    files: list[str] = option(list, "")
    text_key: str = option("text", "")
    seq_length: int = option(1024, "", above=0)
    tokenizer: str = option("bytes", "a tokenizer.json, a Hugging Face name, or 'bytes'")
    index: str | None = option(None, "the token index; built by `allranks index build`")
    num_workers: int = option(4, "", at_least=0)
    seed: int = option(0, "")
    shuffle: bool = option(True, "")


def _of(
    options: type, only: Collection[str] = (), left_out: Collection[str] = (), unset: bool = False
) -> Kind:
    """A section class with the options of another class as its keys; `unset`: all defaults are None."""
    kinds, found = get_type_hints(options), []
    for one, _ in meanings(options):
        if one.name in left_out or (only and one.name not in only):
            continue
        value = None if unset else default_of(one)
        value = (
            value.value
            if isinstance(value, enum.Enum)
            else list(value)
            if isinstance(value, tuple)
            else value
        )
        default = {"default_factory": value.copy} if isinstance(value, (list, dict)) else {"default": value}
        made: Value = field(metadata=one.metadata, **default)
        found.append((key_of(one).rpartition(".")[2], kinds[one.name], made))
    return make_dataclass(options.__name__, found, frozen=True)


_CHECKPOINT: Kind = _of(CheckpointConfig, (), ("peers", "peer_token", "node_rank"))
_ELASTIC: Kind = _of(ElasticTrainingConfig)
_SCALING: Kind = _of(ScalingConfig)
_NOTICE: Kind = _of(NoticeOptions)
_RECOVERY: Kind = _of(PolicyOptions)
_TRIGGERS = tuple(one.name for one, _ in meanings(DebugOptions) if key_of(one).startswith("triggers."))
_WHEN: Kind = _of(DebugOptions, _TRIGGERS, unset=True)
_DEBUG: Kind = _of(DebugOptions, (), _TRIGGERS, unset=True)
_OF_LIGHTHOUSE = ("min_replicas", "join_timeout_s", "quorum_tick_s", "heartbeat_s", "heartbeat_timeout_s")
_LIGHTHOUSE: Kind = _of(Options, _OF_LIGHTHOUSE)


@dataclass(frozen=True)
class Checkpoint(_CHECKPOINT):
    """Options of `allranks.checkpoint.CheckpointConfig`."""

    fresh: bool = option(False, "as `allranks run --fresh`: set existing checkpoints aside first")


@dataclass(frozen=True)
class Elastic(_ELASTIC):
    """Options of `allranks.elastic.ElasticTrainingConfig`, and further keys."""

    rdzv_endpoint: str = option("", "host:port; empty: this machine, for one node")
    nproc_per_node: int | str | None = option(
        None, "None: torchrun's default", above=0, choices=("auto", "gpu", "cpu")
    )
    base_world_size: int | None = option(None, "number of ranks for which training.lr was chosen", above=0)


@dataclass(frozen=True)
class Scaling(_SCALING):
    """Options of `allranks.elastic.ScalingConfig`, and how the batch size depends on the number of ranks."""

    strategy: str = option(
        "variable_batch", "", choices=("variable_batch", "constant_batch"), title="scaling strategy"
    )
    target_global_batch_size: int | None = option(None, "", above=0)
    rounding: str = option("exact", "", choices=("exact", "ceil", "floor", "nearest"))


@dataclass(frozen=True)
class Triggers(_WHEN):
    """When `allranks watch` collects stacks; `allranks run` uses those that are set. 0: never."""


@dataclass(frozen=True)
class Debug(_NOTICE, _DEBUG):
    """Recording and hang detection of `allranks run`, and stack collection of `allranks run` and `allranks watch`."""

    enabled: bool = option(True, "collect stacks")
    triggers: Triggers = option(Triggers, "")
    record: bool = option(True, "keep the black box of every rank")
    watch: bool = option(True, "detect hangs")
    incidents: str | None = option(None, "folder for incidents; None: ./allranks-incidents")
    log_level: str = option("info", "", choices=("debug", "info"), title="log level")


@dataclass(frozen=True)
class Recovery(_RECOVERY):
    """Automatic recovery."""

    mode: str = option(
        "auto",
        "auto: dry-run for whole-job restarts, on for replicas",
        choices=("auto", "on", "dry-run", "collect", "off"),
        title="recovery mode",
    )
    notice_s: float | None = option(
        None, "minimum time without progress before an investigation; None: debug.hang_floor_s", above=0
    )
    webhooks: list[str] = option(list, "", title="webhook")
    incident_store: str | None = option(None, "URL of an object store to which incident folders are copied")


@dataclass(frozen=True)
class LighthouseSection(_LIGHTHOUSE):
    """The lighthouse that `allranks run` starts or joins."""

    embedded: bool = option(True, "start one in this process")
    address: str | None = option(None, "host:port of a running lighthouse")
    bind: str = option("127.0.0.1:0", "listen address of the embedded lighthouse; port 0: any free port")


@dataclass(frozen=True)
class JobConfig:
    """A job file. `model` is free-form; `written` are the keys present in the file, as "section.key"."""

    model: dict[str, object] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    elastic: Elastic = field(default_factory=Elastic)
    scaling: Scaling = field(default_factory=Scaling)
    data: Data = field(default_factory=Data)
    debug: Debug = field(default_factory=Debug)
    recovery: Recovery = field(default_factory=Recovery)
    lighthouse: LighthouseSection = field(default_factory=LighthouseSection)
    written: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def to_dict(self) -> dict[str, Value]:
        """The whole configuration, with defaults."""
        return {name: _as_dict(value) for name, value in vars(self).items() if name != "written"}


def _as_dict(value: Value) -> Value:
    if not is_dataclass(value):
        return value
    inside = dict(vars(value))
    return {**{name: _as_dict(one) for name, one in inside.items() if name != "own"}, **inside.get("own", {})}


#: Section -> its class; `model` is free-form.
SECTIONS: dict[str, Kind] = {
    one.name: one.default_factory for one in fields(JobConfig) if one.default_factory not in (MISSING, dict)
}


@dataclass(frozen=True)
class Key:
    """One key of a section. `kind` is int, float, bool, str, a list or dict of them, or a section class; `words` are the
    allowed texts (in addition to numbers if `kind` is int)."""

    kind: Any
    words: tuple[str, ...]
    default: Value
    meaning: Meaning

    @property
    def section(self) -> bool:
        return is_dataclass(self.kind)


@cache
def keys_of(section: type) -> dict[str, Key]:
    """The keys of a section, in order."""
    hints = get_type_hints(section)
    return {
        one.name: Key(*_kind(hints[one.name], meaning), default_of(one), meaning)
        for one, meaning in meanings(section)
    }


def _kind(hint: Any, meaning: Meaning) -> tuple[Kind, tuple[str, ...]]:
    """(kind, words) of a type hint: YAML supports fewer types than Python."""
    union = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [kind for kind in union if kind is not NoneType]
    words = meaning.choices or tuple(get_args(kinds[0]) if get_origin(kinds[0]) is Literal else ())
    if words:
        return (int if int in kinds else str), words
    kind, inner = get_origin(kinds[0]), get_args(kinds[0])
    if kind in (list, tuple):
        return list[float] if float in inner else list[str], ()
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return dict[str, str], ()
    return kinds[0], ()


#: Names of keys in files of elastic_harness.
ALIASES = {("scaling", "rule"): "scaling_rule", ("data", "index_path"): "index"}

#: Sections of other tools, which are accepted and ignored.
FOREIGN = {"chaos": "use a fault plan with `allranks drill --plan FILE`"} | dict.fromkeys(
    ("name", "resources", "slurm", "frontend", "backend", "benchmark", "health_check", "output", "profiling"),
    "it belongs to a serving recipe, of which only `debug` is used",
)
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema() -> dict[str, object]:
    """JSON Schema (2020-12) of the file, for editors."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "allranks job"}
    sections = {name: _schema_of(section) for name, section in SECTIONS.items()}
    return {
        **head,
        "description": JobConfig.__doc__,
        "type": "object",
        "additionalProperties": False,
        "properties": {"model": {"type": "object"}, **sections},
    }


def _schema_of(section: Kind) -> dict[str, object]:
    text = (section.__doc__ or "").strip()
    return {
        **({} if text.startswith(f"{section.__name__}(") else {"description": text}),
        "type": "object",
        "additionalProperties": section is Training,
        "properties": {name: _schema_of_key(key) for name, key in keys_of(section).items()},
    }


def _schema_of_key(key: Key) -> dict[str, object]:
    if key.section:
        return _schema_of(key.kind)
    bounds = {
        "exclusiveMinimum": key.meaning.above,
        "minimum": key.meaning.at_least,
        "maximum": key.meaning.at_most,
    }
    limits = {name: bound for name, bound in bounds.items() if bound is not None}
    if get_origin(key.kind) is list:
        item = {"type": _TYPES[get_args(key.kind)[0]], **limits}
        found: list[dict[str, object]] = [{"type": "array", "items": item}]
    elif get_origin(key.kind) is dict:
        found = [{"type": "object", "additionalProperties": {"type": "string"}}]
    else:
        found = [{"type": _TYPES[key.kind], **limits}] if key.kind is not str or not key.words else []
    found += [{"type": "string", "enum": list(key.words)}] if key.words else []
    found += [{"type": "null"}] if key.default is None else []
    text = {"description": key.meaning.help} if key.meaning.help else {}
    return {**(found[0] if len(found) == 1 else {"anyOf": found}), "default": key.default, **text}
