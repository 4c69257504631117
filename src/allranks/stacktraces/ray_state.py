"""What Ray itself knows of a job: who waits for which call, and whether that runs, is pending or was never placed. From its state
API where the dashboard of the job answers; from its logs, actors that were killed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from allranks.channel import web_client
from allranks.errors import AllranksError
from allranks.model.stacks import Process, RayTask, ThreadLook, Where
from allranks.stacktraces.procfs import PROC, ProcessEntry

LIMIT_S = 1.0
_ASKED = ("nodes?detail=1", "actors?detail=1&limit=10000", "tasks?detail=1&exclude_driver=false&limit=10000")
_ENDED = ("FINISHED", "FAILED")
_LOG_FOLDER = re.compile(r"--log[_-]dir=(\S+)")
_WORKER_LOG = re.compile(r"worker-(\w+)-(?!ffffffff)\w+-(\d+)\.out$")

#: Rows of one table of the state API.
Rows = Sequence[Mapping[str, object]]


def read_tasks(
    entries: Iterable[ProcessEntry], processes: Sequence[Process]
) -> tuple[tuple[RayTask, ...], str]:
    """The calls that have not ended; none where no dashboard is among the processes, or it does not answer. And what a person can
    do about that."""
    boards = {entry.pid for entry in entries if "ray/dashboard/dashboard.py" in entry.title}
    links = [link for one in processes if one.pid in boards for link in one.links if link.kind == "listen"]
    for port in dict.fromkeys(link.end.rsplit(" ", 1)[-1] for link in links):
        tables = []
        try:
            for path in _ASKED:
                token = os.environ.get("RAY_AUTH_TOKEN", "")
                answer = web_client.get(f"127.0.0.1:{port}", f"/api/v0/{path}", LIMIT_S, token=token)
                if answer.status in (401, 403):
                    return (
                        (),
                        "Ray's state API asks for a token, which RAY_AUTH_TOKEN would hold: who runs which call is not known",
                    )
                tables.append(json.loads(answer.body)["data"]["result"]["result"])
        except (OSError, AllranksError, ValueError, KeyError, TypeError):
            continue
        ips = {m[1] for entry in entries if (m := re.search(r"--node[-_]ip[-_]address=(\S+)", entry.title))}
        nodes, actors, tasks = tables
        return parse_tasks(nodes, actors, tasks, ips, processes[0].node), ""
    return (), ""


def parse_tasks(nodes: Rows, actors: Rows, tasks: Rows, local: set[str], node: str) -> tuple[RayTask, ...]:
    """From three tables of the state API. `local`: addresses of the node that the processes are on. Pure."""
    places = {str(row.get("node_id")): str(row.get("node_ip")) for row in nodes}

    def where(row: Mapping[str, object] | None, name: str) -> Where | None:
        place = places.get(str(row.get("node_id")), "") if row else ""
        pid = row.get(name) if row else None
        return (node if place in local else place, pid) if isinstance(pid, int) and pid else None

    by_id = {str(row.get("task_id")): row for row in tasks}
    by_actor = {str(row.get("actor_id")): row for row in actors}
    found = []
    for row in tasks:
        caller = where(by_id.get(str(row.get("parent_task_id"))), "worker_pid")
        if caller is None or row.get("state") in _ENDED or row.get("type") == "DRIVER_TASK":
            continue
        actor = by_actor.get(str(row.get("actor_id")))
        state = str(
            (actor or row).get("state") if actor and actor.get("state") != "ALIVE" else row.get("state")
        )
        needs = (actor or row).get("required_resources")
        listed = (
            ", ".join(f"{value:g} {name}" for name, value in needs.items()) if isinstance(needs, dict) else ""
        )
        worker = where(actor, "pid") if actor else where(row, "worker_pid")
        found.append(RayTask(str(row.get("name")), caller, worker, state, listed))
    return tuple(found)


def with_tasks(processes: Iterable[Process], tasks: Sequence[RayTask]) -> list[Process]:
    """Threads that wait for Ray, with the names of the calls, and why one does not run. Pure."""

    def tell(process: Process, thread: ThreadLook) -> ThreadLook:
        mine = [one for one in tasks if one.caller == process.where]
        if thread.wait.kind != "ray" or not mine:
            return thread
        first = next((one for one in mine if one.worker is not None), mine[0])
        why = "" if first.worker else f", which is {first.state.lower().replace('_', ' ')}"
        why += f" (needs {first.needs})" if why and first.needs else ""
        return replace(thread, wait=replace(thread.wait, says=f"waits for {first.name} of Ray{why}"))

    return [replace(one, threads=tuple(tell(one, t) for t in one.threads)) for one in processes]


def ended_actors(entries: Iterable[ProcessEntry], node: str) -> list[Process]:
    """Actors of Ray that have ended without saying so: their logs are there, their processes are not. Ray waits for its
    workers itself, so no other trace is left."""
    folders = {match[1] for entry in entries if (match := _LOG_FOLDER.search(entry.title))}
    found = []
    for path in (path for folder in folders for path in Path(folder).glob("worker-*.out")):
        match = _WORKER_LOG.match(path.name)
        if match is None or os.path.exists(PROC / match[2]):
            continue
        name = re.search(r"^:actor_name:(\w+)", _tail(path, first=True), re.MULTILINE)
        core = "".join(_tail(path.parent / f"python-core-worker-{match[1]}_{match[2]}.log").splitlines()[-5:])
        if name is not None and not re.search(r"(?i)\bexit|shut|disconnect", core):
            found.append(
                Process(
                    int(match[2]), node=node, title=f"ray::{name[1]}", alive=False, ended="killed, or crashed"
                )
            )
    return found


def _tail(path: Path, first: bool = False) -> str:
    """The end of a log file, or its beginning."""
    try:
        with path.open("rb") as file:
            if not first:
                file.seek(max(0, path.stat().st_size - 4096))
            return file.read(4096).decode("utf-8", "replace")
    except OSError:
        return ""
