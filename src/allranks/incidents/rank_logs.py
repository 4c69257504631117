"""Finds the output files of ranks that `allranks run` writes, and reads their last lines without secrets."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from allranks.blackbox.header import find_header
from allranks.incidents.job_overview import read_job
from allranks.model.parsing import printable, without_secrets

LINES, MAX_BYTES, MAX_LINE = 20, 64 << 10, 400


def find_logs(folder: Path, rank: int, box: str | Path = "") -> list[Path]:
    """The newest output files of a rank; its black box `box` has its local rank."""
    logs = Path(str(read_job(folder).get("logs") or folder / "logs"))
    if (own := logs / f"rank{rank}.log").is_file():
        return [own]
    header = find_header(box) if box else None
    local = header.local_rank if header is not None and header.local_rank >= 0 else rank
    newest = max(logs.glob(f"*/attempt_*/{local}"), key=lambda path: path.stat().st_mtime, default=None)
    both = (newest / "stdout.log", newest / "stderr.log") if newest is not None else ()
    return [path for path in both if path.is_file()]


def tail(paths: Iterable[Path], lines: int = LINES) -> tuple[str, ...]:
    """The last lines of these files, the newest last."""
    ends = [line for path in paths for line in read_end(path, MAX_BYTES).splitlines()[-lines:]]
    return tuple(printable(without_secrets(line), MAX_LINE) for line in ends[-2 * lines :])


def read_end(path: str | Path, most_bytes: int) -> str:
    """The end of a text file; "" when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
            return file.read(most_bytes).decode("utf-8", "replace")
    except OSError:
        return ""
