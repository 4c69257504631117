"""A new user's walk with nothing but the task pages: their files are written, their commands run, their claims hold.

Comments in the pages, which readers do not see, say what happens to the block that follows:
`<!-- file: NAME -->` write it; `<!-- run: TEXT -->` run its `$` lines in one shell per page, the last one until its output
shows TEXT; `<!-- dumps: FOLDER -->` the reader's `dumps/` is this folder of the repository.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.docs.test_docs import _shown_commands
from tests.ports import held_port

ROOT = Path(__file__).parent.parent.parent
TASKS = ROOT / "docs" / "tasks"
STEP = re.compile(r"<!-- (file|run|dumps)(?:: (.*?))? -->(?:\n```\w+[^\n]*\n(.*?)```)?", re.S)
WITHIN_S = 120.0
JOBS = {"my-job", "survive"}  # the names in the pages


@cache
def _alone() -> list[str]:
    """Processes and shared memory of its own: `allranks stacks` must not find the ranks of other tests."""
    words = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words += ["sh", "-c", 'mount -t tmpfs walk /dev/shm && exec "$@"', "sh"]
    done = subprocess.run([*words, "true"], capture_output=True, check=False)
    return [] if done.returncode else words  # not every container allows it


class Shell:
    """A bash that a user types into: background jobs and variables stay from one line to the next."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        home = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NO_COLOR": "1",
            "COLUMNS": "160",
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ALLRANKS_")}
        self.process = subprocess.Popen(
            [*_alone(), "bash", "-m"], cwd=folder, text=True, start_new_session=True, env={**clean, **home, **variables},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, line: str) -> tuple[int, str]:
        """Exit code and output of one line; what a background job prints goes to a file."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if line.endswith("&") and ">" not in line:
            line = f"{line[:-1]} > background.log 2>&1 &"
        self.process.stdin.write(f"{line}\n__code=$?; echo; echo END $__code\n")
        self.process.stdin.flush()
        lines = []
        for text in self.process.stdout:
            if text.startswith("END "):
                return int(text.split()[1]), "".join(lines)
            lines.append(text)
        raise AssertionError(f"the shell ended at {line!r}: {''.join(lines)}")


@contextmanager
def typing_in(folder: Path, **variables: str) -> Iterator[Shell]:
    """A shell; its background jobs end with it."""
    shell = Shell(folder, **variables)
    try:
        yield shell
    finally:
        assert shell.process.stdin is not None and shell.process.stdout is not None
        shell.process.stdin.write("kill -TERM $(jobs -p) 2>/dev/null; wait\nexit\n")
        shell.process.stdin.close()
        try:
            shell.process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(shell.process.pid, signal.SIGKILL)
            shell.process.wait()
        shell.process.stdout.close()


def walk(page: str, shell: Shell) -> int:
    """Does what a page says, from top to bottom; returns how many commands were run."""
    count, seen = 0, ""
    for kind, what, block in STEP.findall((TASKS / page).read_text()):
        if kind == "dumps":
            (shell.folder / "dumps").symlink_to(ROOT / what)
        elif kind == "file":
            path = shell.folder / what
            path.parent.mkdir(exist_ok=True)
            path.write_text(block)
        else:
            lines = [
                line[2:].partition("  #")[0].strip() for line in block.splitlines() if line.startswith("$ ")
            ]
            count += len(lines)
            for number, line in enumerate(lines, 1):
                seen = _until(shell, line.replace("PID", _pid(seen)), what if number == len(lines) else "")
    return count


def _until(shell: Shell, line: str, text: str) -> str:
    """Types a line until its output shows what the page promises. Exit code 1 is a finding, 2 an error."""
    deadline, first = time.monotonic() + WITHIN_S, ""
    while True:
        code, output = shell.run(line)
        first = first or output
        if text in output and (text or code < 2):
            return output
        time.sleep(0.3)  # the next try
        if time.monotonic() > deadline:
            log = shell.folder / "background.log"
            pytest.fail(
                f"`{line}` gave {code}, without {text!r}:\n{first}\n{output}\n{log.read_text() if log.exists() else ''}"
            )


def _pid(output: str) -> str:
    """The pid of the last rank in a table of `allranks status`."""
    found = re.findall(r"^ +\d+ +(\d+) ", output, re.M)
    return found[-1] if found else "PID"


@pytest.mark.everything
@pytest.mark.parametrize(
    ("page", "commands"), [("hang_now.md", 12), ("dumps.md", 10), ("survive_kill.md", 9)]
)
def test_a_new_user_gets_what_the_page_promises(page: str, commands: int, tmp_path: Path) -> None:
    """Every command that the page shows, copied."""
    try:
        with typing_in(tmp_path) as shell:
            assert walk(page, shell) == commands
    finally:
        for job in JOBS & set(re.findall(r"--job (\S+)", (TASKS / page).read_text())):
            shutil.rmtree(f"/dev/shm/allranks-{os.getuid()}/{job}", ignore_errors=True)
    for name in ("stacks.html", "report.html"):
        if name in (TASKS / page).read_text():
            assert (tmp_path / name).read_text().endswith("</html>")


@pytest.mark.everything
def test_a_new_user_saves_to_s3(tmp_path: Path, s3: Any) -> None:
    """Against a real server: saved, restored by the next run, listed, verified, copied, exported, pruned."""
    from allranks.checkpoint.stores import StoreSpec
    from allranks.checkpoint.stores.object_store import ObjectBlobs
    from checkpoint.s3server import KEY, SECRET

    # the reader has a bucket; this server makes one when something is put into it
    ObjectBlobs(StoreSpec("s3://my-bucket/other", s3.options())).put("file", [memoryview(b"x")], 1)
    key = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_REGION": "us-east-1",
    }
    with typing_in(tmp_path, **key) as shell:
        assert walk("checkpoints.md", shell) == 15


WALKED = ("hang_now.md", "dumps.md", "survive_kill.md", "checkpoints.md")


def test_every_command_of_the_walked_pages_is_run() -> None:
    """Except those that install, name the reader's own keys, or are marked as shown only (they are parsed)."""
    for page in map(TASKS.joinpath, WALKED):
        blocks = re.findall(r"(<!-- [^\n]*-->\n)?```console\n(.*?)```", page.read_text(), re.S)
        unmarked = [text for mark, text in blocks if not mark.startswith(("<!-- run", "<!-- shown"))]
        assert all("$ pip install" in text or "$ export" in text for text in unmarked), (page.name, unmarked)


ABOUT_A_JOB = re.compile(
    r"allranks (stacks|dump( |$)|status|top|page|watch --pid|lighthouse (status|collect|evict|readmit))"
)
TRAINING = """
import time, torch
from allranks import DistributedDataParallel, Manager, Optimizer
model = torch.nn.Linear(4, 4)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
with Manager(state=[model, inner], min_replica_size=1) as manager:
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while True:
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.1)
"""


@pytest.mark.everything
@pytest.mark.soak
@pytest.mark.skipif(not _alone(), reason="needs namespaces of its own")
def test_every_shown_command_about_a_running_job_runs(tmp_path: Path) -> None:
    """From all pages; with the job's own port, process and replica in place of the pages'."""
    (tmp_path / "train.py").write_text(TRAINING)
    port = held_port()
    shown = [re.split(r"\s+(?:#|\|)|\s{3,}", line)[0] for _, line in _shown_commands()]
    lines = list(dict.fromkeys(line for line in shown if ABOUT_A_JOB.match(line) and "JOB" not in line))
    assert len(lines) > 20
    with typing_in(tmp_path, BROWSER="true", ALLRANKS_TOKEN="a-token-of-this-test") as shell:
        shell.run(f"allranks run --job my-job --replicas 2 --bind 127.0.0.1:{port} train.py &")
        ranks = _until(shell, "allranks status my-job", "Training")
        pid = re.findall(r"^ +0 +(\d+) ", ranks, re.M)[0]
        _until(shell, "allranks dump --list", "my-job")
        for line in lines:
            here = re.sub(r"\b(4711|12345|PID)\b", "my-job" if "--job" in line else pid, line)
            here = here.replace("29510", str(port)).replace("replica-3", "replica-1")
            here = here.replace("/mnt/scratch/boxes", f"/dev/shm/allranks-{os.getuid()}/my-job")
            stays = re.search(r"allranks (watch|top|page)", here) is not None  # until Ctrl-C
            code, output = shell.run(f"(cd $(mktemp -d -p .) && timeout -s INT {5 if stays else 90} {here})")
            assert code in ((0, 124) if stays else (0, 1)), (here, code, output)
            assert "Traceback" not in output, (here, output)
