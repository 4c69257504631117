"""Options once: checks, job file and documentation are made from the same fields."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from allranks.checkpoint import CheckpointConfig
from allranks.elastic.config import JobConfig, load_config, validate_config
from allranks.elastic.parts import make_checkpoint_config
from allranks.errors import ConfigurationError
from allranks.model.options import check_options, default_of, meanings, option


def test_a_job_file_has_every_option_with_the_same_default() -> None:
    """But for those that the launcher tells the ranks."""
    section = JobConfig().checkpoint
    assert make_checkpoint_config(JobConfig()) == CheckpointConfig()
    names = {one.name for one, _ in meanings(CheckpointConfig)}
    assert set(vars(section)) == names - {"peers", "peer_token", "node_rank"} | {"fresh"}


def test_what_a_job_file_says_reaches_the_manager() -> None:
    """Also the options that once could be given in code only."""
    text = "checkpoint: {busy_policy: queue, s3_options: {timeout_s: '9'}, commit_timeout_s: 7}\n"
    config = make_checkpoint_config(load_config(text))
    assert (config.busy_policy.value, config.commit_timeout_s) == ("queue", 7.0)
    assert config.s3_options == {"timeout_s": "9"}


@pytest.mark.parametrize("name", [one.name for one, meaning in meanings(CheckpointConfig) if meaning.above is not None or meaning.at_least is not None])  # fmt: skip
def test_a_value_out_of_its_bounds_is_refused_in_code_and_in_the_file(name: str) -> None:
    """With its name and the value."""
    with pytest.raises(ConfigurationError, match=rf"{name} \(-1\) must"):
        CheckpointConfig(**{name: -1})
    if name != "node_rank":
        result = validate_config({"checkpoint": {name: -1}})
        assert not result.valid and name in result.errors[0]


def test_options_of_any_class_are_checked() -> None:
    """Bounds other than zero, and choices."""

    @dataclass(frozen=True)
    class Sample:
        share: float = option(0.5, "of a whole", at_least=0.1)
        factor: float = option(2.0, "times", above=1)
        kind: str = option("a", "which", choices=("a", "b"))
        words: list[str] = option(list, "free")

        def __post_init__(self) -> None:
            check_options(self)

    assert [default_of(one) for one, _ in meanings(Sample())] == [0.5, 2.0, "a", []]
    for wrong, text in (
        ({"share": 0.0}, "at least 0.1"),
        ({"factor": 1.0}, "above 1"),
        ({"kind": "c"}, "'c'"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            Sample(**wrong)  # type: ignore[arg-type]
