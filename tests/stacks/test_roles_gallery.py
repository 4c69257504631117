"""The jobs of examples/roles, live: the guilty process, its role and its line; no healthy job is accused."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "roles"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("roles_gallery", FOLDER / "gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gallery = _load()
TABLE = gallery.truth()


def test_every_script_has_a_row_and_every_row_its_lines() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"gallery", "job"}
    assert scripts == set(TABLE)
    hanging = [case for case in TABLE.values() if case.guilty]
    assert len(hanging) >= 30 and len(TABLE) - len(hanging) >= 6
    assert [case.name for case in hanging if not case.lines and set(case.guilty) - case.without_line] == []


def test_an_answer_is_right_when_it_accuses_the_guilty_only() -> None:
    case, roles = TABLE["reward_lock"], {"trainer": 10, "reward": 11}
    line = min(case.lines)
    reward = {"pid": 11, "role": "reward server", "file": "/x/reward_lock.py", "line": line}
    assert gallery.judge(case, roles, {"state": "stuck", "guilty": [reward]}).right
    assert not gallery.judge(case, roles, {"state": "stuck", "guilty": []}).process
    assert not gallery.judge(case, roles, {"state": "unclear", "guilty": [reward]}).process
    both = [reward, {**reward, "pid": 10, "role": "trainer"}]
    assert not gallery.judge(case, roles, {"state": "stuck", "guilty": both}).process
    elsewhere = gallery.judge(case, roles, {"state": "stuck", "guilty": [{**reward, "line": line + 1}]})
    assert (elsewhere.process, elsewhere.role, elsewhere.line) == (True, True, False)


def test_a_healthy_job_is_right_when_nobody_is_accused() -> None:
    case = TABLE["ok_compile"]
    assert gallery.judge(case, {}, {"state": "moving", "guilty": []}).right
    assert not gallery.judge(case, {}, {"state": "stuck", "guilty": []}).right


@pytest.mark.parametrize(
    "name",
    [
        *("reward_lock", "one_connection", "producer_thread_died", "world_never_joined"),
        *("manager_queue_thread", "shm_spin", "uvicorn_condition", "ok_idle_server"),
    ],
)
def test_who_does_not_move_is_named_and_nothing_is_left(name: str) -> None:
    if name == "uvicorn_condition" and sys.version_info < (3, 11):
        pytest.skip("coroutines of Python 3.10 are not read")
    before = set(gallery.descendants(os.getpid()))
    outcome = gallery.run(TABLE[name])
    if outcome.skipped:
        pytest.skip(f"needs {outcome.skipped}")
    assert outcome.right, outcome
    assert set(gallery.descendants(os.getpid())) <= before


@pytest.mark.everything
@pytest.mark.timeout(3600)
def test_the_whole_gallery() -> None:
    done = [gallery.run(case) for case in TABLE.values()]
    healthy = [one for one in done if not TABLE[one.name].guilty and not one.skipped]
    hung = [one for one in done if TABLE[one.name].guilty and not one.skipped]
    assert [one for one in healthy if not one.right] == []
    missed = [gallery.show(one) for one in hung if not one.right]
    assert sum(one.process and one.role for one in hung) >= 0.9 * len(hung), missed
    assert sum(one.line for one in hung) >= 0.85 * len(hung), missed
