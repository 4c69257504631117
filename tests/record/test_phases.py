"""Phases of a rank in its black box: all are there, also short ones; nothing of it can fail a program."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from allranks.blackbox import phases
from allranks.blackbox.file_writer import Box
from allranks.blackbox.header import HEADER_BYTES, read_regular
from allranks.blackbox.phases import SLOTS, during, read_phases
from allranks.cli.slow import read_marks


def opened(folder: Path) -> Box:
    box = Box(folder / "a.box", 16, 4096)
    box.open()
    phases.attach(box)
    return box


def read(box: Box) -> list[tuple[str, bool]]:
    return [
        (mark.name, mark.end_ns >= mark.begin_ns)
        for mark in read_phases(read_regular(box.path, HEADER_BYTES))
    ]


def test_phases_are_read_from_the_header_page_the_newest_last(tmp_path: Path) -> None:
    box = opened(tmp_path)
    try:
        with during("saving"), during("a name that is longer than its place"):
            assert read(box) == [("saving", False), ("a name that is l", False)]
        assert read(box) == [("saving", True), ("a name that is l", True)]
        for number in range(2 * SLOTS):
            with during(f"p{number}"):
                pass
        assert [name for name, _ in read(box)] == [f"p{number}" for number in range(SLOTS, 2 * SLOTS)]
    finally:
        phases.attach(None)
        box.close()


def test_a_phase_outside_a_recording_or_in_a_child_does_nothing(tmp_path: Path) -> None:
    with during("saving"):
        pass
    box = opened(tmp_path)
    try:
        child = os.fork()
        if child == 0:
            with during("in the child"):
                os._exit(0)
        os.waitpid(child, 0)
        assert read(box) == []
        box.close()
        with during("after the end"):
            pass  # the box is closed: no error
    finally:
        phases.attach(None)


def test_files_that_hold_no_phases_give_none(tmp_path: Path) -> None:
    assert read_phases(b"") == ()
    assert read_phases(bytes(HEADER_BYTES)) == ()
    assert read_phases(b"\xff" * HEADER_BYTES) == ()


def test_a_long_garbage_collection_is_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "GC_NS", 1)
    box = opened(tmp_path)
    try:
        gc.collect(0)
        assert read(box) == []  # a young one is not looked at
        gc.collect()
        assert read(box)[-1] == ("gc", True)
        with phases._Marks.lock:  # as if it came while a mark is written: it does not wait
            before = len(read(box))
            gc.collect()
        assert len(read(box)) == before
    finally:
        phases.attach(None)
        box.close()
    assert phases._collected not in gc.callbacks


def test_the_command_finds_the_marks_of_a_folder(tmp_path: Path) -> None:
    """`allranks slow` names saves and garbage collection by them."""
    box = opened(tmp_path)
    try:
        with during("saving"):
            pass
        (found,) = read_marks([tmp_path]).values()
        assert [mark.name for mark in found] == ["saving"]
        assert read_marks([box.path]) and read_marks([tmp_path / "none"]) == {}
    finally:
        phases.attach(None)
        box.close()
