"""`allranks mcp` with the client of the mcp package, over a real process."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from typing import Any

import pytest

import allranks

# not imported here: that takes seconds, in every worker
pytestmark = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed")

READING = {"jobs", "status", "diagnose", "stacks", "explain", "incidents", "goodput"}


def _client(*flags: str) -> Any:
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters

    return Client(StdioServerParameters(command=sys.executable, args=["-m", "allranks", "mcp", *flags]))


async def _tools(*flags: str) -> dict[str, bool | None]:
    async with _client(*flags) as client:
        found = await client.list_tools()
        return {t.name: t.annotations.read_only_hint if t.annotations else None for t in found.tools}


async def _ask(tool: str, arguments: dict[str, object]) -> dict[str, object]:
    async with _client() as client:
        answer = await client.call_tool(tool, arguments)
        assert answer.structured_content is not None
        return dict(answer.structured_content)


def test_tools_only_read_unless_actions_are_allowed() -> None:
    """An agent cannot evict a replica by default."""
    assert asyncio.run(_tools()) == dict.fromkeys(READING, True)
    assert set(asyncio.run(_tools("--allow-actions"))) == READING | {"evict", "readmit"}


def test_a_verdict_arrives_as_the_command_prints_it() -> None:
    """With the command that gives it, and what its exit code means."""
    found = asyncio.run(_ask("diagnose", {"paths": [str(allranks.examples.missing_rank)]}))
    assert found["outcome"] == "fault found" and found["error"] == ""
    assert found["result"]["verdict"]["ranks"] == [2]  # type: ignore[index]


def test_a_mistake_is_an_answer() -> None:
    """What cannot be read is said with the command's own words; a path that looks like a flag is a path."""
    found = asyncio.run(_ask("diagnose", {"paths": ["--html"]}))
    assert found["outcome"] == "could not run" and "--html" in str(found["error"])
