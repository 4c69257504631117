"""A build that is killed, or has no room, or loses a worker, goes on where it was."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allranks.elastic.index import BuildRequest, TokenIndexFile, build_index
from allranks.elastic.index.sources import Block
from allranks.elastic.index.tokenize import find_tokenizer
from allranks.elastic.index.workers import Setup, WorkerPool
from allranks.errors import DataLoadingError, InputError
from proc import children_of, gone

from .corpus import build_command, plain_loop, texts, tokens_of, write_jsonl


def _journal_lines(output: Path) -> int:
    try:
        return output.with_name(output.name + ".partial.journal").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if not gone(pid)]


@pytest.mark.parametrize("packing", ["", ".gz"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_build_goes_on_where_it_was(
    tmp_path: Path, tokenizer_file: Path, packing: str, number: int
) -> None:
    """Killed after some blocks: no orphan, no index, and the next run ends with the same tokens."""
    source = write_jsonl(tmp_path / "big.jsonl", texts(16_000))
    if packing:
        packed = tmp_path / "big.jsonl.gz"
        packed.write_bytes(gzip.compress(source.read_bytes(), 1))
        source = packed
    output = tmp_path / "big.index"
    first = subprocess.Popen(
        build_command(source, output, tokenizer_file, "--workers", "2"), stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a shell's background
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while _journal_lines(output) < 4 and time.monotonic() < deadline:
        time.sleep(0.002)
    children = children_of(first.pid)
    first.send_signal(number)
    assert first.wait(timeout=30) == (-9 if number == signal.SIGKILL else 130)
    assert len(children) == 2
    while _alive(children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _alive(children) == []
    assert not output.exists()
    before = _journal_lines(output)
    assert before >= 4
    done = subprocess.run(
        build_command(source, output, tokenizer_file), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed"] is True
    whole = tmp_path / "whole.index"
    build_index(BuildRequest((str(source),), str(whole), str(tokenizer_file)))
    with TokenIndexFile(output) as a, TokenIndexFile(whole) as b:
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a._starts, b._starts)
        assert np.array_equal(a._offsets, b._offsets) and a.fingerprint == b.fingerprint


def test_a_resume_does_not_trust_bytes_that_are_not_what_was_written(tmp_path: Path) -> None:
    """After a power cut the journal may be ahead of the tokens: the CRC tells how far to go back."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(3000))

    class Stop(Exception):
        pass

    def stop(now: Any) -> None:
        if now.bytes_done > now.bytes_total // 2:
            raise Stop

    output = tmp_path / "a.index"
    with pytest.raises(Stop):
        build_index(BuildRequest((str(source),), str(output)), stop)
    partial = tmp_path / "a.index.partial"
    raw = bytearray(partial.read_bytes())
    assert len(raw) > 8192
    raw[len(raw) * 2 // 3] ^= 1
    partial.write_bytes(raw)
    assert build_index(BuildRequest((str(source),), str(output))).resumed
    assert tokens_of(output) == [list(text.encode()) for text in texts(3000)]


def test_a_changed_input_is_not_resumed(tmp_path: Path) -> None:
    """Another file behind the same name starts anew."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(3000))
    output = tmp_path / "a.index"

    def stop(now: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(BuildRequest((str(source),), str(output)), stop)
    write_jsonl(source, texts(2500, seed=9))
    assert not build_index(BuildRequest((str(source),), str(output))).resumed
    assert tokens_of(output) == [list(text.encode()) for text in texts(2500, seed=9)]


def test_a_killed_worker_is_reported_and_the_build_can_go_on(tmp_path: Path, tokenizer_file: Path) -> None:
    """The OOM killer takes a worker: one sentence, exit 2, nothing left running."""
    source = write_jsonl(tmp_path / "big.jsonl", texts(16_000))
    output = tmp_path / "big.index"
    build = subprocess.Popen(
        build_command(source, output, tokenizer_file, "--workers", "2"), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while _journal_lines(output) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    children = children_of(build.pid)
    os.kill(children[0], signal.SIGKILL)
    _, said = build.communicate(timeout=300)
    assert build.returncode == 2, said
    assert "a worker died (killed by signal 9)" in said and "fewer --workers" in said
    assert "Traceback" not in said and _alive(children) == []


def test_a_worker_that_dies_while_it_has_nothing_to_do_is_reported_too(tmp_path: Path) -> None:
    """There is one block for two workers; the other one is killed."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(10))
    block = Block(0, str(source), "jsonl", 0, source.stat().st_size, source.stat().st_size)
    with WorkerPool(Setup(find_tokenizer("bytes"), "text", False), 2) as pool:
        idle = pool._children[0]
        idle.kill()
        idle.wait()
        with pytest.raises(DataLoadingError, match=r"a worker died \(killed by signal 9\)"):
            list(pool.run([block]))


def test_a_full_disk_is_said_and_the_build_goes_on_when_there_is_room(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    """A limit on file size stands for the disk: exit 2 with the reason, then the same command resumes."""
    import resource

    source = write_jsonl(tmp_path / "a.jsonl", texts(6000))
    output = tmp_path / "a.index"
    command = build_command(source, output, tokenizer_file, "--workers", "0")
    limit = 120_000
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 2 and f"cannot write {output}: File too large" in done.stderr
    assert "Traceback" not in done.stderr and not output.exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["resumed"] is True
    assert tokens_of(output) == plain_loop(tokenizer_file, texts(6000))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_build_killed_again_and_again_ends_with_the_same_index(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    """Thirty kills at random moments; each run goes a little further."""
    import random

    source = write_jsonl(tmp_path / "big.jsonl", texts(40_000))
    output = tmp_path / "big.index"
    killed = 0
    for _ in range(30):
        build = subprocess.Popen(
            build_command(source, output, tokenizer_file, "--workers", "2"), stdout=subprocess.DEVNULL
        )
        try:
            build.wait(timeout=random.uniform(0.3, 1.5))
            break
        except subprocess.TimeoutExpired:
            build.kill()
            build.wait(timeout=30)
            killed += 1
    done = subprocess.run(
        build_command(source, output, tokenizer_file), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and killed > 0
    whole = tmp_path / "whole.index"
    build_index(BuildRequest((str(source),), str(whole), str(tokenizer_file)))
    with TokenIndexFile(output) as a, TokenIndexFile(whole) as b:
        assert a.fingerprint == b.fingerprint


def test_touched_files_are_the_same_input_and_changed_ones_are_not(tmp_path: Path) -> None:
    """A copy or a `touch` changes the time; a byte changes the content."""
    corpus = tmp_path / "a.jsonl"
    write_jsonl(corpus, texts(50))
    request = BuildRequest((str(corpus),), str(tmp_path / "a.index"), workers=0)
    assert build_index(request).fresh
    os.utime(corpus, (1, 1))
    assert not build_index(request).fresh
    corpus.write_bytes(corpus.read_bytes().replace(b"e", b"i", 1))
    with pytest.raises(InputError, match="built from something else"):
        build_index(request)
