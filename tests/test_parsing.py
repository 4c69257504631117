"""Types that several threads use for the first time at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.model.files import replacing, write_atomically
from allranks.model.formatting import byte_size, duration, rank_list, ranks_text
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
        "elastic/index/__init__.py",
        "ledger/file.py",  # its decoder is made while the module is imported
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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (8e-5, "80 µs"), (0.0123, "12.3 ms"), (0.34, "340 ms"), (0.9996, "1.0 s"), (5.44, "5.4 s"),
        (9.96, "10 s"), (119.4, "119 s"), (120.0, "2 min"), (312.0, "5 min 12 s"), (11400.0, "3 h 10 min"),
    ],
)  # fmt: skip
def test_durations_read_as_people_write_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ranks_and_sizes_read_as_people_write_them() -> None:
    assert [ranks_text(ranks) for ranks in ((), (5,), (2, 0), (9, *range(8)))] == [
        "no rank", "rank 5", "ranks 0, 2", "ranks 0-7, 9",
    ]  # fmt: skip
    assert rank_list(range(0, 100, 2), limit=2) == "0, 2, … (50 in all)"
    assert [byte_size(size) for size in (0, 999, 1500, 25e9, 3e15)] == [
        "0 B", "999 B", "1.5 kB", "25.0 GB", "3000.0 TB",
    ]  # fmt: skip


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    write_atomically(path, "first")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    with pytest.raises(RuntimeError, match="half"), replacing(path) as draft:
        draft.write_text("sec")
        raise RuntimeError("half")
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path]
