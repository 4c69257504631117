"""Runs the scripts of this folder as real jobs, and writes a page with the verdict on each: `make gallery`.

    python examples/hangs/gallery.py [--output FOLDER] [NAME ...]

All ranks are forked from this process, which has imported torch once: a job takes a second or two. The truth is the table
in README.md. The tests use `truth`, `run_hang` and `is_right`.
"""

from __future__ import annotations

import argparse
import faulthandler
import html
import importlib
import os
import re
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.drill.ranks import Ranks
from allranks.load import LoadOptions, load_paths
from allranks.model.diagnosis import Diagnosis, RankNow
from allranks.model.trace import RankTrace

HERE = Path(__file__).resolve().parent
#: Nothing has moved for so long while every rank sleeps, or while one computes: the job hangs, or has ended.
ASLEEP_S, BUSY_S, SILENT_S = 1.2, 3.0, 12.0
#: Frames of a call's stack: torch's sharding puts twenty of its own between a call and the user's line.
STACK_DEPTH = 40


@dataclass(frozen=True)
class Truth:
    """One row of the table. A healthy job has no causes; one whose evidence names nobody has no ranks."""

    name: str
    text: str
    processes: int
    causes: tuple[str, ...]
    ranks: tuple[int, ...]
    lines: tuple[int, ...]  # those marked in the script

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}.py"


@dataclass(frozen=True)
class Outcome:
    """What became of one job: its traces, what was seen of its ranks, and the verdict."""

    truth: Truth
    traces: tuple[RankTrace, ...]
    diagnosis: Diagnosis
    now_ns: int
    seen: tuple[RankNow, ...] = ()


def truth() -> dict[str, Truth]:
    """The table of README.md, by name."""
    found = {}
    for line in re.findall(r"^\| \[.*$", (HERE / "README.md").read_text(), re.M):
        _, link, text, processes, causes, ranks, _ = (cell.strip() for cell in line.split("|"))
        name = link[1 : link.index("]")]
        code = (HERE / f"{name}.py").read_text().splitlines()
        found[name] = Truth(
            name,
            text,
            int(processes),
            tuple(causes.split(" or ")) if causes != "–" else (),
            tuple(map(int, ranks.split(","))) if ranks != "–" else (),
            tuple(number for number, line in enumerate(code, 1) if "# <- here" in line),
        )
    return found


def preload() -> None:
    """Imports what the scripts need, before ranks are forked."""
    for name in (
        "_dynamo",
        "distributed.checkpoint",
        "distributed.fsdp",
        "distributed.tensor",
        "nn.parallel",
    ):
        importlib.import_module(f"torch.{name}")


def _rank(rank: int, world: int, script: str) -> None:
    """A rank: records, runs the script, and ends as a process of its own would."""
    import allranks

    said = os.open(_said_by(Path(os.environ["ALLRANKS_DIR"]), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()  # gloo aborts some of these jobs, as it should
    recorder = allranks.record()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())  # the recorder's, which notes how the rank ended
        os._exit(1)
    recorder.close("exit")


@contextmanager
def hanging(case: Truth, folder: Path, limit_s: float = 60.0) -> Iterator[Ranks]:
    """The ranks of a job, once nothing moves any more."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {"ALLRANKS_DIR": str(folder), "ALLRANKS_STACK_DEPTH": str(STACK_DEPTH)}
    ranks = Ranks(_rank, case.processes, args=(str(case.script),), backend=None, env=env)
    with ranks:
        deadline, last, moved, busy, used = time.monotonic() + limit_s, None, 0.0, 0.0, 0.0
        while time.monotonic() < deadline:
            now = _position(folder, case.processes)
            states = [_state(pid) for pid in ranks.pids.values()]
            runs = any(_is_running(pid) for pid in ranks.pids.values())
            if now != last:
                last, moved, used = now, time.monotonic(), _cpu_s(ranks)
            busy = time.monotonic() if runs else busy
            quiet = time.monotonic() - max(moved, busy) > ASLEEP_S
            spins = _cpu_s(ranks) - used > BUSY_S or time.monotonic() - moved > SILENT_S
            if now is not None and (set(states) <= {"Z"} or quiet or spins):
                break
            time.sleep(0.05)
        yield ranks


def _said_by(folder: Path, rank: int) -> Path:
    return folder.with_name(f"{folder.name}.{rank}.log")


def said(folder: Path) -> str:
    """What the ranks of a job have written."""
    return "\n".join(
        path.read_text(errors="replace") for path in sorted(folder.parent.glob(f"{folder.name}.*.log"))
    )


def _position(folder: Path, processes: int) -> tuple[object, ...] | None:
    """How far every rank has come; None until all have begun."""
    loaded = load_paths([str(folder)], LoadOptions(allow_nothing=True))
    if len(loaded.traces) < processes:
        return None
    return tuple((len(t.calls), t.calls["state"].sum(), t.progress) for t in loaded.traces)


def run_hang(case: Truth, folder: Path, keep: Path | None = None) -> Outcome:
    """Runs one script until it hangs, and judges it from its black boxes. `keep`: copies them there as they are then."""
    with hanging(case, folder) as ranks:
        deadline = time.monotonic() + 15.0
        while True:
            gone = [
                RankNow(rank, "gone", "", f"its process {pid} is gone")
                for rank, pid in ranks.pids.items()
                if _state(pid) == "Z"
            ]
            over = len(gone) == case.processes
            loaded, now_ns = load_paths([str(folder)]), 0 if over else time.time_ns()
            seen = [] if over else gone
            options = DiagnoseOptions(now_ns=now_ns, ended=over)
            result = diagnose(loaded.traces, loaded.files, stacks=seen, options=options)
            silent = result.verdict is not None and result.verdict.cause == "no_progress"
            if result.status == "fault" or silent or over or time.monotonic() > deadline:
                if keep is not None:
                    shutil.copytree(folder, keep)
                return Outcome(case, tuple(loaded.traces), result, now_ns, tuple(seen))
            time.sleep(0.1)


def _state(pid: int) -> str:
    """The state of a process as the kernel names it: R running, S asleep, T stopped, Z ended."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]  # it is ours, and not reaped yet


def _cpu_s(ranks: Ranks) -> float:
    """What its processes have used: a busy machine may give them nothing for seconds."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split() for pid in ranks.pids.values()]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def _is_running(pid: int) -> bool:
    """Whether any of its threads has work to do: on a busy machine the one that sends may wait for its turn."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has just ended
            if stat.read_text().rsplit(") ", 1)[1][0] in "RD":
                return True
    return False


def is_right(outcome: Outcome) -> tuple[bool, bool, bool]:
    """Whether rank, cause and line of the verdict are those of the table."""
    case, verdict = outcome.truth, outcome.diagnosis.verdict
    if not case.causes:
        return (outcome.diagnosis.status == "ok",) * 3
    if verdict is None:
        return False, False, False
    named = re.match(rf"{case.name}\.py:(\d+)", verdict.where)
    line = int(named[1]) in case.lines if named else not verdict.where and not case.lines
    return verdict.ranks == case.ranks, verdict.cause in case.causes, line


def main() -> int:
    preload()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts to run (default: all)")
    parser.add_argument(
        "--output", type=Path, default=Path("gallery"), metavar="FOLDER", help="default: gallery"
    )
    args = parser.parse_args()
    from allranks.report import html as page

    table = truth()
    args.output.mkdir(parents=True, exist_ok=True)
    entries, wrong = [], 0
    for name in args.names or table:
        with tempfile.TemporaryDirectory(prefix="allranks-gallery-") as folder:
            outcome = run_hang(table[name], Path(folder, name))
        right, verdict = is_right(outcome), outcome.diagnosis.verdict
        wrong += not all(right)
        (args.output / f"{name}.html").write_text(
            "".join(page.render(outcome.diagnosis, list(outcome.traces)))
        )
        sentence = verdict.sentence if verdict else "nothing wrong"
        missed = [word for word, held in zip(("rank", "cause", "line"), right, strict=True) if not held]
        print(
            f"{name}: {sentence}" + (f"  [differs from the table: {', '.join(missed)}]" if missed else ""),
            flush=True,
        )
        entries.append(
            f'<tr><td><a href="{name}.html">{name}</a><td>{html.escape(table[name].text)}<td>{html.escape(sentence)}'
        )
    title = "<!doctype html><meta charset=utf-8><title>Gallery of hangs</title><h1>Gallery of hangs</h1>"
    (args.output / "index.html").write_text(title + "<table>" + "\n".join(entries) + "</table>\n")
    print(
        f"{len(entries)} jobs, {wrong} verdicts that differ from the table; pages in {args.output}/index.html"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
