"""Compressed files, archives and remote folders."""

from __future__ import annotations

import gzip
import io
import pickle
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from allranks.errors import InputError
from allranks.load import LoadOptions, load_paths, loading, sources

from .dumps import dump, entry


def content(rank: int) -> bytes:
    return pickle.dumps(dump([entry(i, i + 1) for i in range(5 + rank)]), 2)


def make_tar(mode: str, members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{mode}") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def make_zip(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def compress_zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return bytes(zstandard.ZstdCompressor().compress(data))


def test_gzip_zstd_and_plain_files_mix(tmp_path: Path) -> None:
    """Whatever the name says, the bytes decide."""
    (tmp_path / "trace_0").write_bytes(content(0))
    (tmp_path / "trace_1.gz").write_bytes(gzip.compress(content(1)))
    (tmp_path / "trace_2").write_bytes(compress_zstd(content(2)))
    assert [len(trace.calls) for trace in load_paths([str(tmp_path)]).traces] == [5, 6, 7]


@pytest.mark.parametrize(("name", "mode"), [("all.tar", ""), ("all.tar.gz", "gz"), ("all.tgz", "gz")])
def test_a_tar_is_a_folder(tmp_path: Path, name: str, mode: str) -> None:
    """Members are named behind the archive's path."""
    members = {f"node{rank}/trace_{rank}": content(rank) for rank in range(3)} | {"readme.txt": b"hello"}
    (tmp_path / name).write_bytes(make_tar(mode, members))
    result = load_paths([str(tmp_path)])
    assert [trace.header.rank for trace in result.traces] == [0, 1, 2]
    assert result.traces[1].path == f"{name}/node1/trace_1"


def test_a_tar_in_zstd_is_a_folder_too(tmp_path: Path) -> None:
    """The layers are unwrapped one after the other."""
    (tmp_path / "all.tar.zst").write_bytes(compress_zstd(make_tar("", {"trace_4": content(4)})))
    assert [trace.header.rank for trace in load_paths([str(tmp_path)]).traces] == [4]


def test_a_zip_is_a_folder(tmp_path: Path) -> None:
    """As a laptop or an issue tracker packs it."""
    members = {f"dumps/trace_{rank}": content(rank) for rank in range(3)} | {
        "dumps/": b"",
        "readme.txt": b"hello",
    }
    (tmp_path / "dumps.zip").write_bytes(make_zip(members))
    result = load_paths([str(tmp_path / "dumps.zip")])
    assert [len(trace.calls) for trace in result.traces] == [5, 6, 7]
    assert result.traces[1].path.endswith("dumps.zip/dumps/trace_1")


def test_damaged_locked_and_swollen_zips_get_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short, with a password, and with members that come to more than their file could hold."""
    whole = make_zip({"trace_0": content(0), "trace_1": content(1)})
    locked = bytearray(whole)
    for sign, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[whole.index(sign) + at] |= 1
    monkeypatch.setattr(sources, "BOMB_BYTES", 4096)
    bomb = make_zip({"trace_0": content(0), "trace_1": bytes(1 << 22)})
    for name, data in {"cut": whole[: len(whole) // 2], "locked": bytes(locked), "bomb": bomb}.items():
        (tmp_path / f"{name}.zip").write_bytes(data)
    found = {
        name: load_paths([str(tmp_path / f"{name}.zip")], LoadOptions(allow_nothing=True))
        for name in ("cut", "locked", "bomb")
    }
    notes = {name: [note.note for note in result.files if note.note] for name, result in found.items()}
    assert notes["cut"] == ["archive truncated or damaged (BadZipFile)"]
    assert notes["locked"] == ["encrypted: give the files without a password"]
    assert "exceed the limit of" in notes["bomb"][0]
    ranks = {name: [trace.header.rank for trace in result.traces] for name, result in found.items()}
    assert ranks == {"cut": [], "locked": [1], "bomb": [0]}


def test_an_archive_cut_short_gives_its_whole_members(tmp_path: Path) -> None:
    """Disk full while packing."""
    data = make_tar("", {f"trace_{rank}": content(rank) for rank in range(4)})
    (tmp_path / "all.tar").write_bytes(data[: len(data) // 2])
    result = load_paths([str(tmp_path)])
    assert result.traces and len(result.traces) < 4
    assert any(note.status == "damaged" for note in result.files)


def test_a_gzip_cut_short_gives_its_readable_part(tmp_path: Path) -> None:
    """Both the stream and the pickle in it end early."""
    data = gzip.compress(
        pickle.dumps(dump([entry(i, i + 1, thread_id=str(i * 7919)) for i in range(300)]), 2)
    )
    (tmp_path / "trace_0.gz").write_bytes(data[: len(data) * 2 // 3])
    result = load_paths([str(tmp_path)])
    assert 0 < len(result.traces[0].calls) < 300
    assert result.files[0].status == "damaged"


def test_an_archive_of_very_many_foreign_files_is_left_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of headers of empty members would take a minute to list; an archive that has a dump is read to its end."""
    monkeypatch.setattr(loading, "MAX_FOREIGN", 10)
    foreign = {f"log_{i}": b"" for i in range(100)}
    (tmp_path / "all.tar").write_bytes(make_tar("", foreign))
    result = load_paths([str(tmp_path)], LoadOptions(allow_nothing=True))
    assert len(result.files) == 11
    assert [note.note for note in result.files if note.path == "all.tar"] == [
        "none of its first 10 members is a dump: the others were not read"
    ]
    (tmp_path / "all.tar").write_bytes(
        make_tar("", {"trace_0": content(0), **foreign, "trace_1": content(1)})
    )
    assert [trace.header.rank for trace in load_paths([str(tmp_path)]).traces] == [0, 1]


@pytest.mark.parametrize("name", ["all.tar", "all.zip"])
def test_an_archive_of_millions_of_files_is_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sources, "MAX_MEMBERS", 3)
    members = {f"trace_{rank}": content(rank) for rank in range(5)}
    if name.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for member, data in members.items():
                archive.writestr(member, data)
    else:
        (tmp_path / name).write_bytes(make_tar("", members))
    result = load_paths([str(tmp_path)])
    assert [trace.header.rank for trace in result.traces] == [0, 1, 2]
    assert [note.note for note in result.files if note.path == name] == [
        "more than 3 files: the others are skipped; unpack it, and give the folder with the dumps"
    ]


def test_member_names_are_never_written_to(tmp_path: Path) -> None:
    """../ in an archive is only text."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/all.tar").write_bytes(make_tar("", {"../../trace_0": content(0)}))
    load_paths([str(tmp_path / "in")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def _with_headers(headers: dict[str, str], count: int = 1) -> bytes:
    """A tar whose members say about themselves what the headers say."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for number in range(count):
            info = tarfile.TarInfo(f"trace_{number}")
            info.size, info.pax_headers = 10, headers
            archive.addfile(info, io.BytesIO(b"x" * 10))
    return out.getvalue()


def test_holes_of_sparse_files_are_bounded_all_together(tmp_path: Path) -> None:
    """A kilobyte may claim gigabytes of nothing."""
    hole = {"GNU.sparse.size": str(40 << 20), "GNU.sparse.map": "0,10"}
    (tmp_path / "x.tar").write_bytes(_with_headers(hole, 3))
    loaded = load_paths([str(tmp_path)], LoadOptions(allow_nothing=True))
    problems = [file.note for file in loaded.files]
    assert len([text for text in problems if "exceed the limit of" in text]) == 2, problems


@pytest.mark.parametrize("size", ["99999999999999999999", "-512"])
def test_a_size_that_cannot_be_is_a_damaged_archive(tmp_path: Path, size: str) -> None:
    (tmp_path / "x.tar").write_bytes(_with_headers({"size": size}))
    with pytest.raises(InputError, match="readable dump"):
        load_paths([str(tmp_path)])


def test_an_archive_that_leads_back_to_its_beginning_is_read_once(tmp_path: Path) -> None:
    """The size of its second member is negative: the next one would begin where the second did, without end."""
    first = make_tar("", {"trace_0": content(0)})
    end = 512 + -(-len(content(0)) // 512) * 512  # without what ends an archive
    (tmp_path / "x.tar").write_bytes(first[:end] + _with_headers({"size": "-1536"}))
    loaded = load_paths([str(tmp_path)])
    assert [trace.header.rank for trace in loaded.traces] == [0]
    assert "damaged" in " ".join(file.note for file in loaded.files)


def test_headers_of_headers_are_a_damaged_archive(tmp_path: Path) -> None:
    """Each says that the name of what follows is long; what follows is the next one."""
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 5
    (tmp_path / "x.tar").write_bytes((long_name.tobuf(tarfile.GNU_FORMAT) + b"name".ljust(512, b"\0")) * 3000)
    with pytest.raises(InputError, match="truncated or damaged"):
        load_paths([str(tmp_path)])


def test_a_url_of_another_kind_is_answered_with_those_that_are_read() -> None:
    """One sentence."""
    with pytest.raises(InputError, match="URLs with s3, s3a, gs, az"):
        load_paths(["ftp://host/dumps"])


def test_a_url_without_its_extra_says_what_to_install() -> None:
    """One sentence with the pip command."""
    code = (
        "import sys; sys.modules['obstore'] = None; sys.modules['obstore.store'] = None\n"
        "from allranks.load import load_paths\n"
        "from allranks.errors import MissingExtra\n"
        "try: load_paths(['s3://bucket/dumps'])\n"
        "except MissingExtra as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "pip install 'allranks[s3]'" in done.stdout, done.stderr


def test_a_store_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused connections end in one sentence, not in a traceback."""
    pytest.importorskip("obstore")
    for name, value in (("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), ("AWS_ACCESS_KEY_ID", "x"),
                        ("AWS_SECRET_ACCESS_KEY", "y"), ("AWS_REGION", "us-east-1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="s3://bucket/dumps"):
        load_paths(["s3://bucket/dumps"], LoadOptions())
