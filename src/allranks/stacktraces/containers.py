"""Which processes of this machine belong to a container that is known by its name: docker, podman, enroot (pyxis).

Asks the container's own tool for the first process, then takes every process in the same mount namespace. Runs beside
the ranks, outside of the container; inside of one the ranks are found without it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable

from allranks.errors import InputError
from allranks.stacktraces.debuggers import ToolRun, run_tool

LIMIT_S = 20.0
#: Pyxis gives the enroot containers of a Slurm job this name before the user's.
PYXIS = "pyxis_"


def container_pids(
    name: str, pids: Iterable[int], run: Callable[[list[str], float], ToolRun] = run_tool
) -> set[int]:
    """Those of `pids` that run in the container `name`; InputError when no tool knows a running one of that name."""
    problems = []
    for tool, find in (("docker", _docker), ("podman", _docker), ("enroot", _enroot)):
        if shutil.which(tool) is None:
            continue
        first, problem = find(tool, name, run)
        if first:
            wanted = _mount_namespace(first)
            return {pid for pid in pids if wanted and _mount_namespace(pid) == wanted}
        problems.append(f"{tool}: {problem}")
    raise InputError(
        f"no running container named {name!r}: {'; '.join(problems) or 'neither docker, podman nor enroot is on the PATH'}",
        hint="names are those of `docker ps`, `podman ps` or `enroot list -f` (with pyxis: srun --container-name NAME); "
        "or run allranks inside of the container: docker exec NAME allranks stacks, srun --container-name=NAME --overlap allranks stacks",
    )


Found = tuple[int, str]  # the first process of the container, 0: none; what the tool said


def _docker(tool: str, name: str, run: Callable[[list[str], float], ToolRun]) -> Found:
    answer = run([tool, "inspect", "--format", "{{.State.Pid}}", name], LIMIT_S)
    text = answer.output.strip()
    return (int(text), "") if text.isdigit() and text != "0" else (0, answer.problem or "it does not run")


def _enroot(tool: str, name: str, run: Callable[[list[str], float], ToolRun]) -> Found:
    """`enroot list --fancy` has a line NAME PID STATE STARTED TIME MNTNS USERNS COMMAND for each process that runs."""
    answer = run([tool, "list", "--fancy"], LIMIT_S)
    for words in (line.split() for line in answer.output.splitlines()):
        called = words[0] if words else ""
        pyxis = called.startswith(PYXIS) and called.removeprefix(PYXIS).rpartition("_")[2] == name
        if len(words) > 1 and words[1].isdigit() and (called in (name, f"{PYXIS}{name}") or pyxis):
            return int(words[1]), ""
    return 0, answer.problem or "it is not in the list"


def _mount_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""
