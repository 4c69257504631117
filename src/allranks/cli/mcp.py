"""`allranks mcp`: jobs, status, diagnose, stacks, incidents, logs and goodput as tools for an AI agent, over MCP on stdio.

Each tool runs an `allranks` command with `--json` in a separate process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.cli.parser import read_flags
from allranks.errors import require
from allranks.model.options import option

if TYPE_CHECKING:
    from mcp.server import MCPServer

LIMIT_S = 300.0  # per call
MEANING = {0: "nothing wrong", 1: "fault found", 2: "could not run"}


@dataclass(frozen=True)
class McpFlags:
    allow_actions: bool = option(False, "also offer tools that change a job: evict and readmit a replica")
    skill: bool = option(False, "print the skill file for agents that use the commands, and end")


@dataclass(frozen=True)
class ToolAnswer:
    """The result of a tool."""

    command: str
    outcome: str  # of its exit code: nothing wrong, fault found, could not run
    result: dict[str, object]
    error: str = ""


FLAGS = (McpFlags,)
EPILOG = "Read-only without --allow-actions. Needs: pip install 'allranks[mcp]'\n"


def main(args: argparse.Namespace) -> int:
    """Serves until the end of standard input."""
    flags = read_flags(McpFlags, args)
    if flags.skill:
        from importlib import resources

        print(resources.files("allranks.pages").joinpath("skill.md").read_text(), end="")
        return 0
    require("mcp", feature="allranks mcp", extra="mcp")
    make_server(allow_actions=flags.allow_actions).run("stdio")
    return 0


def call(*words: str) -> ToolAnswer:
    """Runs an `allranks` command and reads its JSON."""
    import subprocess

    shown = " ".join(["allranks", *words])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "allranks", *words],
            capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ToolAnswer(shown, "could not run", {}, f"no answer within {LIMIT_S:.0f} s")
    try:
        found = json.loads(done.stdout) if done.stdout.strip() else {}
    except ValueError:
        found = {"text": done.stdout}
    outcome = MEANING.get(done.returncode, f"exit code {done.returncode}")
    result = found if isinstance(found, dict) else {"rows": found}
    return ToolAnswer(shown, outcome, result, done.stderr.strip())


def make_server(*, allow_actions: bool = False) -> MCPServer:
    """A server with the tools, not started."""
    from mcp.server import MCPServer
    from mcp.types import ToolAnnotations

    from allranks import __version__

    server: MCPServer = MCPServer(
        "allranks",
        version=__version__,
        log_level="WARNING",
        instructions="Find out why a distributed PyTorch job hangs, crashed or is slow. Begin with jobs, then status; "
        "of a job that does not move: diagnose, then stacks. Every result begins with a sentence.",
    )
    for tool in (jobs, status, diagnose, stacks, explain, incidents, goodput):
        server.tool(annotations=ToolAnnotations(read_only_hint=True))(tool)
    actions: tuple[Callable[..., ToolAnswer], ...] = (evict, readmit) if allow_actions else ()
    for tool in actions:
        server.tool(annotations=ToolAnnotations(destructive_hint=True))(tool)
    return server


def jobs() -> ToolAnswer:
    """The jobs that were recorded on this node, the newest first, with the number of ranks and whether they run."""
    from allranks.api.functions import jobs as recorded

    rows = [
        {"name": j.name, "folder": str(j.folder), "ranks": j.ranks, "running": j.running} for j in recorded()
    ]
    return ToolAnswer("allranks dump --list", MEANING[0], {"jobs": rows})


def status(job: str) -> ToolAnswer:
    """The ranks of a job: step, what each does, who waits for whom, incidents; moving, stalled or hung."""
    return call("status", "--json", "--", job)


def diagnose(paths: list[str]) -> ToolAnswer:
    """Why a job hangs or crashed: guilty rank, line and cause. `paths`: a job's name, an incident, or files of dumps."""
    return call("diagnose", "--json", "--", *paths)


def stacks(job: str = "", pid: int = 0) -> ToolAnswer:
    """What every process of a job on this node does now, stuck or moving; of one job, or one process and its children."""
    return call("stacks", "--json", *(["--job", job] if job else []), *(["--pid", str(pid)] if pid else []))


def explain(logs: list[str]) -> ToolAnswer:
    """The first cause in logs of a job: files or folders."""
    return call("doctor", "explain", "--json", *logs)


def incidents(job: str) -> ToolAnswer:
    """The incidents of a job, one line each; the folder of one can be given to diagnose."""
    found = status(job)
    lines = found.result.get("incidents", [])
    return ToolAnswer(found.command, found.outcome, {"incidents": lines}, found.error)


def goodput(job: str) -> ToolAnswer:
    """Where the time of a job went: useful steps, waiting, incidents, saving, restarts."""
    return call("goodput", "--json", "--", job)


def evict(job: str, replica: str, reason: str) -> ToolAnswer:
    """Puts a replica out of a job that runs; the others continue without it."""
    return call("lighthouse", "evict", job, replica, "--reason", reason, "--json")


def readmit(job: str, replica: str) -> ToolAnswer:
    """Lets a replica that was evicted take part again."""
    return call("lighthouse", "readmit", job, replica, "--json")
