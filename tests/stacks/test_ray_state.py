"""What Ray's state API tells: rows as Ray 2.60 answers them."""

from __future__ import annotations

from allranks.diagnosis.process_verdict import explain_processes
from allranks.model.stacks import JobLook, Process, RayTask, StackFrame, ThreadLook, WaitFor
from allranks.stacktraces.ray_state import Rows, parse_tasks, with_tasks

NODES: Rows = [{"node_id": "n1", "node_ip": "10.0.0.1"}, {"node_id": "n2", "node_ip": "10.0.0.2"}]
ACTORS: Rows = [
    {"actor_id": "a1", "class_name": "Trainer", "state": "ALIVE", "pid": 20, "node_id": "n1"},
    {"actor_id": "a2", "class_name": "Reward", "state": "ALIVE", "pid": 30, "node_id": "n2"},
    {
        "actor_id": "a3",
        "class_name": "Rollout",
        "state": "PENDING_CREATION",
        "pid": 0,
        "node_id": None,
        "required_resources": {"CPU": 64.0},
    },
]


def _task(
    number: str, parent: str, name: str, actor: str | None, state: str, pid: int | None = None
) -> dict[str, object]:
    kind = "ACTOR_TASK" if actor else "DRIVER_TASK"
    node = "n1" if pid else None
    facts = {"task_id": number, "parent_task_id": parent, "name": name, "actor_id": actor, "state": state}
    return {**facts, "worker_pid": pid, "node_id": node, "type": kind}


TASKS: Rows = [
    _task("d", "", "driver", None, "RUNNING", 10),
    _task("t1", "d", "Trainer.fit", "a1", "RUNNING", 20),
    _task("t2", "t1", "Reward.score", "a2", "SUBMITTED_TO_WORKER"),
    _task("t3", "t1", "Rollout.generate", "a3", "PENDING_NODE_ASSIGNMENT"),
    _task("t0", "d", "Trainer.fit", "a1", "FINISHED", 20),
]


def test_calls_that_have_not_ended_lead_to_who_runs_them() -> None:
    """By node and pid; an actor that was never placed has none."""
    found = parse_tasks(NODES, ACTORS, TASKS, {"10.0.0.1"}, "head")
    assert found == (
        RayTask("Trainer.fit", ("head", 10), ("head", 20), "RUNNING"),
        RayTask("Reward.score", ("head", 20), ("10.0.0.2", 30), "SUBMITTED_TO_WORKER"),
        RayTask("Rollout.generate", ("head", 20), None, "PENDING_CREATION", "64 CPU"),
    )


def _waits(pid: int, title: str, kind: str = "ray", **facts: bool) -> Process:
    frame = StackFrame("fit", "/job/train.py", pid)
    thread = ThreadLook(pid, "MainThread", WaitFor(kind, "waits"), (frame,), main=True, user=frame, **facts)  # type: ignore[arg-type]
    return Process(pid, node="head", title=title, role=title.rpartition(":")[2], threads=(thread,))


def test_an_actor_that_has_no_place_is_said_with_what_it_needs() -> None:
    tasks = (RayTask("Rollout.generate", ("head", 10), None, "PENDING_CREATION", "64 CPU"),)
    (driver,) = with_tasks([_waits(10, "python train.py")], tasks)
    busy = _waits(20, "ray::Trainer.fit", "work", handles=True)
    finding = explain_processes(JobLook((driver, busy), 5.0, tasks=tasks))
    assert finding.state == "stuck" and [one.pid for one in finding.guilty] == [10]
    assert "waits for Rollout.generate of Ray, which is pending creation (needs 64 CPU)" in finding.sentence


def test_of_two_actors_that_do_something_the_one_that_runs_the_call_is_waited_for() -> None:
    look = [
        _waits(10, "python train.py"),
        *(_waits(pid, "ray::Reward.score", "work", handles=True) for pid in (30, 31)),
    ]
    tasks = (RayTask("Reward.score", ("head", 10), ("head", 31), "RUNNING"),)
    finding = explain_processes(JobLook(tuple(with_tasks(look, tasks)), 5.0, tasks=tasks))
    assert [one.pid for one in finding.guilty] == [31]
