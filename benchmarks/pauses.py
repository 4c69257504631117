"""Healthy jobs with one long pause, and jobs that hang in the same ways: which are called hung, when, and who is named.

    python benchmarks/pauses.py [--jobs N] [--limit SECONDS] [--output DIR] [--kinds a,b] [--only pause|hang]
        [--modes whole,replica] [--lengths 11,30,55,88] [--list]

Twenty kinds (benchmarks/_pause_job.py); half of them were not used to make the rules. A pause is right when no incident is
called a hang, nothing was done, and the job ends with code 0. A hang is right when the incident says hung and names the rank and
a line of the function that hangs. One JSON line per case in DIR/pauses.jsonl; the evidence of wrong cases in DIR/wrong.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from allranks.incidents.folder import read_incidents

JOB = Path(__file__).with_name("_pause_job.py")
LENGTHS = (11.0, 30.0, 55.0, 88.0)
ALARMS = ("hang", "death", "partition")
KNOWN = 10  # kinds that the rules were made with come first
START_S, HANG_S = 150.0, 330.0  # until the first step; until it must be called hung


@dataclass(frozen=True)
class Case:
    """One job."""

    kind: str
    mode: str  # whole or replica
    seconds: float  # 0: a hang
    marks: bool
    at_step: int
    held_out: bool

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.mode}-{self.seconds:g}" + ("" if self.marks else "-unmarked")

    @property
    def needs_s(self) -> float:
        return self.seconds + 30.0 if self.seconds else 100.0


def find_kinds() -> dict[str, range]:
    """Kind -> the lines of its function and of what it calls in the job."""
    tree = ast.parse(JOB.read_text())
    lines = {
        node.name: range(node.lineno, (node.end_lineno or 0) + 1)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    rows = [
        n
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in ("KNOWN", "HELD_OUT")
    ]
    names = [n.id for row in rows for n in ast.walk(row.value) if isinstance(n, ast.Name)]
    return {name.strip("_"): lines[name] for name in names}


def list_cases(kinds: list[str], lengths: list[float], modes: list[str]) -> list[Case]:
    """Each kind in each mode: two pauses (all lengths take part), and one hang; the long ones first."""
    found = []
    for number, kind in enumerate(find_kinds()):
        for mode in modes if kind in kinds or not kinds else ():
            other = number + (mode == "replica")
            marks, at_step = bool(other // 2 % 2) or mode == "replica", 3 if other % 5 == 4 else 30
            for half in range(0, len(lengths), 2):
                length = lengths[half : half + 2][other % len(lengths[half : half + 2])]
                found.append(Case(kind, mode, length, marks, at_step, number >= KNOWN))
            found.append(Case(kind, mode, 0.0, marks, at_step, number >= KNOWN))
    return sorted(found, key=lambda case: -case.needs_s)


def run_case(case: Case, number: int, output: Path, ends_s: float) -> dict[str, Any] | None:
    """One job, and what was said of it; None when no time is left for it."""
    if time.monotonic() + case.needs_s + 20 > ends_s:
        return None
    out = Path(tempfile.mkdtemp(prefix="allranks-pauses-"))
    guilty = number % 2
    mode = ["--replicas", "2"] if case.mode == "replica" else ["--standalone", "--nproc-per-node", "2"]
    command = [
        *(
            sys.executable,
            "-m",
            "allranks",
            "run",
            *mode,
            "--quiet",
            "--job",
            f"pauses-{os.getpid()}-{number}",
        ),
        *(
            "--incidents",
            str(out / "incidents"),
            "--log-dir",
            str(out / "logs"),
            str(JOB),
            str(out),
            case.kind,
        ),
        *(str(case.seconds), str(guilty), "marks" if case.marks else "no", str(case.at_step)),
    ]
    source = os.pathsep.join(filter(None, (str(JOB.parents[1] / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    with open(out / "log", "w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = wait(job, case, out, ends_s)
        finally:
            end(job)
    row = {
        **asdict(case),
        "name": case.name,
        "guilty": guilty,
        "exit": code,
        **judge(case, out, guilty, code),
    }
    with open(output / "pauses.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    if not row["right"]:
        keep(out, output / "wrong" / case.name)
    shutil.rmtree(out, ignore_errors=True)
    return row


def wait(job: subprocess.Popen[bytes], case: Case, out: Path, ends_s: float) -> int | None:
    """Until the job has ended, or its hang was called one; None when it was ended from here."""
    began = time.monotonic()
    while job.poll() is None and time.monotonic() < ends_s:
        seen_s = time.time() - float((out / "began").read_text() or "0") if (out / "began").exists() else 0.0
        if time.monotonic() - began - seen_s > START_S:
            return None
        if case.seconds and seen_s > case.seconds + 120:
            return None
        if not case.seconds and (seen_s > HANG_S or answered(out)):
            return None
        time.sleep(0.5)
    return job.returncode


def answered(out: Path) -> bool:
    """Whether a hang was named, and the policy has decided."""
    return any(story["kind"] == "hang" and story.get("action") for story in read_incidents(out / "incidents"))


def end(job: subprocess.Popen[bytes]) -> None:
    """Ends the job and what it has left behind in its session."""
    if job.poll() is None:
        job.send_signal(signal.SIGINT)
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    job.wait()


def judge(case: Case, out: Path, guilty: int, code: int | None) -> dict[str, Any]:
    """What the incidents say, against the truth."""
    stories = read_incidents(out / "incidents")
    began = float((out / "began").read_text()) if (out / "began").exists() else 0.0
    row: dict[str, Any] = {"fired": bool(began), "incidents": [story["kind"] for story in stories]}
    row["actions"] = [s["action"]["kind"] for s in stories if (s.get("action") or {}).get("done")]
    if case.seconds:
        alarms = [s for s in stories if s["kind"] in ALARMS]
        row["said"] = [(s.get("verdict") or {}).get("sentence") or s["reason"] for s in alarms]
        row["ended_with"] = [s["timeline"][-1]["text"] for s in stories]
        ended = (out / "ended").exists()
        return row | {"right": bool(began and ended and not alarms and not row["actions"] and code == 0)}
    hangs = [story for story in stories if story["kind"] == "hang"]
    if not hangs:
        return row | {"right": False, "hung_s": None}
    verdict = hangs[0].get("verdict") or {}
    moment = next(one for one in hangs[0]["timeline"] if one["name"] == "hung")
    where = verdict.get("where") or ""
    line_right = right_line(case, where) or right_line(case, verdict.get("sentence", ""))
    return row | {
        "hung_s": round(moment["at"] - began, 1),
        "noticed_s": round(hangs[0]["opened"] - began, 1),
        "by_time": moment["text"].startswith("no progress for"),
        "reason": moment["text"],
        "rank_right": verdict.get("ranks") == [guilty],
        "line_right": line_right,
        "where": where,
        "cause": verdict.get("cause"),
        "confidence": verdict.get("confidence"),
        "sentence": verdict.get("sentence"),
        "right": verdict.get("ranks") == [guilty] and line_right,
    }


def right_line(case: Case, text: str) -> bool:
    """Whether a line of the function that hangs, or of the module that it imports, is named."""
    named = [int(found) for found in re.findall(rf"{JOB.name}:(\d+)", text)]
    inner = {"loader": ("Slow",), "event_loop": ("reply",), "pool": ("tokenize",)}.get(case.kind, ())
    tree = ast.parse(JOB.read_text())
    lines = {n.name: range(n.lineno, (n.end_lineno or 0) + 1) for n in tree.body if hasattr(n, "name")}
    allowed = [find_kinds()[case.kind], *(lines[name] for name in inner)]
    return any(line in rows for line in named for rows in allowed) or "large_module.py:4" in text


def keep(out: Path, folder: Path) -> None:
    """The small part of the evidence."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").write_text((out / "log").read_text(errors="replace")[-20_000:])
    for path in out.glob("incidents/*/**/*"):
        if path.is_file() and path.suffix in (".json", ".box") and path.stat().st_size < 1 << 20:
            target = folder / path.relative_to(out)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def summarise(rows: list[dict[str, Any]]) -> None:
    """The promises, one line each."""
    for part, chosen in (("all", rows), ("held out", [row for row in rows if row["held_out"]])):
        pauses = [row for row in chosen if row["seconds"]]
        hangs = [row for row in chosen if not row["seconds"]]
        named = [row for row in hangs if row["hung_s"] is not None]
        print(f"{part}: pauses right {sum(r['right'] for r in pauses)} of {len(pauses)}")
        both = sum(bool(r.get("rank_right") and r.get("line_right")) for r in hangs)
        print(f"{part}: hangs named {len(named)} of {len(hangs)}, rank and line right {both}")
        for text, times in (
            ("certain", [r["hung_s"] for r in named if not r["by_time"]]),
            ("by time", [r["hung_s"] for r in named if r["by_time"]]),
        ):
            if times:
                print(
                    f"{part}: {text}: {len(times)}, median {statistics.median(times):.1f} s, worst {max(times):.1f} s"
                )


def main() -> int:
    """Runs the cases; exit 1 when one of them is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="side by side")
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="seconds; cases that need longer are left out"
    )
    parser.add_argument("--output", type=Path, default=Path("pauses"))
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--modes", default="whole,replica")
    parser.add_argument("--only", choices=["pause", "hang"])
    parser.add_argument("--lengths", default=",".join(f"{length:g}" for length in LENGTHS))
    parser.add_argument("--list", action="store_true", help="only print the cases")
    args = parser.parse_args()
    lengths = [float(length) for length in args.lengths.split(",")]
    cases = list_cases([k for k in args.kinds.split(",") if k], lengths, args.modes.split(","))
    cases = [case for case in cases if args.only is None or bool(case.seconds) == (args.only == "pause")]
    if args.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + args.limit
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [
            pool.submit(run_case, case, number, args.output, ends_s) for number, case in enumerate(cases)
        ]
        rows = []
        for future in futures:
            row = future.result()
            if row is not None:
                rows.append(row)
                print(json.dumps(row), flush=True)
    print(f"{len(rows)} of {len(cases)} cases run")
    summarise(rows)
    return int(any(not row["right"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
