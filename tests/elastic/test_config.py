"""A job file is checked as a whole: every mistake at once, with its place and its hint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from allranks.cli import main
from allranks.cli.run_job import RunFlags, read_settings
from allranks.elastic.config import JobConfig, load_config, validate_config, validate_elastic_config
from allranks.elastic.config.schema import Recovery
from allranks.errors import ConfigurationError, InputError
from allranks.model.options import meanings

BROKEN = """\
training:
  lr: 1e-4
  batch_size: 0
  lrr: 3
elastic:
  min_nodes: 0
  max_node: 3
  rdzv_backend: etcd_v3
scaling:
  strategy: constant_batch
checkpoint:
  checkpoint_interval: -1
  async_save_policy: retri
lighthose: {}
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_every_mistake_is_reported_at_once_with_line_and_column(tmp_path: Path) -> None:
    """Eight mistakes in four sections give eight problems, in the order of the file."""
    result = validate_config(_write(tmp_path, BROKEN))
    assert not result.valid
    places = [(e.path, e.line, e.column) for e in result.errors]  # type: ignore[attr-defined]
    assert places == [
        ("training.batch_size", 3, 3),
        ("training.lrr", 4, 3),
        ("elastic.min_nodes", 6, 3),
        ("elastic.max_node", 7, 3),
        ("elastic.rdzv_backend", 8, 3),
        ("scaling.target_global_batch_size", 9, 1),
        ("checkpoint.checkpoint_interval", 12, 3),
        ("checkpoint.async_save_policy", 13, 3),
        ("lighthose", 14, 1),
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"scaling": {"strategy": "invalid"}},
            "Unknown scaling strategy 'invalid'. Valid options: ['variable_batch', 'constant_batch']",
        ),
        ({"elastic": {"min_nodes": 0}}, "min_nodes (0) must be at least 1"),
        ({"elastic": {"min_nodes": 8, "max_nodes": 4}}, "min_nodes cannot exceed max_nodes"),
        ({"checkpoint": {"checkpoint_interval": 0}}, "checkpoint_interval (0) must be positive"),
        (
            {"checkpoint": {"nvme_path": "$SCRATCH/run"}},
            "nvme_path is '$SCRATCH/run': variables are not expanded here",
        ),
        (
            {"scaling": {"strategy": "constant_batch"}},
            "target_global_batch_size is required for 'constant_batch' strategy",
        ),
        (
            {"scaling": {"strategy": "constant_batch", "target_global_batch_size": -4}},
            "target_global_batch_size (-4) must be positive",
        ),
        ({"training": {"lr": 0}}, "Learning rate (0) must be positive"),
        ({"training": {"batch_size": -2}}, "Batch size (-2) must be positive"),
        (
            {"training": {"gradient_clipping": {"max_norm": 0}}},
            "gradient_clipping.max_norm (0) must be positive",
        ),
        (
            {"scaling": {"rule": "bogus"}},
            "Unknown scaling rule 'bogus'. Valid options: ['linear', 'sqrt', 'none']",
        ),
        ({"scaling": {"warmup_steps": -1}}, "warmup_steps (-1) must not be negative"),
        ({"elastic": {"heartbeat_interval": 500, "heartbeat_timeout": 1}}, "must be at least twice"),
        ({"elastic": {"min_nodes": "many"}}, "min_nodes must be a whole number, not 'many'"),
        ({"training": "lr:1e-4"}, "missing space after the colon: write 'lr: 1e-4'"),
        ({"recovery": {"on_hang": "command"}}, "command is required because on_hang is 'command'"),
        ({"lighthouse": {"quorum_tick_s": 60}}, "quorum_tick_s (60) must be below join_timeout_s (60)"),
        ({"debug": {"hang_floor_s": 400}}, "hang_floor_s (400) exceeds hang_cap_s (300)"),
        ([1, 2], "must hold 'key: value' lines"),
        ({"elastic": {"min_nodes": True}}, "min_nodes must be a whole number, not True"),
        ({"training": {"lr": True}}, "Learning rate must be a number, not True"),
        ({"training": {"lr": float("inf")}}, "Learning rate (inf) must be a finite number"),
        ({"training": {"batch_size": 1.5}}, "Batch size must be a whole number, not 1.5"),
    ],
)
def test_documented_messages_are_given_for(config: Any, message: str) -> None:
    """The sentences that guides and search engines know, exactly one per mistake."""
    errors = validate_elastic_config(config).errors
    assert len(errors) == 1
    assert message in errors[0]


def test_one_mistake_in_a_relation_is_not_reported_twice() -> None:
    """A value that is wrong by itself takes no part in relations, its neighbours still do."""
    errors = validate_config({"elastic": {"min_nodes": "x", "max_nodes": 1, "heartbeat_timeout": 1}}).errors
    assert len(errors) == 2
    assert "min_nodes" in errors[0] and "heartbeat_timeout" in errors[1]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("training:\n\tlr: 1e-4\n", 2, "tab"),
        ("training:\n  lr:1e-4\n", 1, "missing space after the colon"),
        ("training:\n  lr:1e-4\n  batch_size: 8\n", 2, "write 'lr: 1e-4'"),
        ("elastic:\n  rdzv_id: my-job: 123\n", 2, "mapping values are not allowed here"),
        ("elastic:\n  rdzv_id: *job\n", 2, "undefined alias"),
        ("training:\n  lr: 1\n  lr: 2\n", 3, "written twice"),
        ("training:\n  lr: \x01\n", 2, "is not allowed"),
        ("elastic:\n  rdzv_id: #5\n", 2, "starts a comment"),
        ("elastic: {}\n---\ntraining: {}\n", 2, "found another document"),
    ],
)
def test_yaml_mistakes_have_their_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    """And the two most usual ones say what to change."""
    errors = validate_config(_write(tmp_path, text)).errors
    assert [e.line for e in errors] == [line]  # type: ignore[attr-defined]
    assert words in errors[0]


def test_several_yaml_mistakes_are_all_found_although_the_parser_stops_at_the_first(tmp_path: Path) -> None:
    """Tabs and missing spaces are seen on every line."""
    errors = validate_config(
        _write(tmp_path, "a:\n\tb: 1\ntraining:\n  lr:1\nelastic:\n\tmin_nodes: 1\n")
    ).errors
    assert [e.line for e in errors] == [2, 4, 6]  # type: ignore[attr-defined]


def test_values_are_read_as_people_mean_them(tmp_path: Path) -> None:
    """`1e-4` is a number, `on` a word, `12:30` text, and an anchor can be merged."""
    path = _write(
        tmp_path,
        "model: &m {d_model: 64}\ntraining: {lr: 1e-4, gradient_clipping: {enabled: no}}\n"
        "recovery: {mode: on}\nelastic: {rdzv_id: '12:30', rdzv_endpoint: localhost:2379}\n",
    )
    config = load_config(path)
    assert (config.training.lr, config.recovery.mode, config.elastic.rdzv_id) == (1e-4, "on", "12:30")
    assert config.training.gradient_clipping.enabled is False
    assert config.model == {"d_model": 64}


def test_merge_keys_and_aliases_work(tmp_path: Path) -> None:
    """`<<` merges, own keys win, an alias bomb is refused."""
    text = "model:\n  base: &b {x: 1, y: 2}\n  big:\n    <<: *b\n    y: 3\n"
    assert load_config(_write(tmp_path, text)).model["big"] == {"x": 1, "y": 3}
    bomb = "model:\n  a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
    bomb += "".join(f"  a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert "aliases expand" in validate_config(_write(tmp_path, bomb)).errors[0]


def test_a_serving_recipe_is_accepted_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own sections are named and not read, its debug section counts; a misspelt section is still an error."""
    text = (
        "name: dsr1\nmodel: {path: /models/dsr1}\nresources: {decode_nodes: 1}\nslurm: {time_limit: '04:00'}\n"
        "backend: {type: sglang}\nbenchmark: {type: none}\ndebug: {enabled: true, wait_seconds: 7}\n"
    )
    result = validate_config(_write(tmp_path, text))
    assert result.valid
    warned = [w.path for w in result.warnings]  # type: ignore[attr-defined]
    assert warned == ["name", "resources", "slurm", "backend", "benchmark"]
    assert load_config(tmp_path / "job.yaml").debug.wait_seconds == 7
    read_settings(tmp_path / "job.yaml")  # as `allranks run` does
    assert [line.split("section ")[1].split()[0] for line in capsys.readouterr().err.splitlines()] == [
        f"'{name}'" for name in warned
    ]
    assert "Unknown section 'resource'" in validate_config(_write(tmp_path, "resource: {}\n")).errors[0]
    (wrong,) = validate_config(_write(tmp_path, "debug: {patterns: [worker, '([']}\n")).errors
    assert "'([' is not a regular expression" in wrong


def test_the_harness_own_configuration_is_accepted(tmp_path: Path) -> None:
    """Old key names, the free-form model and the chaos section pass, the last with a word."""
    text = (
        "model: {vocab_size: 50257, d_model: 512}\ntraining: {lr: 1.0e-4, batch_size: 8, beta2: 0.95}\n"
        "data: {enabled: false, files: [], index_path: '', tokenizer: gpt2, num_workers: 4}\n"
        "scaling: {strategy: variable_batch, rule: sqrt, warmup_steps: 0}\n"
        "elastic: {base_world_size: 4, min_nodes: 1, max_nodes: 8}\nchaos: {enabled: false}\n"
    )
    result = validate_config(_write(tmp_path, text))
    assert result.valid
    assert [w.path for w in result.warnings] == ["training.beta2", "chaos"]  # type: ignore[attr-defined]
    config = load_config(tmp_path / "job.yaml")
    assert config.scaling.scaling_rule == "sqrt"
    assert config.training.beta2 == 0.95


def test_omegaconf_containers_are_accepted() -> None:
    """Interpolations are resolved before the check."""
    omegaconf = pytest.importorskip("omegaconf")
    container = omegaconf.OmegaConf.create(
        {"training": {"batch_size": 4}, "scaling": {"target_global_batch_size": "${training.batch_size}"}}
    )
    assert load_config(container).scaling.target_global_batch_size == 4
    broken = omegaconf.OmegaConf.create({"training": {"batch_size": "${nowhere}"}})
    assert "cannot resolve the container" in validate_config(broken).errors[0]


def test_suboptimal_intervals_warn_and_do_not_fail() -> None:
    """25 against 50 is odd, not wrong; 0 memory snapshots is a choice."""
    result = validate_elastic_config({"checkpoint": {"checkpoint_interval": 25}})
    assert result.valid and "checkpoint_interval (25) < memory_snapshot_interval (50)" in result.warnings[0]
    assert validate_config({"checkpoint": {"memory_snapshot_interval": 0}}).warnings == []


def test_defaults_are_the_documented_ones() -> None:
    """An empty file is a valid job."""
    config = load_config({})
    assert isinstance(config, JobConfig)
    assert (config.elastic.min_nodes, config.elastic.max_nodes, config.elastic.max_restarts) == (1, 4, 100)
    assert (config.checkpoint.checkpoint_interval, config.checkpoint.keep_last_n) == (500, 3)


def test_loading_a_wrong_file_raises_one_error_with_all_problems(tmp_path: Path) -> None:
    """load_config is for scripts: it raises, with everything in the text."""
    with pytest.raises(ConfigurationError) as caught:
        load_config(_write(tmp_path, BROKEN))
    assert "9 problems" in str(caught.value) and "lighthose" in str(caught.value)
    with pytest.raises(InputError, match="cannot read"):
        load_config(tmp_path / "missing.yaml")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["training", "elastic", "scaling", "min_nodes", "lr", "recovery", "webhooks", "strategy"]), inner, max_size=4), max_leaves=12))  # fmt: skip
def test_no_value_whatsoever_makes_the_check_raise(value: Any) -> None:
    """Wrong types are problems, never exceptions, and valid means loadable."""
    assume(not isinstance(value, str))  # a str is a file's name
    result = validate_config(value)
    assert result.valid == (not result.errors)
    if result.valid:
        assert load_config(value) is not None


@settings(max_examples=150)
@given(st.text(alphabet="abk:-#*&!%@`\"'{}[]|>,? \t\n019.~<", max_size=60))
def test_no_text_whatsoever_makes_the_check_raise(text: str) -> None:
    """Any bytes that are text end in problems or in a configuration."""
    from allranks.model.yaml_tree import read_tree

    tree = read_tree(text)
    assert all(problem.message for problem in tree.problems)
    assert all(1 <= line <= text.count("\n") + 1 for line, _ in tree.marks.values())


def test_check_command_prints_places_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FILE:LINE:COLUMN as editors and terminals know it."""
    path = _write(tmp_path, BROKEN)
    assert main(["config", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path}:6:3: error: elastic.min_nodes: min_nodes (0) must be at least 1" in out
    assert out.splitlines()[-1] == f"{path}: 9 errors"


def test_check_command_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, with message, path, line and column."""
    assert main(["config", "check", "--json", str(_write(tmp_path, "elastic:\n  min_nodes: 0\n"))]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["valid"] is False
    assert report["errors"] == [
        {"message": "min_nodes (0) must be at least 1", "path": "elastic.min_nodes", "line": 2, "column": 3}
    ]


def test_show_and_schema_describe_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """show fills in the defaults and reads back as the same job; schema names every section."""
    path = _write(tmp_path, "elastic: {max_nodes: 7}\n")
    assert main(["config", "show", str(path)]) == 0
    shown = _write(tmp_path, capsys.readouterr().out)
    assert load_config(shown) == load_config({"elastic": {"max_nodes": 7}})
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"model", "training", "checkpoint", "elastic", "scaling", "data", "debug", "recovery"} <= set(
        schema["properties"]
    )


_SECRETS = """
model: {hub: {token: hidden-1}, env: {WANDB_API_KEY: hidden-2}, eos_token: "</s>"}
training: {script: train.py, args: [--api-key, hidden-3, password=hidden-4], hf_token: hidden-5}
checkpoint: {s3_endpoint_url: "http://me:hidden-6@host", s3_options: {secret_access_key: hidden-7, timeout_s: "5"}}
data: {files: ["https://host/f?X-Amz-Signature=hidden-8&X-Amz-Date=1"], text_key: body}
recovery:
  webhooks: ["slack:https://hooks.slack.com/services/hidden-9", "https://me:hidden-10@host/hidden-11", wandb:team]
  incident_store: s3://me:hidden-12@bucket
"""


def test_show_hides_passwords_and_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What people paste into a ticket; what is not a secret stays readable."""
    path = _write(tmp_path, _SECRETS)
    for words in ([], ["--json"]):
        assert main(["config", "show", str(path), *words]) == 0
        out = capsys.readouterr().out
        assert "hidden-" not in out
        shown = yaml.safe_load(out)
        assert shown["recovery"]["webhooks"] == [
            "slack:https://hooks.slack.com/…",
            "https://host/…",
            "wandb:team",
        ]
        assert shown["checkpoint"]["s3_options"] == {"secret_access_key": "***", "timeout_s": "5"}
        assert shown["training"]["args"] == ["--api-key", "***", "password=***"]
        assert (shown["model"]["eos_token"], shown["data"]["text_key"]) == ("</s>", "body")


@pytest.mark.parametrize(
    "text",
    [
        "training: {batch_size: {token: hidden-1}}\n",
        "checkpoint: {s3_options: 'secret_access_key=hidden-1'}\n",
        "checkpoint: {s3_endpoint_url: ['http://me:hidden-1@host']}\n",
        "checkpoint: {nvme_path: 's3://me:hidden-1@bucket'}\n",
        "recovery: {mode: 'https://me:hidden-1@host'}\n",
        "recovery: {'https://me:hidden-1@host': 1}\n",
        "recovery:\n  webhooks: *https://host/hidden-1\n",
        "recovery:\n  webhooks: https://host/hidden-1: x\n",
        "training:\n  api_key:hidden-1\n",
        "lighthouse: https://me:hidden-1@host\n\n",
    ],
)
def test_errors_hide_passwords_and_keys(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CI log has them otherwise; as text, as JSON, and where a job is started."""
    path = _write(tmp_path, text)
    for words in (["check"], ["check", "--json"], ["show"]):
        assert main(["config", *words, str(path)]) in (1, 2)
        printed = capsys.readouterr()
        assert "hidden-" not in printed.out + printed.err


def test_missing_file_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Could not run, with the reason."""
    assert main(["config", "check", str(tmp_path / "no.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_checking_a_file_does_not_import_torch(tmp_path: Path) -> None:
    """`allranks config` is for login nodes."""
    code = "import sys; from allranks.elastic.config import validate_config; validate_config({}); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


@pytest.mark.parametrize("deep", ["[" * 5000, "{a: " * 5000, "- " * 5000 + "x", "[" * 5000 + "]" * 5000])
def test_values_nested_too_deeply_are_one_problem(deep: str) -> None:
    """Not a RecursionError."""
    result = validate_config(f"model:\n  a: {deep}\n")
    assert not result.valid and result.errors


def test_what_is_said_about_a_key_cannot_move_the_cursor_of_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys, values and words that are near to a key end up on screens."""
    text = '"train\\e[2Jing": 1\ntraining:\n  "l\\u009b31mr": 2\n  seed: "\\e]0;x\\a"\n'
    result = validate_config(_write(tmp_path, text))
    problems = [*result.errors, *result.warnings]
    assert len(problems) == 3 and all(problem.isprintable() for problem in problems)
    assert main(["config", "check", str(tmp_path / "job.yaml")]) == 1
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("head", ["", "training:\n", "data:\n"])
def test_a_file_of_hundreds_of_thousands_of_keys_is_not_read_to_its_end(tmp_path: Path, head: str) -> None:
    """Reading stops where there is more than any job says, and a long list of problems is cut."""
    indent = "  " if head else ""
    many = head + "".join(f"{indent}key{number}: 1\n" for number in range(300_000))
    found = validate_config(_write(tmp_path, many)).errors
    assert len(found) == 1 and "more than" in found[0] and 0 < found[0].line < 60_000  # type: ignore[attr-defined]
    some = head + "".join(f"{indent}key{number}: 1\n" for number in range(300))
    result = validate_config(_write(tmp_path, some))
    problems = [*result.errors, *result.warnings]
    assert len(problems) == 101 and "and 200 more" in problems[-1]


def test_a_job_file_takes_every_way_to_recover_that_the_flag_takes() -> None:
    """ "collect" was for the flag only."""
    (flag,) = (meaning for one, meaning in meanings(RunFlags) if one.name == "recovery")
    (key,) = (meaning for one, meaning in meanings(Recovery) if one.name == "mode")
    assert {*key.choices} == {*flag.choices, "auto"}
