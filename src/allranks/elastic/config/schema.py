"""The typed shape of a job's configuration. The only module that imports pydantic.

Each default is written once: here, or in the options class that a section is made from. A field's `title` is the word used for it in messages; relations between
fields are checked in `validate.py`, so that one wrong field does not hide them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError

from allranks.checkpoint.config import CheckpointConfig
from allranks.elastic.scaling import ScalingConfig
from allranks.elastic.world import ElasticTrainingConfig
from allranks.incidents.policy import PolicyOptions
from allranks.lighthouse.options import Options
from allranks.model.options import default_of, key_of, meanings
from allranks.stacks.debug_config import DebugOptions
from allranks.watch.silence import NoticeOptions

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


def _switch(value: object) -> object:
    """YAML 1.1 readers turn `mode: on` into True: take it back."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _listed(value: object) -> object:
    """One path is a list of one."""
    return [value] if isinstance(value, str) else value


class Section(BaseModel):
    """A section: unknown keys are refused, values may be converted ("4" → 4) but not guessed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")  # type: ignore[untyped-decorator]
    @classmethod
    def _no_flags_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        """`true` is not 1."""
        known = cls.model_fields.get(info.field_name or "")
        annotation = known.annotation if known is not None else None
        if isinstance(value, bool) and annotation in {int, float}:
            kind = "int_type" if annotation is int else "float_type"
            raise PydanticCustomError(kind, "a number is wanted")
        return value


class GradientClipping(Section):
    enabled: bool = True
    max_norm: float = Field(1.0, gt=0, title="gradient_clipping.max_norm")
    norm_type: float = Field(2.0, gt=0)
    log_clipping: bool = False


class TrainingSection(Section):
    """Read by your script; keys that allranks does not know are kept, with a warning."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    script: str | None = Field(
        None, description="what `allranks run --config` starts when no script is named"
    )
    args: list[str] = Field(default_factory=list, description="arguments of the script")
    lr: float = Field(1e-4, gt=0, title="Learning rate")
    weight_decay: float = Field(0.01, ge=0)
    batch_size: Positive = Field(8, title="Batch size", description="samples per rank and micro-batch")
    max_steps: Positive = 100_000
    log_interval: Positive = 10
    seed: int = 0
    gradient_clipping: GradientClipping = GradientClipping()


def fields_of(
    options: type, only: Collection[str] = (), left_out: Collection[str] = (), unset: bool = False
) -> dict[str, Any]:
    """Fields with the keys, defaults, bounds and meanings of an options class; `unset`: None where the file is silent."""
    kinds = get_type_hints(options)
    found: dict[str, Any] = {}
    for one, meaning in meanings(options):
        if one.name in left_out or (only and one.name not in only):
            continue
        default = None if unset else default_of(one)
        kind = (
            Literal[meaning.choices] if meaning.choices else _YAML_KINDS.get(kinds[one.name], kinds[one.name])
        )
        value = default.value if isinstance(default, enum.Enum) else default
        bounds = {"gt": meaning.above, "ge": meaning.at_least, "le": meaning.at_most}
        if get_origin(kind) is list:
            bounds = {}
        field = Field(value, title=meaning.title or None, description=meaning.help, **bounds)
        found[key_of(one).rpartition(".")[2]] = (kind if value is not None else kind | None, field)
    return found


def _made(name: str, fields: dict[str, Any]) -> Any:
    return create_model(f"{name}Section", __base__=Section, **fields)


#: What a YAML file can say where a program may give more.
_YAML_KINDS: dict[Any, Any] = {
    str | Path | None: str | None,
    Mapping[str, str]: dict[str, str],
    tuple[float, ...]: list[Seconds],
    tuple[str, ...]: list[str],
}


_CHECKPOINT: Any = _made("Checkpoint", fields_of(CheckpointConfig, (), ("peers", "peer_token", "node_rank")))


class Checkpoint(_CHECKPOINT):
    """`allranks.checkpoint.CheckpointConfig`, which is made from it."""

    fresh: bool = Field(False, description="as `allranks run --fresh`: set earlier checkpoints aside first")


_ELASTIC: Any = _made("Elastic", fields_of(ElasticTrainingConfig))
_SCALING: Any = _made("Scaling", fields_of(ScalingConfig))


class Elastic(_ELASTIC):
    """`allranks.elastic.ElasticTrainingConfig`, and what only the file says."""

    rdzv_endpoint: str = Field("", description="host:port; empty: this machine, for one node")
    nproc_per_node: Positive | Literal["auto", "gpu", "cpu"] | None = Field(
        None, description="None: torchrun's choice"
    )
    base_world_size: Positive | None = Field(None, description="ranks for which training.lr was chosen")


class Scaling(_SCALING):
    """`allranks.elastic.ScalingConfig`, and how the batch follows the number of ranks."""

    strategy: Literal["variable_batch", "constant_batch"] = Field("variable_batch", title="scaling strategy")
    target_global_batch_size: Positive | None = None
    rounding: Literal["exact", "ceil", "floor", "nearest"] = Field("exact", title="rounding")


class Data(Section):
    enabled: bool = True
    files: Annotated[list[str], BeforeValidator(_listed)] = Field(default_factory=list)
    text_key: str = "text"
    seq_length: Positive = 1024
    tokenizer: str = Field("bytes", description="a tokenizer.json, a Hugging Face name, or 'bytes'")
    index: str | None = Field(None, description="the token index; built by `allranks index build`")
    num_workers: Count = 4
    seed: int = 0
    shuffle: bool = True


_TRIGGERS = tuple(one.name for one, _ in meanings(DebugOptions) if key_of(one).startswith("triggers."))


_WHEN: Any = _made("Triggers", fields_of(DebugOptions, _TRIGGERS, unset=True))
_DEBUG: Any = _made(
    "Debug", {**fields_of(DebugOptions, (), _TRIGGERS, unset=True), **fields_of(NoticeOptions)}
)


class Triggers(_WHEN):
    """What makes `allranks watch` collect; `allranks run` collects for those that are set. 0: never."""


class Debug(_DEBUG):
    """Black box and watch of `allranks run`, and collections of stacks by it or by `allranks watch`."""

    enabled: bool = Field(True, description="False: no collections")
    triggers: Triggers = Triggers()
    record: bool = Field(True, description="keep the black box of every rank")
    watch: bool = Field(True, description="detect hangs")
    incidents: str | None = Field(None, description="folder for incidents; None: ./allranks-incidents")
    log_level: Literal["debug", "info"] = Field("info", title="log level")


Address = Annotated[
    str, Field(pattern=r"^((slack:)?https?://|otlp:https?://|tensorboard:.|wandb:.)", title="webhook")
]


_RECOVERY: Any = _made("Recovery", fields_of(PolicyOptions))


class Recovery(_RECOVERY):
    """What the closed loop may do by itself, and how often."""

    mode: Annotated[Literal["auto", "off", "dry-run", "on"], BeforeValidator(_switch)] = Field(
        "auto", title="recovery mode", description="auto: dry-run for whole-job restarts, on for replicas"
    )
    notice_s: Seconds | None = Field(
        None, description="shortest silence that is investigated; None: debug.hang_floor_s"
    )
    webhooks: Annotated[list[Address], BeforeValidator(_listed)] = Field(default_factory=list)
    incident_store: str | None = Field(
        None, pattern=r"^\w+://", description="URL of an object store; incident folders are copied there"
    )


_OF_LIGHTHOUSE = ("min_replicas", "join_timeout_s", "quorum_tick_s", "heartbeat_s", "heartbeat_timeout_s")
_LIGHTHOUSE: Any = _made("Lighthouse", fields_of(Options, _OF_LIGHTHOUSE))


class LighthouseSection(_LIGHTHOUSE):
    """The lighthouse that `allranks run` starts or joins."""

    embedded: bool = Field(True, description="start one in this process")
    address: str | None = Field(None, description="host:port of one that runs already")
    bind: str = Field("127.0.0.1:0", description="where the embedded one listens; port 0: any free one")


class JobConfig(Section):
    """A whole job. `model` is free-form."""

    model: dict[str, object] = Field(default_factory=dict)
    training: TrainingSection = TrainingSection()
    checkpoint: Checkpoint = Checkpoint()
    elastic: Elastic = Elastic()
    scaling: Scaling = Scaling()
    data: Data = Data()
    debug: Debug = Debug()
    recovery: Recovery = Recovery()
    lighthouse: LighthouseSection = LighthouseSection()


#: Older spellings of keys, taken as the new ones.
ALIASES = {("scaling", "rule"): "scaling_rule", ("data", "index_path"): "index"}

#: Sections of other tools: accepted and not read, with a word on what to use.
FOREIGN = {"chaos": "use a fault plan with `allranks drill --plan FILE`"} | dict.fromkeys(
    ("name", "resources", "slurm", "frontend", "backend", "benchmark", "health_check", "output", "profiling"),
    "it belongs to a serving recipe, of which only `debug` is used here",
)


def json_schema() -> dict[str, object]:
    """JSON Schema (2020-12) of the file, for editors."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "allranks job"}
    return {**head, **JobConfig.model_json_schema()}
