"""Whatever the input is like, the index holds exactly its tokens, or the error says where it is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allranks.cli import main
from allranks.compat.shapes import IndexBuilder
from allranks.elastic.index import BuildRequest, TokenIndexFile, build_index
from allranks.errors import DataLoadingError, InputError

from .corpus import plain_loop, texts, tokens_of, write_jsonl


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz", "parquet"])
def test_every_kind_of_file_gives_the_tokens_of_a_plain_loop(
    tmp_path: Path, tokenizer_file: Path, kind: str
) -> None:
    """Streamed and in batches, the result is that of the obvious loop."""
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
    request = BuildRequest((str(path),), str(output), str(tokenizer_file), "body")
    result = build_index(request)
    assert tokens_of(output) == plain_loop(tokenizer_file, documents)
    assert result.progress.documents == len(documents)


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


def test_end_of_text_tokens_are_appended_when_asked(tmp_path: Path, tokenizer_file: Path) -> None:
    """The tokenizer's own, or the number given; bytes have 256."""
    source = write_jsonl(tmp_path / "a.jsonl", ["ab", "c"])
    build_index(BuildRequest((str(source),), str(tmp_path / "1"), append_eos=True))
    assert tokens_of(tmp_path / "1") == [[97, 98, 256], [99, 256]]
    build_index(BuildRequest((str(source),), str(tmp_path / "2"), str(tokenizer_file), append_eos=True))
    assert [document[-1] for document in tokens_of(tmp_path / "2")] == [0, 0]
    build_index(BuildRequest((str(source),), str(tmp_path / "3"), eos_id=70_000))
    with TokenIndexFile(tmp_path / "3") as index:
        assert index.header.token_bytes == 4 and index.tokens.tolist() == [97, 98, 70_000, 99, 70_000]


def test_byte_order_marks_and_windows_line_ends_are_no_trouble(tmp_path: Path) -> None:
    """Files from elsewhere read the same, plain and compressed."""
    body = b'\xef\xbb\xbf{"text": "ab"}\r\n\r\n{"text": "c"}'
    (tmp_path / "a.jsonl").write_bytes(body)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(body))
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfab\r\nc")
    for name in ("a.jsonl", "b.jsonl.gz", "c.txt"):
        build_index(BuildRequest((str(tmp_path / name),), str(tmp_path / f"{name}.index")))
        assert tokens_of(tmp_path / f"{name}.index") == [[97, 98], [99]]


class _Words:
    """A tokenizer that is only an object."""

    def encode(self, text: str) -> list[int]:
        return list(range(len(text.split())))


def test_a_tokenizer_object_can_build_an_index(tmp_path: Path) -> None:
    """As the known harness does it."""
    source = write_jsonl(tmp_path / "a.jsonl", ["a b c", "d"])
    header = IndexBuilder(_Words(), entry_interval=10).build([str(source)], tmp_path / "i.bin")
    assert (header.num_files, header.total_tokens) == (1, 4)
    assert tokens_of(tmp_path / "i.bin") == [[0, 1, 2], [0]]


def test_a_wrong_key_names_the_keys_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the words people search for, with the option to give; for JSONL and Parquet."""
    source = write_jsonl(tmp_path / "a.jsonl", ["hello"], key="content")
    assert main(["index", "build", str(source), "-o", str(tmp_path / "i")]) == 2
    said = capsys.readouterr().err
    assert "KeyError: 'text'; the record has the keys ['id', 'content']" in said
    assert "--text-key content" in said
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataLoadingError, match=r"the record has the keys \['content'\]"):
        build_index(BuildRequest((str(tmp_path / "a.parquet"),), str(tmp_path / "i")))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "not valid JSON"),
        (b'{"text": null}', "has NoneType in 'text', not text"),
        (b"[1]", "is not a JSON object"),
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


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """An index must be of one version of its files."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(3000))

    def grow(now: Any) -> None:
        with source.open("a") as file:
            file.write('{"text": "more"}\n')

    with pytest.raises(DataLoadingError, match="changed while it was read"):
        build_index(BuildRequest((str(source),), str(tmp_path / "i")), grow)
    assert not (tmp_path / "i").exists()


def test_a_name_without_network_fails_fast_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after half a minute of retries."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(DataLoadingError, match="neither a file nor a name") as caught:
        build_index(BuildRequest((str(source),), str(tmp_path / "i"), "no-such-org/none"))
    assert "--tokenizer tokenizer.json" in caught.value.hint
    with pytest.raises(DataLoadingError, match="tokenizer file not found"):
        build_index(BuildRequest((str(source),), str(tmp_path / "i"), "missing/tokenizer.json"))
