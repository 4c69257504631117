"""The typed shape of a job's configuration. The only module that imports pydantic.

Each default is written once: here, or in the options class that a section is made from. A field's `title` is the word used for it in messages; relations between
fields are in `relations.py`, so that one wrong field does not hide them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

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
from allranks.model.options import default_of, meanings

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


def _switch(value: Any) -> Any:
    """YAML 1.1 readers turn `mode: on` into True: take it back."""
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    """One path is a list of one."""
    return [value] if isinstance(value, str) else value


class Section(BaseModel):
    """A section: unknown keys are refused, values may be converted ("4" → 4) but not guessed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")  # type: ignore[untyped-decorator]
    @classmethod
    def _no_flags_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """`true` is not 1."""
        annotation = (
            cls.model_fields[info.field_name].annotation if info.field_name in cls.model_fields else None
        )
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


def section_of(options: type, *left_out: str) -> Any:
    """A section with the names, defaults, bounds and meanings of an options class."""
    kinds = get_type_hints(options)
    found: dict[str, Any] = {}
    for one, meaning in meanings(options):
        default = default_of(one)
        if one.name in left_out:
            continue
        kind = (
            Literal[meaning.choices] if meaning.choices else _YAML_KINDS.get(kinds[one.name], kinds[one.name])
        )
        value = default.value if isinstance(default, enum.Enum) else default
        found[one.name] = (
            kind,
            Field(
                value,
                title=meaning.title or None,
                description=meaning.help,
                gt=meaning.above,
                ge=meaning.at_least,
            ),
        )
    return create_model(f"{options.__name__}Section", __base__=Section, **found)


#: What a YAML file can say where a program may give more.
_YAML_KINDS: dict[Any, Any] = {str | Path | None: str | None, Mapping[str, str]: dict[str, str]}


class Checkpoint(section_of(CheckpointConfig, "peers", "peer_token", "node_rank")):  # type: ignore[misc]
    """`allranks.checkpoint.CheckpointConfig`, which is made from it."""

    fresh: bool = Field(False, description="as `allranks run --fresh`: set earlier checkpoints aside first")


class Elastic(section_of(ElasticTrainingConfig)):  # type: ignore[misc]
    """`allranks.elastic.ElasticTrainingConfig`, and what only the file says."""

    rdzv_endpoint: str = Field("", description="host:port; empty: this machine, for one node")
    nproc_per_node: Positive | Literal["auto", "gpu", "cpu"] | None = Field(
        None, description="None: torchrun's choice"
    )
    base_world_size: Positive | None = Field(None, description="ranks for which training.lr was chosen")


class Scaling(section_of(ScalingConfig)):  # type: ignore[misc]
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


class Triggers(Section):
    """What makes `allranks watch` collect; `allranks run` collects for those that are set. 0: never."""

    no_progress_seconds: float | None = Field(None, ge=0, description="black boxes stand still")
    collective_overdue_seconds: float | None = Field(None, ge=0, description="one call is open for so long")
    no_output_seconds: float | None = Field(None, ge=0, description="log files stand still")
    rank_lost: bool | None = Field(None, description="a rank ended while others run")
    at_seconds: list[Seconds] = Field(default_factory=list, description="several fixed times after the start")


class Debug(Section):
    """Black box and watch of `allranks run`, and collections of stacks by it or by `allranks watch`."""

    enabled: bool = Field(True, description="False: no collections")
    wait_seconds: float = Field(
        0.0, ge=0, description="collect every rank's stacks once, this long after the start; 0: never"
    )
    output_dir: str | None = Field(
        None, description="where to; {log_dir} is the job's log folder; None: {log_dir}/backtraces"
    )
    triggers: Triggers = Triggers()
    repeats: Positive | None = Field(None, description="collections of one standstill")
    rounds: Positive | None = Field(None, description="snapshots of one collection")
    interval_seconds: float | None = Field(None, ge=0, description="between two snapshots")
    native: Literal["suspects", "all", "never"] | None = Field(None, title="choice of native stacks")
    cuda_gdb: bool | None = Field(None, description="device kernels by cuda-gdb, too")
    patterns: list[str] | None = Field(None, description="further process titles that are ranks")
    record: bool = Field(True, description="keep the black box of every rank")
    watch: bool = Field(True, description="notice hangs")
    hang_floor_s: Seconds = Field(10.0, description="never look at a silence shorter than this")
    hang_cap_s: Seconds = Field(300.0, description="always look at one longer than this")
    startup_s: Seconds = Field(60.0, description="allowed before the job has a history")
    incidents: str | None = Field(None, description="folder for incidents; None: ./allranks-incidents")
    log_level: Literal["debug", "info"] = Field("info", title="log level")


Address = Annotated[str, Field(pattern=r"^(slack:)?https?://", title="webhook")]


class Recovery(Section):
    """What the closed loop may do by itself, and how often."""

    mode: Annotated[Literal["auto", "off", "dry-run", "on"], BeforeValidator(_switch)] = Field(
        "auto", title="recovery mode", description="auto: dry-run for whole-job restarts, on for replicas"
    )
    on_hang: Literal["evict", "restart_rank", "restart_job", "collect", "command"] | None = Field(
        None, title="recovery action", description="None: evict (replicas) or restart_job (whole job)"
    )
    command: str | None = Field(
        None, description="for the action `command`; {incident} and {ranks} are filled in"
    )
    notice_s: Seconds | None = Field(
        None, description="least seconds without progress before a look; None: default"
    )
    min_confidence: float = Field(0.6, ge=0, le=1, description="of a verdict, to act on it")
    max_actions: Count = Field(10, description="within window_s; beyond it evidence is collected only")
    window_s: Seconds = 3600.0
    back_off_s: float = Field(30.0, ge=0, description="least seconds between two actions")
    webhooks: Annotated[list[Address], BeforeValidator(_listed)] = Field(default_factory=list)
    incident_store: str | None = Field(
        None, pattern=r"^\w+://", description="URL of an object store; incident folders are copied there"
    )


class LighthouseSection(Section):
    """The lighthouse that `allranks run` starts or joins."""

    embedded: bool = Field(True, description="start one in this process")
    address: str | None = Field(None, description="host:port of one that runs already")
    bind: str = "127.0.0.1:0"
    min_replicas: Positive = 1
    join_timeout_s: Seconds = 60.0
    quorum_tick_s: Seconds = 0.1
    heartbeat_interval_s: Seconds = 1.0
    heartbeat_timeout_s: Seconds = 5.0


class JobConfig(Section):
    """A whole job. `model` is free-form."""

    model: dict[str, Any] = Field(default_factory=dict)
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
FOREIGN = {"chaos": "use a fault plan with `allranks drill --plan FILE`"}


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the file, for editors."""
    schema: dict[str, Any] = JobConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "allranks job", **schema}
