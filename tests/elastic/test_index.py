"""The token index holds exactly the tokens of the input, whatever its kind, and survives whatever happens to it."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.cli import main
from allranks.elastic.index import BuildRequest, IndexBuilder, TokenIndexFile, build_index
from allranks.elastic.index.sources import cut, read_documents, read_source
from allranks.errors import DataLoadingError, InputError

from .corpus import texts, write_jsonl

pytestmark = pytest.mark.timeout(300)  # for hanging only: machines are shared


def _tokens(index: Path) -> list[list[int]]:
    with TokenIndexFile(index) as opened:
        return [opened.document(i).tolist() for i in range(opened.num_documents)]


def _plain_loop(tokenizer_file: Path, documents: list[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return [tokenizer.encode(text).ids for text in documents]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "parquet"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_kind_of_file_gives_the_tokens_of_a_plain_loop(
    tmp_path: Path, tokenizer_file: Path, kind: str, workers: int
) -> None:
    """Streamed, cut and in parallel, the result is that of the obvious loop."""
    documents = [text for text in texts(400) if text]
    path = tmp_path / f"data.{kind}"
    lines = "".join((json.dumps({"body": t}) if "jsonl" in kind else t) + "\n" for t in documents).encode()
    if kind.endswith(".gz"):
        path.write_bytes(gzip.compress(lines[:5000]) + gzip.compress(lines[5000:]))  # two members
    elif kind.endswith(".zst"):
        import zstandard

        path.write_bytes(zstandard.compress(lines[:5000]) + zstandard.compress(lines[5000:]))  # two frames
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"id": range(len(documents)), "body": documents}), path, row_group_size=77)
    else:
        path.write_bytes(lines)
    output = tmp_path / "out.index"
    request = BuildRequest((str(path),), str(output), str(tokenizer_file), "body", workers=workers)
    result = build_index(request)
    assert _tokens(output) == _plain_loop(tokenizer_file, documents)
    assert result.progress.documents == len(documents)
    assert list(tmp_path.glob("*.partial*")) == []


def test_several_files_keep_their_order_and_places(tmp_path: Path) -> None:
    """find_position leads back to the file and the byte where the document stands."""
    parts = [["ab", "", "cde"], [], ["xyz" * 30, "q"]]
    files = [write_jsonl(tmp_path / f"{i}.jsonl", part) for i, part in enumerate(parts)]
    output = tmp_path / "out.index"
    build_index(BuildRequest(tuple(map(str, files)), str(output)))
    with TokenIndexFile(output) as index:
        assert (index.num_files, index.num_documents, index.total_tokens) == (3, 5, 5 + 91)
        assert bytes(index.tokens.astype(np.uint8).tolist()) == b"abcde" + b"xyz" * 30 + b"q"
        file, place, first = index.find_position(4)
        assert (file, first) == (0, 2)
        assert files[file].read_bytes()[place:].startswith(b'{"id": 2,')
        assert index.find_position(5 + 90)[:1] == (2,)
        assert index.find_position(0) == (0, 0, 0)
        for wrong in (-1, 96, 10_000):
            with pytest.raises(ValueError, match="exceeds total tokens"):
                index.find_position(wrong)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(alphabet='ab\\"\r\u2028é', max_size=9), max_size=25), st.integers(1, 60), st.booleans()
)
def test_cutting_anywhere_loses_no_document_and_doubles_none(
    documents: list[str], block: int, newline: bool
) -> None:
    """Blocks of any size, also smaller than a line, with or without a last newline."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.jsonl"
        body = "\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in documents)
        path.write_text(body + ("\n" if newline else ""), newline="")
        source = read_source(str(path))
        found = [read_documents(b, "text", False) for b in cut(source, 0, block)]
        assert [text for part in found for text in part.texts] == documents
        packed = Path(folder) / "x.jsonl.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        found = [read_documents(b, "text", False) for b in cut(read_source(str(packed)), 0, block)]
        assert [text for part in found for text in part.texts] == documents


def test_end_of_text_tokens_are_appended_when_asked(tmp_path: Path, tokenizer_file: Path) -> None:
    """The tokenizer's own, or the number given; bytes have 256."""
    source = write_jsonl(tmp_path / "a.jsonl", ["ab", "c"])
    build_index(BuildRequest((str(source),), str(tmp_path / "1"), append_eos=True))
    assert _tokens(tmp_path / "1") == [[97, 98, 256], [99, 256]]
    build_index(BuildRequest((str(source),), str(tmp_path / "2"), str(tokenizer_file), append_eos=True))
    assert [document[-1] for document in _tokens(tmp_path / "2")] == [0, 0]
    build_index(BuildRequest((str(source),), str(tmp_path / "3"), eos_id=70_000))
    with TokenIndexFile(tmp_path / "3") as index:
        assert index.header.token_bytes == 4 and index.tokens.tolist() == [97, 98, 70_000, 99, 70_000]


def test_a_wrong_key_names_the_keys_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the words people search for, with the option to give; for JSONL and Parquet."""
    source = write_jsonl(tmp_path / "a.jsonl", ["hello"], key="content")
    assert main(["index", "build", str(source), "-o", str(tmp_path / "i"), "--workers", "1"]) == 2
    said = capsys.readouterr().err
    assert "KeyError: 'text'; the keys seen are ['id', 'content']" in said
    assert "--text-key content" in said
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataLoadingError, match=r"the keys seen are \['content'\]"):
        build_index(BuildRequest((str(tmp_path / "a.parquet"),), str(tmp_path / "i")))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "not valid JSON"),
        (b'{"text": null}', "has NoneType in 'text', not text"),
        (b"[1]", "is no JSON object"),
        (b'{"text": "\xff"}', "byte 14"),
    ],
)
def test_bad_records_are_named_or_left_out(tmp_path: Path, line: bytes, words: str) -> None:
    """Fails with the place by default; with skip_bad they are counted."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(DataLoadingError, match="byte 14") as caught:
        build_index(BuildRequest((str(source),), str(tmp_path / "i")))
    assert words in str(caught.value) and "--skip-bad" in caught.value.hint
    result = build_index(BuildRequest((str(source),), str(tmp_path / "i"), skip_bad=True))
    assert (result.progress.documents, result.progress.skipped) == (2, 1)


@pytest.mark.parametrize("name", ["no.jsonl", "a.csv", "broken.jsonl.gz", "broken.parquet"])
def test_unusable_files_are_refused_in_words(tmp_path: Path, name: str) -> None:
    """Missing, unknown, broken: an error of ours that names the file."""
    path = tmp_path / name
    if name.startswith("broken"):
        path.write_bytes(b"\x1f\x8b\x08\0garbage")
    elif name == "a.csv":
        path.write_text("a,b")
    with pytest.raises((DataLoadingError, InputError), match=name.split(".", maxsplit=1)[0]):
        build_index(BuildRequest((str(path),), str(tmp_path / "i")))


def test_a_truncated_gzip_is_not_taken_for_a_short_one(tmp_path: Path) -> None:
    """Half a download must not become half a dataset."""
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % i for i in range(50_000)))
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataLoadingError, match="cannot decompress after"):
        build_index(BuildRequest((str(tmp_path / "a.jsonl.gz"),), str(tmp_path / "i")))
    assert not (tmp_path / "i").exists()


def test_a_name_without_network_fails_fast_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after half a minute of retries."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(DataLoadingError, match="cannot be reached") as caught:
        build_index(BuildRequest((str(source),), str(tmp_path / "i"), "no-such-org/none"))
    assert "--tokenizer tokenizer.json" in caught.value.hint
    with pytest.raises(DataLoadingError, match="tokenizer file not found"):
        build_index(BuildRequest((str(source),), str(tmp_path / "i"), "missing/tokenizer.json"))


def _index(tmp_path: Path, count: int = 50) -> Path:
    source = write_jsonl(tmp_path / "data.jsonl", texts(count))
    build_index(BuildRequest((str(source),), str(tmp_path / "data.index")))
    return tmp_path / "data.index"


def test_a_missing_index_names_the_build_command(tmp_path: Path) -> None:
    """The documented text, and what to type."""
    with pytest.raises(
        DataLoadingError, match=r"Failed to load data from '.*nope': Token index file not found"
    ) as e:
        TokenIndexFile(tmp_path / "nope")
    assert "allranks index build" in e.value.hint


def test_any_flipped_byte_or_truncation_of_a_small_index_is_noticed_on_open(tmp_path: Path) -> None:
    """Header, tokens, tables, checksums, provenance: no byte can change unseen."""
    path = _index(tmp_path)
    good = path.read_bytes()
    places = {0, 9, 100, 4095, 4096, 5000, len(good) - 1, *range(4096, len(good), 997)}
    for place in sorted(places):
        bad = bytearray(good)
        bad[place] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(DataLoadingError, match=r"corrupted|bad magic|version"):
            TokenIndexFile(path)
    for size in (0, 3, 4095, 4096, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(DataLoadingError, match=r"truncated|bad magic"):
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
    raw[4096 + (1 << 20) + 77] ^= 1
    path.write_bytes(raw)
    TokenIndexFile(path).close()
    assert main(["index", "verify", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["damage"] == [{"block": 1, "offset": 4096 + (1 << 20)}]


def _command(source: Path, output: Path, tokenizer: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "allranks", "index", "build", str(source), "-o", str(output),
        "--tokenizer", str(tokenizer), "--json", *more,
    ]  # fmt: skip


def _journal_lines(output: Path) -> int:
    try:
        return output.with_name(output.name + ".partial.journal").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def _children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


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
        _command(source, output, tokenizer_file, "--workers", "2"), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while _journal_lines(output) < 4 and time.monotonic() < deadline:
        time.sleep(0.002)
    children = _children_of(first.pid)
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
        _command(source, output, tokenizer_file), capture_output=True, text=True, timeout=100
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
    assert _tokens(output) == [list(text.encode()) for text in texts(3000)]


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
    assert _tokens(output) == [list(text.encode()) for text in texts(2500, seed=9)]


def test_a_killed_worker_is_reported_and_the_build_can_go_on(tmp_path: Path, tokenizer_file: Path) -> None:
    """The OOM killer takes a worker: one sentence, exit 2, nothing left running."""
    source = write_jsonl(tmp_path / "big.jsonl", texts(16_000))
    output = tmp_path / "big.index"
    build = subprocess.Popen(
        _command(source, output, tokenizer_file, "--workers", "2"), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while _journal_lines(output) < 3 and time.monotonic() < deadline:
        time.sleep(0.002)
    children = _children_of(build.pid)
    os.kill(children[0], signal.SIGKILL)
    _, said = build.communicate(timeout=60)
    assert build.returncode == 2
    assert "a worker died (killed by signal 9)" in said and "fewer --workers" in said
    assert "Traceback" not in said and _alive(children) == []


def test_an_existing_index_is_kept_or_said_to_be_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same request is up to date; another one needs --force."""
    path = _index(tmp_path)
    source = tmp_path / "data.jsonl"
    assert main(["index", "build", str(source), "-o", str(path)]) == 0
    assert "up to date" in capsys.readouterr().out
    assert main(["index", "build", str(source), "-o", str(path), "--append-eos"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["index", "build", str(source), "-o", str(path), "--append-eos", "--force"]) == 0


def test_two_builds_of_one_index_do_not_mix(tmp_path: Path) -> None:
    """The second says that another is writing."""
    from allranks.elastic.index.writer import IndexWriter

    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    writer = IndexWriter(tmp_path / "i", 2, {})
    writer.open()
    try:
        with pytest.raises(InputError, match="another build is writing"):
            build_index(BuildRequest((str(source),), str(tmp_path / "i")))
    finally:
        writer.close()


@pytest.mark.parametrize("style", ["new", "readme", "guide"])
def test_all_documented_command_lines_work(tmp_path: Path, style: str) -> None:
    """`index build`, and both older spellings through `python -m`."""
    write_jsonl(tmp_path / "one.jsonl", ["ab"])
    write_jsonl(tmp_path / "two.jsonl", ["cd"])
    module = [sys.executable, "-m", "allranks.elastic.index"]
    command = {
        "new": [sys.executable, "-m", "allranks", "index", "build", "one.jsonl", "two.jsonl", "-o", "i.bin"],
        "readme": [*module, "*.jsonl", "-o", "i.bin"],
        "guide": [
            *module,
            "--data-files",
            "one.jsonl",
            "two.jsonl",
            "--tokenizer",
            "bytes",
            "--output",
            "i.bin",
        ],
    }[style]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Wrote i.bin: 4 tokens of 2 documents" in done.stdout
    assert done.stderr == ""
    assert _tokens(tmp_path / "i.bin") == [[97, 98], [99, 100]]


def test_show_tells_where_an_index_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Provenance: files with sizes, tokenizer with digest, key, version, time."""
    path = _index(tmp_path)
    assert main(["index", "show", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["files"][0]["size"] == (tmp_path / "data.jsonl").stat().st_size
    assert facts["tokenizer"]["name"] == "bytes" and facts["text_key"] == "text" and facts["created"]


class _Words:
    """A tokenizer that is only an object."""

    def encode(self, text: str) -> list[int]:
        return list(range(len(text.split())))


def test_a_tokenizer_object_can_build_an_index(tmp_path: Path) -> None:
    """As the known harness does it."""
    source = write_jsonl(tmp_path / "a.jsonl", ["a b c", "d"])
    header = IndexBuilder(_Words(), entry_interval=10).build([str(source)], tmp_path / "i.bin")
    assert (header.num_files, header.total_tokens) == (1, 4)
    assert _tokens(tmp_path / "i.bin") == [[0, 1, 2], [0]]


def test_an_index_travels_to_other_processes_by_name(tmp_path: Path) -> None:
    """Pickled for a spawned worker, it is opened again there."""
    index = TokenIndexFile(_index(tmp_path))
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
        "build_index(BuildRequest((sys.argv[1],), sys.argv[2], workers=0))\n"
        "assert 'torch' not in sys.modules\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl.gz"), str(tmp_path / "i")],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30_000  # kB, of 80 MB of tokens
    assert TokenIndexFile(tmp_path / "i").total_tokens > 39_000_000


def test_a_full_disk_is_said_and_the_build_goes_on_when_there_is_room(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    """A limit on file size stands for the disk: exit 2 with the reason, then the same command resumes."""
    import resource

    source = write_jsonl(tmp_path / "a.jsonl", texts(6000))
    output = tmp_path / "a.index"
    command = _command(source, output, tokenizer_file, "--workers", "0")
    limit = 120_000
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 2 and f"cannot write {output}: File too large" in done.stderr
    assert "Traceback" not in done.stderr and not output.exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and json.loads(done.stdout)["resumed"] is True
    assert _tokens(output) == _plain_loop(tokenizer_file, texts(6000))


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A file where a folder should be."""
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        build_index(BuildRequest((str(source),), str(tmp_path / "file" / "i")))


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """An index must be of one version of its files."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(3000))

    def grow(now: Any) -> None:
        with source.open("a") as file:
            file.write("{}\n")

    with pytest.raises(DataLoadingError, match="changed while it was read"):
        build_index(BuildRequest((str(source),), str(tmp_path / "i")), grow)
    assert not (tmp_path / "i").exists()


def test_byte_order_marks_and_windows_line_ends_are_no_trouble(tmp_path: Path) -> None:
    """Files from elsewhere read the same, plain and compressed."""
    body = b'\xef\xbb\xbf{"text": "ab"}\r\n\r\n{"text": "c"}'
    (tmp_path / "a.jsonl").write_bytes(body)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(body))
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfab\r\nc")
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt"):
        build_index(BuildRequest((str(tmp_path / name),), str(tmp_path / f"{name}.index")))
        assert _tokens(tmp_path / f"{name}.index") == [[97, 98], [99]]


def test_a_terminal_gets_a_progress_bar_and_a_pipe_does_not(tmp_path: Path, tokenizer_file: Path) -> None:
    """On a real pseudo-terminal: share, speed, time left."""
    import pty

    source = write_jsonl(tmp_path / "a.jsonl", texts(2000))
    master, slave = pty.openpty()
    done = subprocess.run(
        _command(source, tmp_path / "a.index", tokenizer_file, "--workers", "0"), stdout=subprocess.PIPE, stderr=slave, timeout=60
    )  # fmt: skip
    os.close(slave)
    said = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        said += chunk
    os.close(master)
    assert done.returncode == 0
    assert b"100%" in said and b"MB/s" in said and b"s left" in said


def test_a_parallel_build_of_bytes_equals_one_process(tmp_path: Path) -> None:
    """More workers than blocks, and as many as there are."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(5000))
    results = []
    for workers in (0, 1, 3, 70):
        output = tmp_path / f"{workers}.index"
        build_index(BuildRequest((str(source),), str(output), workers=workers if workers < 70 else 6))
        with TokenIndexFile(output) as index:
            results.append(index.fingerprint)
    assert len(set(results)) == 1


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
            _command(source, output, tokenizer_file, "--workers", "2"), stdout=subprocess.DEVNULL
        )
        try:
            build.wait(timeout=random.uniform(0.3, 1.5))
            break
        except subprocess.TimeoutExpired:
            build.kill()
            build.wait(timeout=30)
            killed += 1
    done = subprocess.run(
        _command(source, output, tokenizer_file), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and killed > 0
    whole = tmp_path / "whole.index"
    build_index(BuildRequest((str(source),), str(whole), str(tokenizer_file)))
    with TokenIndexFile(output) as a, TokenIndexFile(whole) as b:
        assert a.fingerprint == b.fingerprint
