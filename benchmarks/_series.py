"""Runs the cases of a series N at a time, within a limit, and writes one JSON line for each as it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT_BYTES = 100_000  # of a file of a failed case

Result = dict[str, object]  # with "right": bool


class OutOfTime(Exception):
    """The limit of the series was reached."""


@dataclass
class Series:
    """`run` starts processes that end with the series."""

    name: str
    output: Path
    jobs: int = 2
    limit_s: float = 540.0
    _began: float = field(default_factory=time.monotonic)
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left_s(self) -> float:
        return self._began + self.limit_s - time.monotonic()

    def start(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """`allranks WORDS` in its own session; its output goes to a file in the folder."""
        if self.left_s <= 0:
            raise OutOfTime
        here = os.environ
        paths = os.pathsep.join(filter(None, (str(ROOT / "src"), here.get("PYTHONPATH", ""))))
        known = {**here, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "ALLRANKS_HISTORY": "off"}
        known.setdefault("GLOO_SOCKET_IFNAME", "lo")
        log = tempfile.NamedTemporaryFile(  # noqa: SIM115
            "w", prefix=f"{words[0]}-", suffix=".log", dir=folder, delete=False
        )
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", "allranks", *words], cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True,
                env={**known, "ALLRANKS_DIR": str(folder / "boxes"), **(environment or {})}, start_new_session=True,
            )  # fmt: skip
        process.log = Path(log.name)  # type: ignore[attr-defined]
        with self._lock:
            self._running.add(process)
        return process

    def finish(self, process: subprocess.Popen[str], limit_s: float = 300.0) -> str:
        """What it printed, once it has ended; ended by force at the limit."""
        try:
            process.wait(timeout=max(0.1, min(limit_s, self.left_s)))
        except subprocess.TimeoutExpired:
            _end(process)
            if self.left_s <= 1:
                raise OutOfTime from None
            raise AssertionError(f"did not end within {limit_s:g} s") from None
        finally:
            with self._lock:
                self._running.discard(process)
        return self.log_of(process)

    def log_of(self, process: subprocess.Popen[str]) -> str:
        return str(process.log.read_text(errors="replace"))  # type: ignore[attr-defined]

    def run(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        limit_s: float = 300.0,
    ) -> str:
        process = self.start(words, folder, environment)
        text = self.finish(process, limit_s)
        if process.returncode not in (0, 1):
            raise AssertionError(f"allranks {words[0]} ended with {process.returncode}: {text[-1500:]}")
        return text

    def measure(self, cases: Mapping[str, Callable[[Path], Result]]) -> list[Result]:
        """Every case in a folder of its own; those that did not end in time are left out."""
        self.output.mkdir(parents=True, exist_ok=True)
        found: list[Result] = []
        with ThreadPoolExecutor(self.jobs) as pool:
            turns = [pool.submit(self._one, name, case) for name, case in cases.items()]
            for turn in as_completed(turns):
                if (result := turn.result()) is not None:
                    found.append(result)
                    line = json.dumps(result)
                    print(line if len(line) < 400 else f"{line[:400]}…", flush=True)
                    with (self.output / f"{self.name}.jsonl").open("a") as file:
                        file.write(line + "\n")
        right = sum(bool(one["right"]) for one in found)
        print(f"{self.name}: {right} of {len(found)} right, {len(cases) - len(found)} not run", flush=True)
        return found

    def _one(self, name: str, case: Callable[[Path], Result]) -> Result | None:
        if self.left_s <= 5:
            return None
        folder, begin = Path(tempfile.mkdtemp(prefix="goodput-")), time.monotonic()
        try:
            result = case(folder)
        except OutOfTime:
            return None
        except Exception as error:
            result = {"right": False, "error": f"{type(error).__name__}: {error}"[:3000]}
        finally:
            with self._lock:
                left = [one for one in self._running if one.poll() is None and str(folder) in str(one.log)]  # type: ignore[attr-defined]
            for process in left:
                _end(process)
        if not result["right"]:
            self._keep(name, folder)
        shutil.rmtree(folder, ignore_errors=True)
        return {"case": name, **result, "took_s": round(time.monotonic() - begin, 1)}

    def _keep(self, name: str, folder: Path) -> None:
        """Evidence of a failed case: logs, ledgers, black boxes."""
        kept = self.output / "failed" / "".join(c if c.isalnum() else "_" for c in name)
        kept.mkdir(parents=True, exist_ok=True)
        for path in [*folder.glob("*.log"), *folder.rglob("*.ledger"), *folder.rglob("*.slow.json")]:
            (kept / path.name).write_bytes(path.read_bytes()[-KEPT_BYTES:])
        for path in folder.rglob("*.box"):
            shutil.copy(path, kept)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
