"""Writes dumps of a black box (a copy, or PyTorch 2.10 pickle or JSON), and dumps of torch's own flight recorder.

Runs in the rank or outside. Dumps are written atomically. Without a given path they are named dumps/REASON.aA.N/rank_R, with
one folder for the N-th dump of all ranks, which torchfrtrace and `allranks diagnose` can read.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from allranks.blackbox.header import Header, find_header, is_alive, read_header
from allranks.blackbox.reader import copy_box, read_trace
from allranks.errors import InputError
from allranks.model.files import write_atomically
from allranks.model.torch_dump import to_torch_json, to_torch_pickle
from allranks.recording.options import TORCH_ERRORS, RecorderOptions, from_environment

FORMATS = ("pickle", "json", "box")


def dump_bytes(box: Path, format: str, **content: bool) -> bytes:
    """The content of a dump in this format. `content`: options of `to_torch_dump`; a box is always copied completely."""
    if format == "box":
        return copy_box(box)
    if format == "json":
        return to_torch_json(read_trace(box), **content).encode()
    if format == "pickle":
        return to_torch_pickle(read_trace(box), **content)
    raise InputError(f"no dump format {format!r}: use one of {', '.join(FORMATS)}")


def dump_file(
    box: Path,
    path: str | os.PathLike[str] | None,
    format: str,
    options: RecorderOptions,
    reason: str,
    **content: bool,
) -> Path:
    """Writes a dump of `box` to `path`, by the prefix in the environment, or to a new name; returns its path."""
    data = dump_bytes(box, format, **content)
    # the script may have set the variable after the start of the recorder
    prefix = options.dump_prefix or from_environment().dump_prefix
    if path is not None:
        target = Path(path)
    elif prefix:
        target = _by_prefix(replace(options, dump_prefix=prefix), read_header(box).rank)
    else:
        target = _own_name(box, reason, format)
    write_atomically(target, data)
    return target


def dump_ended_ranks(boxes: Iterable[Path], env: Mapping[str, str]) -> list[Path]:
    """Writes the dumps requested by torch's variables (PREFIX + rank) for exited ranks that have not written theirs.

    Called by the process that started the ranks, with their environment. If one rank has failed, all exited ranks get a
    dump, because an analyser compares all ranks. A dump written by the rank itself is kept. Returns the written paths.
    """
    options = from_environment(env)
    if not options.dump_prefix or options.dump_whole_name or "timeout" not in options.dump_on:
        return []
    newest: dict[int, Header] = {}
    for header in filter(None, map(find_header, boxes)):
        if header.rank >= 0 and header.start_ns >= newest.get(header.rank, header).start_ns:
            newest[header.rank] = header
    if all(header.closed == "exit" for header in newest.values()):
        return []
    written = []
    for rank, header in sorted(newest.items()):
        target = _by_prefix(options, rank)
        if is_alive(header.pid, header.start_ticks) or header.path is None:
            continue
        if target.exists() and target.stat().st_mtime_ns >= header.start_ns:
            continue
        write_atomically(target, dump_bytes(header.path, "pickle"))
        written.append(target)
    return written


def _by_prefix(options: RecorderOptions, rank: int) -> Path:
    """The path as in torch: prefix + rank, or the prefix as the whole name."""
    if not options.dump_whole_name:
        return Path(f"{options.dump_prefix}{max(rank, 0)}")
    # read again, because the name may change between dumps
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCHCOMM_FR_DUMP_TEMP_FILE")
    return Path(next((os.environ[name] for name in names if os.environ.get(name)), options.dump_prefix))


def _own_name(box: Path, reason: str, format: str) -> Path:
    """The first free path for a dump."""
    header = read_header(box)
    ending = {"pickle": "", "json": ".json", "box": ".box"}[format]
    for number in range(1, 10_000):
        folder = box.parent / "dumps" / f"{reason}.a{header.attempt}.{number}"
        path = folder / f"rank_{max(header.rank, 0)}{ending}"
        if not path.exists():
            return path
    raise InputError(f"no free name for a dump under {box.parent / 'dumps'}")


def native_dumps(*, stacks: bool = True, only_active: bool = False) -> dict[str, bytes]:
    """The pickles of torch's own non-empty rings in this process, by name: "nccl", "fr", "fr-NAME"."""
    if "torch" not in sys.modules:
        return {}
    from allranks.recording.torch_internals import no_inductor, own_rings

    found: dict[str, bytes] = {}
    with no_inductor():
        for name, dump in own_rings().items():
            with contextlib.suppress(*TORCH_ERRORS):  # this ring is off or broken
                data = bytes(dump(True, stacks, only_active))
                if b"record_id" in data:  # the ring has at least one call
                    found[name] = data
    return found


def ask_through_pipe(stem: str, rank: int) -> bool:
    """Requests an NCCL dump from another rank (TORCH_NCCL_DEBUG_INFO_PIPE_FILE=stem); False if it does not listen.

    torch writes the dump later, to its own file name.
    """
    pipe = Path(f"{stem}{rank}.pipe")
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(fd, b"1")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
