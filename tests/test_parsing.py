"""Types that several threads use for the first time at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.model.parsing import without_secrets

SOURCE = Path(__file__).parents[1] / "src" / "allranks"

#: Every round makes two new classes; msgspec by itself crashes the process within a few of them.
RACE = """
import dataclasses, sys, threading
from allranks.model.parsing import convert, from_json
sys.setswitchinterval(1e-6)
for _ in range(150):
    inner = dataclasses.make_dataclass("Inner", [("a", int), ("b", str, ""), ("c", dict[str, list[int]], dataclasses.field(default_factory=dict))])
    outer = dataclasses.make_dataclass("Outer", [("x", inner), ("y", list[inner]), ("z", dict[str, inner])])
    ready, found = threading.Barrier(4), []
    def use(number):
        ready.wait()
        value = {"x": {"a": 1, "b": "q", "c": {"k": [1]}}, "y": [{"a": 2}], "z": {"k": {"a": 3}}}
        text = '{"x": {"a": 1, "b": "q", "c": {"k": [1]}}, "y": [{"a": 2}], "z": {"k": {"a": 3}}}'
        found.append(convert(value, outer) if number % 2 else from_json(text, outer))
    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    [one.start() for one in threads], [one.join() for one in threads]
    assert len(found) == 4 and all(one.z["k"].a == 3 for one in found)
print("whole")
"""


def test_the_first_use_of_a_type_by_several_threads_is_safe() -> None:
    """Two deaths at once were judged by two threads, and `allranks run` died of it."""
    done = subprocess.run(
        [sys.executable, "-c", RACE], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-2000:]


def test_typed_values_are_read_through_one_module() -> None:
    """Anything else would have the race again; type checks while a module is imported, and child processes, have one thread."""
    alone = {
        "model/parsing.py",
        "lighthouse/connection.py",
        "elastic/index/workers.py",
        "elastic/index/sources.py",
    }
    pattern = re.compile(r"msgspec\.(convert\(|(json|msgpack)\.(Decoder\(|decode\(.*type=))")
    found = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if pattern.search(path.read_text())
    }
    assert found <= alone


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("train.py --api-key abc --lr 1", "train.py --api-key *** --lr 1"),
        ("train.py\0--hf_token\0abc\0--lr\0001", "train.py\0--hf_token\0***\0--lr\0001"),
        ("train.py --password=abc wandb.api_key=def x=1", "train.py --password=*** wandb.api_key=*** x=1"),
        ("run --webhook https://me:abc@host/x y@z", "run --webhook *** y@z"),
        ("wget https://me:a@b:c@host/x https://abc@host/y", "wget https://me:***@host/x https://***@host/y"),
        (f"wget https://me:{'abc' * 400}@host/x", "wget https://me:***@host/x"),
        (
            "HTTPError: 403 for url: https://b.example/k?X-Amz-Credential=AK&X-Amz-Signature=abc&X-Amz-Date=1",
            "HTTPError: 403 for url: https://b.example/k?X-Amz-Credential=***&X-Amz-Signature=***&X-Amz-Date=1",
        ),
        ("https://b.example/c?sv=1&sig=abc&se=2", "https://b.example/c?sv=1&sig=***&se=2"),
        ("api_key = 'abc'  # of {'token': \"def\"}", "api_key = '***'  # of {'token': \"***\"}"),
        ('{"a":"http://host:80","mail":"me@host"}', '{"a":"http://host:80","mail":"me@host"}'),
        ("write 'key: value' lines", "write 'key: value' lines"),
        ("curl -H 'Authorization: Bearer abc' x", "curl -H 'Authorization: Bearer ***' x"),
        ("POST https://hooks.slack.com/services/T/B/abc failed", "POST https://hooks.slack.com/*** failed"),
        ("POST https://discord.com/api/webhooks/1/abc", "POST https://discord.com/api/webhooks/***"),
        ("run --token --lr 1", "run --token --lr 1"),
        ("run --tokenizer gpt2 --max-tokens 5 keys.py", "run --tokenizer gpt2 --max-tokens 5 keys.py"),
        ("http://host:80/a b", "http://host:80/a b"),
    ],
)
def test_a_command_line_goes_into_evidence_without_its_secrets(line: str, kept: str) -> None:
    """Users of the machine see them in ps, but evidence leaves the machine."""
    assert without_secrets(line) == kept


def test_times_in_names_are_no_ranks() -> None:
    """As torch's debug server names its dumps."""
    from allranks.model.parsing import ranks_of_names

    assert ranks_of_names(["stacks_20261118_004611.txt", "stacks_20261118_004711.txt"]) == {}
    names = ["dump_20261118_004611_0", "dump_20261118_004612_1", "2026-11-18T00:46:11/trace_7"]
    assert ranks_of_names(names) == dict(zip(names, (0, 1, 7), strict=True))
