"""Runs the jobs of this folder, asks `allranks stacks` who does not move, and compares the answer with the table in README.md.

    python examples/roles/gallery.py [--only NAME] [--json] [--jobs N --limit SECONDS --output DIR]

A job says on standard output which process has which role, and when it can be looked at. All its processes are ended
afterwards, also those that have left its session: this process adopts them.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Until a job is ready, and until the command has answered.
START_LIMIT_S, ANSWER_LIMIT_S = 120.0, 120.0
#: After the ready line: nothing has used the processor for so long, or this long at most.
QUIET_S, SETTLE_S = 0.4, 3.0
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Truth:
    """One row of the table. A healthy job has no guilty roles."""

    name: str
    text: str
    guilty: tuple[str, ...]
    without_line: frozenset[str]  # dead, not Python, or in a library
    kind: str
    needs: tuple[str, ...]
    lines: frozenset[int]

    def missing(self) -> str:
        """What this job needs and does not find; "" for nothing."""
        if "root" in self.needs and (os.geteuid() != 0 or not shutil.which("nsenter")):
            return "root"
        return next((n for n in self.needs if n != "root" and importlib.util.find_spec(n) is None), "")


@dataclass(frozen=True)
class Outcome:
    """What the command said of one job, and what of it was right."""

    name: str
    state: str = ""
    sentence: str = ""
    guilty: tuple[str, ...] = ()
    process: bool = False  # every accused process is guilty, and at least one is accused
    role: bool = False  # its role is named
    line: bool = False
    skipped: str = ""
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        return self.process and self.role and self.line


@dataclass
class Running:
    """A job that is ready: its first process, and the process of each role."""

    pid: int
    roles: dict[str, int] = field(default_factory=dict)


def truth() -> dict[str, Truth]:
    """The table of README.md, by name."""
    found = {}
    for row in re.findall(r"^\| \[.*$", (HERE / "README.md").read_text(), re.M):
        _, link, text, guilty, kind, needs, _ = (cell.strip() for cell in row.split("|"))
        name = link[1 : link.index("]")]
        names = [] if guilty == "–" else guilty.split(" or ")
        code = (HERE / f"{name}.py").read_text().splitlines()
        found[name] = Truth(
            name,
            text,
            tuple(one.partition(" (")[0] for one in names),
            frozenset(one.partition(" (")[0] for one in names if "(" in one),
            kind,
            () if needs == "–" else tuple(needs.split(", ")),
            frozenset(number for number, line in enumerate(code, 1) if "# <- here" in line),
        )
    return found


@contextmanager
def running(case: Truth) -> Iterator[Running]:
    """The job, once it is ready; everything that it started has ended afterwards."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    others = frozenset(descendants(os.getpid()))
    with tempfile.TemporaryDirectory(prefix="roles-") as folder:
        words = [sys.executable, "-u", str(HERE / f"{case.name}.py")]
        env = {**os.environ, "TMPDIR": folder, "PYTHONUNBUFFERED": "1", "RAY_TMPDIR": folder}
        with open(f"{folder}/stderr", "wb") as errors:
            first = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=folder, start_new_session=True
            )
        job = Running(first.pid)
        try:
            if not _wait_ready(first, job):
                raise RuntimeError(
                    f"{case.name} did not get ready:\n" + Path(folder, "stderr").read_text()[-2000:]
                )
            _settle(first.pid)
            yield job
        finally:
            end_descendants(first, others, polite="root" in case.needs)
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


def _wait_ready(first: subprocess.Popen[bytes], job: Running) -> bool:
    """Reads the lines of the job until it says that it is ready; the others are read and dropped."""
    assert first.stdout is not None
    found = threading.Event()

    def read() -> None:
        assert first.stdout is not None
        with suppress(ValueError, OSError):
            for line in first.stdout:
                words = line.decode(errors="replace").split()
                if words[:1] == ["role"] and len(words) == 3:
                    job.roles[words[1]] = int(words[2])
                elif words == ["ready"]:
                    found.set()

    threading.Thread(target=read, daemon=True).start()
    deadline = time.monotonic() + START_LIMIT_S
    while not found.wait(0.05):
        if first.poll() is not None or time.monotonic() > deadline:
            return found.wait(1)
    return True


def _settle(pid: int) -> None:
    """Until the other processes have come to where they wait."""
    until, last, since = time.monotonic() + SETTLE_S, -1, time.monotonic()
    while time.monotonic() < until and time.monotonic() - since < QUIET_S:
        used = sum(_ticks(one) for one in [pid, *descendants(pid)])
        if used != last:
            last, since = used, time.monotonic()
        time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    except OSError:
        return []


def _ticks(pid: int) -> int:
    stat = _stat(pid)
    return int(stat[11]) + int(stat[12]) if stat else 0


def descendants(pid: int) -> list[int]:
    """Processes below this one, at any depth; zombies too."""
    parents = {int(one.name): _stat(int(one.name)) for one in Path("/proc").iterdir() if one.name.isdigit()}
    found, level = [], [pid]
    while level:
        level = [child for child, stat in parents.items() if stat and int(stat[1]) in level]
        found += level
    return found


def end_descendants(first: subprocess.Popen[bytes], others: frozenset[int], polite: bool) -> None:
    """Ends the job with all that it has started. `polite`: its first process tidies up after its children."""
    if polite:
        _kill(descendants(first.pid))
        with suppress(subprocess.TimeoutExpired):
            first.wait(20)
    deadline = time.monotonic() + 20
    while (left := set(descendants(os.getpid())) - others) and time.monotonic() < deadline:
        _kill(left)
        for pid in left - {first.pid}:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        first.poll()
        time.sleep(0.02)
    if first.stdout is not None:
        first.stdout.close()


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def ask(pid: int) -> dict[str, object]:
    """What `allranks stacks` says of the processes below this one."""
    words = [sys.executable, "-m", "allranks", "stacks", "--pid", str(pid), "--tree", "--json"]
    done = subprocess.run(words, capture_output=True, timeout=ANSWER_LIMIT_S, text=True)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {"state": "error", "sentence": (done.stderr or done.stdout).strip()[-300:], "guilty": []}


def judge(case: Truth, roles: dict[str, int], answer: dict[str, object]) -> Outcome:
    """Compares an answer with the truth. Pure."""
    accused = [dict(one) for one in answer.get("guilty") or ()]  # type: ignore[attr-defined]
    state, sentence = str(answer.get("state", "")), str(answer.get("sentence", ""))
    shown = tuple(
        f"{one.get('role')} {Path(str(one.get('file') or '')).name}:{one.get('line')}" for one in accused
    )
    if not case.guilty:
        calm = state in ("moving", "unclear") and not accused
        return Outcome(case.name, state, sentence, shown, calm, calm, calm)
    by_pid = {roles[name]: name for name in case.guilty if name in roles}
    named = [by_pid.get(int(str(one.get("pid") or 0)), "") for one in accused]
    process = state == "stuck" and bool(named) and all(named)
    role = process and any(
        _same_role(name, str(one.get("role"))) for name, one in zip(named, accused, strict=True)
    )
    line = process and any(
        name in case.without_line or _at(case, one) for name, one in zip(named, accused, strict=True)
    )
    return Outcome(case.name, state, sentence, shown, process, role, line)


def _same_role(name: str, said: str) -> bool:
    """A role's name without its number is one of the words that were said."""
    return re.sub(r"\d+$", "", name) in said.lower()


def _at(case: Truth, accused: dict[str, object]) -> bool:
    file = Path(str(accused.get("file") or "")).name
    return file == f"{case.name}.py" and accused.get("line") in case.lines


def run(case: Truth) -> Outcome:
    """One job from start to end."""
    if missing := case.missing():
        return Outcome(case.name, skipped=missing)
    with running(case) as job:
        began = time.monotonic()
        answer = ask(job.pid)
        took = time.monotonic() - began
    return Outcome(**{**asdict(judge(case, job.roles, answer)), "seconds": round(took, 1)})


def run_one(case: Truth) -> Outcome:
    """One job; a failure of its own is its outcome."""
    try:
        return run(case)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Outcome(case.name, "error", str(error))


def run_several(names: Iterable[str], jobs: int, limit_s: float) -> Iterator[Outcome]:
    """Several at a time: each adopts what its own job leaves, so each needs a process."""
    from concurrent.futures import ThreadPoolExecutor

    until = time.monotonic() + limit_s

    def one(name: str) -> Outcome:
        if time.monotonic() > until:
            return Outcome(name, skipped="time")
        words = [sys.executable, __file__, "--only", name, "--json"]
        said = subprocess.run(words, capture_output=True, text=True)
        try:
            return Outcome(**json.loads(said.stdout))
        except (ValueError, TypeError):
            return Outcome(name, "error", said.stderr[-300:])

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, names)


def show(outcome: Outcome) -> str:
    if outcome.skipped:
        return f"skip  {outcome.name:<22} needs {outcome.skipped}"
    missed = [n for n in ("process", "role", "line") if not getattr(outcome, n)]
    word = "ok   " if outcome.right else "MISS "
    said = f"{outcome.state}: {outcome.sentence}"
    return f"{word} {outcome.name:<22} {outcome.seconds:4.1f} s  {said}" + (
        f"  [{', '.join(missed)}]" if missed else ""
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="run this job only; repeatable")
    parser.add_argument("--json", action="store_true", help="one JSON line for each job")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="so many at a time, each in a process"
    )
    parser.add_argument(
        "--limit", type=float, default=3600.0, metavar="SECONDS", help="with --jobs: start none later"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="with --jobs: write roles.jsonl there")
    args = parser.parse_args()
    table = truth()
    if unknown := sorted(set(args.only or ()) - set(table)):
        parser.error(f"no job is called {', '.join(unknown)}")
    names = args.only or list(table)
    several = (
        run_several(names, args.jobs, args.limit)
        if args.jobs > 1
        else (run_one(table[name]) for name in names)
    )
    done = []
    try:
        for outcome in several:
            done.append(outcome)
            if args.output:
                args.output.mkdir(parents=True, exist_ok=True)
                with (args.output / "roles.jsonl").open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
            print(json.dumps(asdict(outcome)) if args.json else show(outcome), flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    judged = [one for one in done if not one.skipped]
    if not args.json:
        parts = (f"{sum(getattr(o, n) for o in judged)} {n}" for n in ("process", "role", "line"))
        print(f"{len(judged)} jobs, right: {', '.join(parts)}; {len(done) - len(judged)} skipped")
    return 0 if judged and all(one.right for one in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
