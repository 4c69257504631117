"""Slurm: the pure lines, and a real Slurm with two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ports import held_port

from allranks.cli import main
from allranks.errors import InputError
from allranks.launch.slurm import (
    Allocation,
    SubmitOptions,
    collect_words,
    expand_nodes,
    read_allocation,
    replicas_of_node,
    sbatch_script,
    srun_words,
)
from allranks.stacktraces import read_capture


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node7", ["node7"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[8-9]", ["r1n8", "r1n9", "r2n8", "r2n9"]),
        ("a,b[9-10]", ["a", "b9", "b10"]),
    ],
)
def test_node_lists_are_expanded(text: str, names: list[str]) -> None:
    """Slurm's short form in full, with leading zeros kept."""
    assert list(expand_nodes(text)) == names


def test_outside_of_an_allocation_the_error_says_what_to_do() -> None:
    """Nothing is guessed."""
    with pytest.raises(InputError, match="SLURM_JOB_ID is not set") as caught:
        read_allocation({})
    assert "slurm submit" in caught.value.hint


def test_the_srun_line_starts_one_agent_per_node_and_keeps_what_the_user_chose() -> None:
    """Defaults come from the allocation; a given flag wins."""
    found = read_allocation({"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"})
    assert found == Allocation("77", ("n1", "n2"), 8)
    words = srun_words(found, ["--rdzv-id=mine"], ["train.py", "--nnodes", "1"])
    assert words[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert "--rdzv-endpoint=n1:20077" in words
    assert "--nproc-per-node=8" in words
    assert [w for w in words if w.startswith("--rdzv-id")] == ["--rdzv-id=mine"]
    assert words[-4:] == ["--", "train.py", "--nnodes", "1"] and "--nnodes=2" in words


def test_what_a_job_file_chooses_is_not_overridden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's ranks and nodes stand; where to meet comes from the allocation."""
    (tmp_path / "job.yaml").write_text("elastic: {max_nodes: 2, nproc_per_node: 8}\n")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    assert main(["slurm", "wrap", "--dry-run", "--config", str(tmp_path / "job.yaml"), "train.py"]) == 0
    line = capsys.readouterr().out
    assert "--nproc-per-node" not in line and "--nnodes" not in line and "--rdzv-endpoint=n1:20077" in line


def test_replicas_are_numbered_over_the_nodes_of_a_step() -> None:
    """srun starts the same line everywhere; outside of a step a node is alone, whatever was allocated."""
    assert replicas_of_node({"SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2"}, 4) == (8, 12)
    assert replicas_of_node({"SLURM_NNODES": "3", "SLURM_NODEID": "0"}, 4) == (0, 4)


def test_the_batch_script_is_requeued_and_quoted() -> None:
    """Arguments with blanks survive."""
    text = sbatch_script(
        SubmitOptions(nodes=2, gpus_per_node="8", extra=("--account=x",)), ["train.py", "--name", "a b"]
    )
    assert "#SBATCH --requeue" in text
    assert "#SBATCH --account=x" in text
    assert "exec allranks slurm wrap train.py --name 'a b'" in text


def test_collection_joins_a_running_job_beside_its_steps() -> None:
    """--overlap, one collector per node."""
    assert collect_words("5", None, ["-o", "d"])[:4] == [
        "srun",
        "--jobid=5",
        "--overlap",
        "--ntasks-per-node=1",
    ]
    line = collect_words("5", 2, ["-o", "d"])
    assert {"--nodes=2", "--ntasks=2"} <= set(line)
    assert line[line.index("stacks") :] == ["stacks", "--job", "5", "-o", "d/{host}"]
    assert collect_words("5", 2, ["--output=d/{pid}"])[-1] == "--output=d/{pid}"
    inside = collect_words("5", 2, [], srun=["--container-name=train"])
    assert inside.index("--container-name=train") < inside.index("allranks")


CONFIG = """
ClusterName=allranks
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/ctld.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock
CredType=cred/munge
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
NodeName=fn1 NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=fn2 NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=fn[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@pytest.fixture
def slurm(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private Slurm: munged, slurmctld and two slurmd as our children; its parameter is more of slurm.conf."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "srun"))):
        pytest.skip("needs root and Debian's slurmctld, slurmd, slurm-client and munge")
    # munge refuses long paths and group-writable parents
    folder = Path("/tmp") / f"allranks-slurm-{os.getpid()}"
    (folder / "munge").mkdir(parents=True)
    (folder / "state").mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    os.chmod(folder / "munge" / "key", 0o400)
    os.chmod(folder, 0o755)
    os.chmod(folder / "munge", 0o711)
    config = folder / "slurm.conf"
    ports = {"ctld": held_port(), "one": held_port(), "two": held_port()}
    more = getattr(request, "param", "").format(folder=tmp_path)
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, **ports) + more)
    monkeypatch.setenv("SLURM_CONF", str(config))
    # the numbers of jobs begin at 1 each time: their black boxes are not for other runs of these tests to find
    monkeypatch.setenv("ALLRANKS_DIR", str(tmp_path / "boxes"))
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={folder}/munge/key", f"--socket={folder}/munge/sock",
         f"--pid-file={folder}/munge/pid", f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-N", "fn1", "-f", str(config)],
        ["slurmd", "-D", "-N", "fn2", "-f", str(config)],
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            if command[0] == "munged":
                _wait(lambda: (folder / "munge" / "sock").exists())
        _wait(lambda: _sinfo() == "2")
        yield folder
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _sinfo() -> str:
    done = subprocess.run(
        ["sinfo", "-h", "-t", "idle", "-o", "%D"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _wait(condition: object, limit_s: float = 200.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "Slurm did not come up in time"
        time.sleep(0.1)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
open(f"{sys.argv[1]}/{os.environ['RANK']}", "w").write(f"{int(total)} {os.environ['SLURMD_NODENAME']}")
dist.destroy_process_group()
"""


@pytest.mark.everything
@pytest.mark.needs_root
def test_a_job_over_two_real_slurm_nodes_meets_and_ends_well(slurm: Path, tmp_path: Path) -> None:
    """`allranks slurm submit` → sbatch → wrap → srun → two agents → two ranks in one world."""
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    seen.mkdir()
    script.write_text(SCRIPT)
    output = tmp_path / "out-%j"
    command = ["slurm", "submit", "--nodes", "2", "--output", str(output), "--no-lighthouse", "--no-watch"]
    # fn1 and fn2 are names of Slurm alone here, so the rendezvous is told where to meet
    endpoint = [
        "--rdzv-endpoint",
        f"127.0.0.1:{held_port()}",
        "--local-addr",
        "127.0.0.1",
        str(script),
        str(seen),
    ]
    environment = dict(os.environ)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    try:
        assert main([*command, *endpoint]) == 0
    finally:
        os.environ["PATH"] = environment["PATH"]

    def done() -> bool:
        return (
            subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=False).stdout.strip() == ""
        )

    _wait(done)
    log = "\n".join(path.read_text() for path in tmp_path.glob("out-*"))
    assert sorted(path.name for path in seen.iterdir()) == ["0", "1"], log
    assert {path.read_text().split()[0] for path in seen.iterdir()} == {"2"}
    assert {path.read_text().split()[1] for path in seen.iterdir()} == {"fn1", "fn2"}


EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
REPLICA = """
import os, sys, torch
from allranks import Manager
from allranks.manager.groups.group import ProcessGroupGloo
manager = Manager(pg=ProcessGroupGloo(), min_replica_size=2, state=[torch.nn.Linear(1, 1)])
while manager.current_step() < 3:
    manager.start_quorum()
    total = torch.ones(1)
    manager.allreduce(total).wait()
    manager.should_commit()
open(f"{sys.argv[1]}/{os.environ['ALLRANKS_REPLICA']}", "w").write(os.environ["SLURMD_NODENAME"])
manager.shutdown()
"""
WAITS = """
import pathlib, sys, time
pathlib.Path(sys.argv[1], "begun").touch()
time.sleep(1000)
"""


def _sbatch(name: str, words: list[str], folder: Path, **variables: str) -> str:
    """Submits a script of examples/slurm as it is; returns the job."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sbatch", "--parsable", "--export=ALL", str(EXAMPLES / name), *words], cwd=folder, capture_output=True,
        text=True, check=False, env={**os.environ, "PATH": path, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _show(job: str) -> str:
    asked = ["scontrol", "show", "job", job]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout


def _said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.glob("slurm-*.out"))


@pytest.mark.everything
@pytest.mark.needs_root
def test_the_batch_scripts_to_copy_run_on_a_real_slurm(slurm: Path, tmp_path: Path) -> None:
    """Replicas over two nodes train together; a whole job that is asked to end is requeued."""
    (tmp_path / "replica.py").write_text(REPLICA)
    (tmp_path / "waits.py").write_text(WAITS)
    replicas = _sbatch("replicas.sbatch", ["replica.py", str(tmp_path)], tmp_path, REPLICAS_PER_NODE="1")
    _wait(lambda: "JobState=COMPLETED" in _show(replicas) or "JobState=FAILED" in _show(replicas))
    nodes = {path.name: path.read_text() for path in tmp_path.glob("replica-?")}
    assert nodes == {"replica-0": "fn1", "replica-1": "fn2"}, _said(tmp_path)
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{held_port()}", "--local-addr", "127.0.0.1"]
    whole = _sbatch("whole_job.sbatch", [*endpoint, "waits.py", str(tmp_path)], tmp_path)
    _wait(lambda: (tmp_path / "begun").exists())
    subprocess.run(["scancel", "--signal=TERM", whole], check=True)
    _wait(lambda: "Restarts=1" in _show(whole))
    subprocess.run(["scancel", whole], check=True)


@pytest.mark.everything
@pytest.mark.needs_root
@pytest.mark.parametrize("slurm", ["Prolog={folder}/prolog.sh\nPrologFlags=Alloc\n"], indirect=True)
def test_the_prolog_drains_a_node_that_fails_its_health_check(slurm: Path, tmp_path: Path) -> None:
    """The script as it is, told where things are here; a folder that cannot be written is the fault."""
    allranks = Path(sys.executable).parent / "allranks"
    text = (EXAMPLES / "prolog.sh").read_text().replace("/opt/allranks/bin/allranks", str(allranks))
    text = text.replace("/var/log/slurm", str(tmp_path)).replace("/scratch", "/proc/nothing/here")
    (tmp_path / "prolog.sh").write_text(text)
    (tmp_path / "prolog.sh").chmod(0o755)
    _sbatch("replicas.sbatch", ["replica.py", str(tmp_path)], tmp_path)

    def drained() -> bool:
        asked = ["sinfo", "--noheader", "--states=drain", "--format=%E"]
        return "Prolog error" in subprocess.run(asked, capture_output=True, text=True, check=False).stdout

    _wait(drained)
    assert "/proc/nothing/here" in (tmp_path / "allranks-prolog.log").read_text()


HUNG = """
import os, sys, time
def stuck_in_job_{name}():
    time.sleep(600)
open(f"{{sys.argv[1]}}/{name}.{{os.environ['SLURM_NODEID']}}", "w").close()
stuck_in_job_{name}()
"""


@pytest.mark.everything
@pytest.mark.needs_root
def test_collect_asks_all_nodes_of_the_job_and_no_other_job(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one task per node share both nodes; the stacks are those of the job that was named."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    jobs = {}
    for name in "ab":
        script = tmp_path / f"{name}.py"
        script.write_text(HUNG.format(name=name))
        srun = (
            f"srun --ntasks-per-node=1 --overlap env RANK=0 WORLD_SIZE=1 {sys.executable} {script} {tmp_path}"
        )
        batch = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "-o", str(tmp_path / "out-%j")]
        done = subprocess.run(
            [*batch, "--wrap", srun.replace("RANK=0", "RANK=$SLURM_NODEID")],
            capture_output=True,
            text=True,
            check=True,
        )
        jobs[name] = done.stdout.strip()
    try:
        _wait(lambda: len(list(tmp_path.glob("[ab].[01]"))) == 4)
        out = tmp_path / "stacks"
        command = [sys.executable, "-m", "allranks", "slurm", "collect", jobs["a"], "-o", f"{out}/{{host}}"]
        found = subprocess.run(
            [*command, "--rounds", "1", "--force"], capture_output=True, text=True, timeout=300, check=False
        )
    finally:
        subprocess.run(["scancel", *jobs.values()], check=False)
        _wait(lambda: _squeue() == "")
    text = found.stdout + found.stderr
    assert found.returncode in (0, 1), text
    assert text.count("stuck_in_job_a") >= 2 and "stuck_in_job_b" not in text, text


#: A server as sglang starts it: processes with titles, whose environment is wiped (setproctitle writes over it).
SERVER = """
import os, subprocess, sys, time
titles = ["scheduler_TP0", "scheduler_TP1", "detokenizer", "router"]
line = 'exec -a sglang::$0 "$1" "$2" "$3" "$0"'
for title in titles:
    subprocess.Popen(["env", "-i", "bash", "-c", line, title, sys.executable, sys.argv[1], sys.argv[2]])
time.sleep(600)
"""
WORKER = """
import os, select, socket, sys, time
def forward_batch():
    time.sleep(600)
def recv_requests():
    here, there = socket.socketpair()
    while not select.select([here], [], [], 0.5)[0]:
        pass
open(f"{sys.argv[1]}/{sys.argv[2]}.{os.getpid()}", "w").close()
forward_batch() if sys.argv[2] == "scheduler_TP1" else recv_requests()
"""


@pytest.mark.everything
@pytest.mark.needs_root
@pytest.mark.parametrize("slurm", [f"FirstJobId={os.getpid()}\n"], indirect=True, ids=["own numbers"])
def test_the_workers_of_a_server_under_srun_are_found_and_all_nodes_are_asked(
    slurm: Path, tmp_path: Path
) -> None:
    """From outside of the allocation, by the job's number alone; launcher, router and detokenizer are not ranks."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "seen").mkdir()
    server = (
        f"srun --ntasks-per-node=1 {sys.executable} {tmp_path}/server.py {tmp_path}/worker.py {tmp_path}/seen"
    )
    batch = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "-o", str(tmp_path / "out-%j")]
    job = subprocess.run(
        [*batch, "--wrap", server], capture_output=True, text=True, check=True
    ).stdout.strip()
    out = tmp_path / "stacks"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        _wait(lambda: len(list((tmp_path / "seen").iterdir())) == 8)
        words = ["stacks", "--all-nodes", "--job", job, "-o", str(out), "--rounds", "1"]
        found = subprocess.run(
            [sys.executable, "-m", "allranks", *words],
            env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    finally:
        subprocess.run(["scancel", job], check=False)
        _wait(lambda: _squeue() == "")
    text = found.stdout + found.stderr
    assert sorted(path.parent.name for path in out.glob("*/bundle.json")) == ["fn1", "fn2"], text
    assert "2,3    sleep" in text and "worker.py:4 in forward_batch" in text, text
    assert "sglang::detokenizer (pid" in text and "launcher " in text, text
    capture = read_capture(out / "fn1")
    ranks = {process.rank for process in capture.processes if process.child is None}
    assert ranks == {0, 1, 2, 3}  # both nodes are this machine
    assert all("scheduler" in process.title for process in capture.processes), capture


def _squeue() -> str:
    return subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=False).stdout.strip()
