"""`allranks run --config` takes what the file says, unless a flag says otherwise."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from allranks.cli.parser import declare, read_flags
from allranks.cli.run_job import (
    RunFlags,
    heartbeats,
    manager_timeout_s,
    notice_options,
    options_in,
    policy_options,
    with_job_file,
)
from allranks.elastic.config import load_config
from allranks.errors import InputError
from allranks.lighthouse.options import Options
from allranks.model.debug_options import (
    OF_RUN,
    DebugOptions,
    parse_debug,
    read_debug_options,
)
from allranks.model.options import key_of, meanings
from allranks.watch import collection


def _taken(settings: dict[str, Any], script: list[str], *words: str) -> tuple[RunFlags, list[str]]:
    """The options and the script of `allranks run WORDS` with these settings."""
    parser = argparse.ArgumentParser()
    declare(parser, importlib.import_module("allranks.cli.run"))
    args = parser.parse_args([*words])
    return with_job_file(read_flags(RunFlags, args), args, settings, script)


def _settings(**sections: Any) -> dict[str, Any]:
    return load_config(sections).to_dict()


def test_every_key_of_debug_recovery_and_lighthouse_has_a_reader() -> None:
    """A key that nobody reads would be a promise that nobody keeps."""
    settings = _settings(
        debug={"record": False, "watch": False, "hang_floor_s": 20, "hang_cap_s": 200, "startup_s": 90,
               "incidents": "here", "log_level": "debug"},
        recovery={"mode": "on", "on_hang": "command", "command": "page {ranks}", "min_confidence": 0.9,
                  "max_actions": 3, "window_s": 100, "back_off_s": 7},
        lighthouse={"embedded": False, "bind": "0.0.0.0:5", "min_replicas": 2, "join_timeout_s": 9,
                    "quorum_tick_s": 0.5, "heartbeat_interval_s": 0.5, "heartbeat_timeout_s": 4},
        training={"script": "train.py", "args": ["--fast"]},
    )  # fmt: skip
    taken, script = _taken(settings, [])
    assert script == ["train.py", "--fast"]
    assert (taken.record, taken.watch, taken.verbose, taken.incidents) == (False, False, True, Path("here"))
    assert (taken.start_lighthouse, taken.bind, taken.min_replicas) == (False, "0.0.0.0:5", 2)
    policy = policy_options(None, settings)
    assert (policy.enabled, policy.on_hang, policy.command) == (True, "command", "page {ranks}")
    assert (policy.min_confidence, policy.max_actions, policy.window_s, policy.back_off_s) == (0.9, 3, 100, 7)
    notice = notice_options(None, settings)
    assert (notice.floor_s, notice.cap_s, notice.warm_up_s) == (20, 200, 90)
    options = Options(**options_in(settings, "lighthouse", Options))
    assert (options.join_timeout_s, options.quorum_tick_s, options.heartbeat_s) == (9, 0.5, 0.5)
    assert options.heartbeat_timeout_s == 4
    asked, _ = _taken(_settings(recovery={"notice_s": 33, "incident_store": "s3://b/i"}), ["x.py"])
    assert (asked.notice_s, asked.incident_store) == (33, "s3://b/i")


def test_a_silence_that_was_asked_for_holds_from_the_first_steps() -> None:
    """--notice-s or recovery.notice_s; nothing asked: the first steps have the time of the start."""
    assert notice_options(5, {}).asked
    assert not notice_options(None, {}).asked


def test_the_managers_timeout_is_taken_from_the_environment() -> None:
    """As the managers take it; what is not a number is named."""
    assert manager_timeout_s({}) == 60
    assert manager_timeout_s({"TORCHFT_TIMEOUT_SEC": "9"}) == 9
    assert manager_timeout_s({"ALLRANKS_TIMEOUT_S": "600"}) == 60
    with pytest.raises(InputError, match="ALLRANKS_TIMEOUT_S='soon' is not a number of seconds"):
        manager_timeout_s({"ALLRANKS_TIMEOUT_S": "soon"})


def test_heartbeats_reach_torchrun() -> None:
    """Keep-alive in whole seconds, unless --rdzv-conf was given."""
    take = importlib.import_module("allranks.cli.run")._torchrun_from
    settings = _settings(elastic={"heartbeat_interval": 2.5, "heartbeat_timeout": 9})
    assert heartbeats(settings) == "keep_alive_interval=2,keep_alive_max_attempt=5"
    words = take(settings, [])
    assert words[words.index("--rdzv-conf") + 1] == heartbeats(settings)
    assert "--rdzv-conf" not in take(settings, ["--rdzv-conf", "timeout=5"])


def test_a_job_of_one_node_takes_a_free_port() -> None:
    """Two of them on one machine must not meet; an endpoint in the file or on the command line stands."""
    take = importlib.import_module("allranks.cli.run")._torchrun_from
    assert "--standalone" in take(_settings(elastic={"max_nodes": 1}), [])
    assert "--standalone" not in take(_settings(elastic={"max_nodes": 1}), ["--rdzv-endpoint=a:1"])
    assert "--standalone" not in take(_settings(elastic={"max_nodes": 1, "rdzv_endpoint": "a:1"}), [])
    assert "--standalone" not in take(_settings(elastic={"max_nodes": 2}), [])
    words = take(_settings(elastic={"nproc_per_node": 4}), ["--standalone"])
    assert "--nproc-per-node" in words and "--nnodes" not in words


def test_flags_win_over_the_file() -> None:
    """What was typed stands."""
    settings = _settings(
        lighthouse={"address": "other:1", "bind": "0.0.0.0:5"}, training={"script": "train.py"}, recovery={"mode": "on"}
    )  # fmt: skip
    words = ("--lighthouse", "mine:2", "--bind", "127.0.0.1:7", "--min-replicas", "3", "--incidents", "mine")
    taken, script = _taken(settings, ["own.py"], *words)
    assert script == ["own.py"]
    assert (taken.lighthouse, taken.bind, taken.min_replicas, taken.incidents) == (
        "mine:2",
        "127.0.0.1:7",
        3,
        Path("mine"),
    )
    assert policy_options("dry-run", settings).enabled is False
    assert notice_options(5.0, settings).floor_s == 5.0


def test_without_a_file_nothing_changes() -> None:
    """No settings: the defaults of the parts themselves."""
    assert _taken({}, ["a.py"]) == (RunFlags(), ["a.py"])
    assert policy_options(None, {}).enabled is None and notice_options(None, {}).floor_s == 10.0


@pytest.mark.parametrize(
    ("mode", "enabled"), [("auto", None), ("on", True), ("off", False), ("dry-run", False)]
)
def test_the_modes_of_recovery_become_a_policy(mode: str, enabled: bool | None) -> None:
    """auto leaves the choice to the kind of job."""
    assert policy_options(None, _settings(recovery={"mode": mode})).enabled is enabled


def test_one_file_serves_run_and_watch(tmp_path: Path) -> None:
    """Every key of `debug` is known to both; each takes what is its own, and both find the same mistake."""
    text = (
        "training: {script: train.py}\n"
        "debug:\n"
        "  wait_seconds: 7\n  output_dir: there\n  rounds: 3\n  native: never\n  patterns: [^mine]\n  record: false\n"
        "  hang_floor_s: 20\n  hang_cap_s: 100\n  startup_s: 30\n  incidents: here\n  log_level: debug\n  watch: false\n"
        "  triggers: {at_seconds: [5], rank_lost: true}\n"
    )
    (tmp_path / "job.yaml").write_text(text)
    debug = load_config(tmp_path / "job.yaml").to_dict()["debug"]
    watch = read_debug_options(tmp_path / "job.yaml")
    assert (watch.rounds, watch.native, watch.patterns, watch.output_dir) == (3, "never", ("^mine",), "there")
    section = collection(debug)
    assert section is not None
    alike = parse_debug(section)
    assert alike.fixed_points() == watch.fixed_points() == (5.0, 7.0)
    assert (alike.no_progress_s, alike.rank_lost) == (0.0, True)
    keys = {key_of(one) for one, _ in meanings(DebugOptions)}
    triggers = {f"triggers.{key}" for key in debug["triggers"]}
    assert (set(debug) - OF_RUN - {"triggers"}) | triggers == keys
    assert collection(_settings()["debug"]) is None
    (tmp_path / "job.yaml").write_text("training: {script: train.py}\n")
    assert read_debug_options(tmp_path / "job.yaml") == DebugOptions()
