"""An index as a file: no byte of it can change unseen, it is built with little memory, and it travels."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from allranks.cli import main
from allranks.elastic.index import BuildRequest, TokenIndexFile, build_index
from allranks.errors import DataLoadingError, InputError

from .corpus import small_index, texts, write_jsonl


def test_a_missing_index_names_the_build_command(tmp_path: Path) -> None:
    """The documented text, and what to type."""
    with pytest.raises(
        DataLoadingError, match=r"Failed to load data from '.*nope': Token index file not found"
    ) as e:
        TokenIndexFile(tmp_path / "nope")
    assert "allranks index build" in e.value.hint


def test_any_flipped_byte_or_truncation_of_a_small_index_is_noticed_on_open(tmp_path: Path) -> None:
    """Header, tokens, tables, checksums, provenance: no byte can change unseen."""
    path = small_index(tmp_path)
    good = path.read_bytes()
    places = {0, 9, 100, 4095, 4096, 5000, *range(0, len(good), 997), *range(len(good) - 20, len(good))}
    for place in sorted(places):
        bad = bytearray(good)
        bad[place] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(DataLoadingError, match=r"corrupted|bad magic"):
            TokenIndexFile(path)
    for size in (0, 3, 4095, 4096, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(DataLoadingError, match=r"truncated"):
            TokenIndexFile(path)
    path.write_bytes(good)
    assert list(TokenIndexFile(path).verify()) == []


def test_verify_finds_damage_that_opening_does_not_look_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of many blocks opening samples three; verify reads all and exits 1."""
    source = tmp_path / "big.txt"
    source.write_text(("x" * 1000 + "\n") * 4000)
    path = tmp_path / "big.index"
    build_index(BuildRequest((str(source),), str(path)))
    raw = bytearray(path.read_bytes())
    raw[(1 << 20) + 77] ^= 1
    path.write_bytes(raw)
    TokenIndexFile(path).close()
    assert main(["index", "verify", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damage"] == [{"block": 1, "offset": 1 << 20}]


def test_an_index_travels_to_other_processes_by_name(tmp_path: Path) -> None:
    """Pickled for a spawned worker, it is opened again there."""
    index = TokenIndexFile(small_index(tmp_path))
    again = pickle.loads(pickle.dumps(index))
    assert np.array_equal(index.tokens, again.tokens)
    assert len(pickle.dumps(index)) < 500


def test_building_needs_little_memory_and_no_torch(tmp_path: Path) -> None:
    """A 40 MB stream is built with far less resident memory than its size."""
    line = b'{"text": "' + b"lorem ipsum " * 200 + b'"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * (40_000_000 // len(line)), 1))
    code = (
        "import resource, sys\n"
        "from allranks.elastic.index import BuildRequest, build_index\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "build_index(BuildRequest((sys.argv[1],), sys.argv[2]))\n"
        "assert 'torch' not in sys.modules\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl.gz"), str(tmp_path / "i")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30_000  # kB, of 80 MB of tokens
    assert TokenIndexFile(tmp_path / "i").total_tokens > 39_000_000


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A file where a folder should be."""
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        build_index(BuildRequest((str(source),), str(tmp_path / "file" / "i")))


def _run_hint(hint: str, **words: str) -> int:
    """Runs the commands of a hint, with the user's own names for the words in capitals; the last exit status."""
    status = 0
    for command in re.findall(r": (allranks index .*)$", hint, re.MULTILINE):
        for word, name in words.items():
            command = command.replace(word, name)
        status = main(shlex.split(command)[1:])
    return status


def test_the_commands_of_the_hints_build_and_verify_an_index(tmp_path: Path) -> None:
    """A missing index is built, a damaged one is shown and built again, by the very commands of the errors."""
    source, index = write_jsonl(tmp_path / "data.jsonl", texts(50)), tmp_path / "data.index"
    with pytest.raises(DataLoadingError) as missing:
        TokenIndexFile(index)
    names = {"FILES": str(source), "INDEX": str(index), "tokenizer.json": "bytes"}
    assert _run_hint(missing.value.hint, **names) == 0
    data = bytearray(index.read_bytes())
    data[5000] ^= 1
    index.write_bytes(data)
    with pytest.raises(DataLoadingError) as damaged:
        TokenIndexFile(index)
    assert _run_hint(damaged.value.hint.splitlines()[0], **names) == 1
    assert _run_hint(damaged.value.hint.splitlines()[1], **names) == 0
    TokenIndexFile(index).close()


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    """Neither an index nor a draft of one; a full disk names the file."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(3000))

    def stop(now: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"cannot write .*a\.index: No space left on device"):
        build_index(BuildRequest((str(source),), str(tmp_path / "a.index")), stop)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
