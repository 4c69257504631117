"""Which processes are ranks, of which job, with which number: decisions without a process."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.boxes import write_box

from allranks.blackbox import files
from allranks.cli import main
from allranks.errors import InputError
from allranks.stacktraces import procfs
from allranks.stacktraces.boxes import LiveBox, find_boxes
from allranks.stacktraces.find import (
    Selection,
    choose,
    coordinates,
    find_targets,
    is_frontend,
    is_rank_title,
    number_ranks,
    split_jobs,
)
from allranks.stacktraces.procfs import ProcessEntry


def test_titles_of_serving_engines_give_parallel_coordinates() -> None:
    """SGLang's and vLLM's workers are ranks; their routers and tokenizers are not."""
    assert coordinates("sglang::scheduler_TP1_PP0_DP2_EP3") == (("tp", 1), ("pp", 0), ("dp", 2), ("ep", 3))
    assert is_rank_title("sglang::scheduler_TP0") and is_rank_title("VLLM::Worker_TP0_EP0")
    assert is_rank_title("ray::RayTrainWorker.execute")
    for title in (
        "sglang::detokenizer",
        "VLLM::APIServer_0",
        "python -m sglang_router.launch_router",
        "ray::IDLE",
        "ray::TrainController",
        "ray::PlacementGroupCleaner",
    ):
        assert not is_rank_title(title)
    assert coordinates("python train_TP0.py") == ()


def _entry(pid: int, ppid: int, title: str = "python train.py", **environ: str) -> ProcessEntry:
    return ProcessEntry(pid, ppid, "S", pid * 10, "python", title, environ, pid, True)


def test_actors_of_ray_are_ranks_only_where_they_train() -> None:
    """With black boxes these tell; without, the titles of workers do."""
    titles = ("ray::RayTrainWorker", "ray::RayTrainWorker", "ray::RayTrainWorker", "ray::TrainController")
    entries = [_entry(pid, 1, title) for pid, title in enumerate(titles, 10)]
    box = LiveBox(Path("a.box"), 0, 2, 10, 100, 1.0, "job")
    assert [target.pid for target in choose(entries, [], Selection())] == [10, 11, 12]
    other = replace(box, path=Path("b.box"), rank=1, pid=12, start_ticks=120)
    assert [target.pid for target in choose(entries, [box, other], Selection())] == [10, 12]


def test_a_black_box_of_another_user_makes_no_process_a_rank() -> None:
    """Anybody can write one into his own folder that names the pid and the start of any process."""
    shell, rank = (
        replace(_entry(pid, 1, title), uid=0) for pid, title in ((10, "sshd"), (11, "python train.py"))
    )
    forged = LiveBox(Path("f.box"), 7, 8, 10, 100, 2.0, "job", uid=1001)
    real = LiveBox(Path("r.box"), 3, 8, 11, 110, 1.0, "job", uid=0)
    forgery = replace(forged, pid=11, start_ticks=110)
    found = choose([shell, rank], [forged, real, forgery], Selection())
    assert [(target.pid, target.rank, target.box) for target in found] == [(11, 3, Path("r.box"))]
    for uid in (None, 0, 1001):  # given on the command line, of root, of the process's own user
        mine = [replace(rank, uid=1001)]
        assert [t.rank for t in choose(mine, [replace(real, uid=uid)], Selection())] == [3]


def test_a_job_of_another_user_is_hinted_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its processes only the command line can be read; root, who sees everything, gets no hint."""
    owner = os.getuid()
    user = pwd.getpwuid(owner).pw_name
    with subprocess.Popen(["torchrun", "1000"], executable="sleep") as launcher:
        try:
            for uid in (owner + 1, 0):
                monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
                with pytest.raises(InputError) as none:
                    find_targets(Selection(job="no-such-job"))
                hint = none.value.hint.partition("train'")[2].strip()
                names = re.fullmatch(
                    r"Jobs of other users \((.*)\): as that user, `sudo -u \S+ allranks …`.", hint
                )
                if uid == 0:
                    assert hint == ""
                else:  # others may run jobs here, too
                    assert names is not None and user in names[1].split(", ")
        finally:
            launcher.kill()


def test_of_a_recorded_job_whose_ranks_have_ended_the_verdict_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said how ranks are recognised, as if the job ran."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    files.job_folder("my night").mkdir(parents=True)
    with pytest.raises(InputError, match="no rank of job 'my night'") as ended:
        find_targets(Selection(job="my night"))
    assert ended.value.hint.endswith("allranks diagnose 'my night'")


@pytest.mark.needs_root
def test_boxes_in_folders_of_other_users_are_not_those_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can a user have the boxes of another taken for his own by naming their folder."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    ours, theirs = tmp_path / "allranks-0" / "job", tmp_path / "allranks-1001" / "job"
    for folder in (ours, theirs):
        folder.mkdir(parents=True)
        write_box(folder, 0, 1)
    os.lchown(theirs.parent, 1001, 1001)
    assert {box.uid for box in find_boxes(named=[(tmp_path / "allranks-0", 1001)])} == {0, 1001}
    assert {(box.path.parent, box.uid) for box in find_boxes(uids={0})} == {(ours, 0)}
    assert [entry.uid for entry in procfs.scan([os.getpid()])] == [0]


def test_ranks_of_several_jobs_are_told_apart_and_keep_their_numbers() -> None:
    """Two plain torchrun jobs without a name, one job of ours: nothing is mixed, no rank is renumbered."""
    entries = [
        *[_entry(parent, 1, "python torchrun train.py") for parent in (10, 20)],
        *[_entry(10 * p + r, 10 * p, RANK=str(r), LOCAL_RANK=str(r), TORCHELASTIC_RUN_ID="none") for p in (1, 2) for r in (1, 2)],
        _entry(31, 1, RANK="1", LOCAL_RANK="1", ALLRANKS_JOB_ID="mine", TORCHELASTIC_RUN_ID="none"),
    ]  # fmt: skip
    parents = {entry.pid: entry.ppid for entry in entries}
    jobs = split_jobs([t for t in choose(entries, [], Selection()) if t.child is None], parents)
    assert jobs == {"process-10": [11, 12], "process-20": [21, 22], "mine": [31]}
    for pids in jobs.values():
        chosen = choose(entries, [], Selection(pids=tuple(pids)))
        assert [t.rank for t in chosen] == ([1, 2] if len(pids) == 2 else [1])


def test_a_launcher_is_no_rank_and_workers_are_not_its_children() -> None:
    """In a Kubernetes pod torchrun itself has RANK (the node's): its workers are the ranks all the same."""
    entries = [
        _entry(1, 0, "sh"),
        _entry(10, 1, "python torchrun train.py", RANK="0", WORLD_SIZE="1"),
        _entry(11, 10, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2"),
        _entry(12, 10, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2"),
        _entry(13, 12, "pt_data_worker", RANK="1", LOCAL_RANK="1", WORLD_SIZE="2"),
        _entry(20, 1, "python -m notebook"),
    ]
    chosen = choose(entries, [], Selection())
    assert [(t.pid, t.rank, t.child) for t in chosen] == [(11, 0, None), (12, 1, None), (13, 1, 0)]


def _serving(**environ: str) -> list[ProcessEntry]:
    """A server of sglang as a task of srun; its workers set their titles, which wipes their environment."""
    task = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "77"}
    titles = ("sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer", "sglang::router")
    return [
        _entry(9, 1, "slurmstepd: [77.0]"),
        _entry(10, 9, "python -m sglang.launch_server --tp 2", **task),
        *(_entry(pid, 10, title, **environ) for pid, title in enumerate(titles, 11)),
        replace(_entry(15, 12, "sglang::scheduler_TP1", **environ)),  # forked by rank 1
    ]


@pytest.mark.parametrize("environ", [{}, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "77"}])
@pytest.mark.parametrize("job", ["", "77"])
def test_under_srun_the_workers_of_a_server_are_the_ranks_and_not_their_launcher(
    job: str, environ: dict[str, str]
) -> None:
    """Slurm's number is the task's; the environment of the workers may be wiped or inherited."""
    chosen = choose(_serving(**environ), [], Selection(job=job))
    assert [(t.pid, t.rank, t.child) for t in chosen] == [(11, 0, None), (12, 1, None), (15, 1, 0)]
    assert not choose(_serving(**environ), [], Selection(job="78"))


def test_the_launcher_of_a_server_that_was_asked_for_is_no_rank_either() -> None:
    """Its workers are, with their numbers; a process that starts no rank is taken as it is."""
    server = [(t.pid, t.rank, t.child) for t in choose(_serving(), [], Selection(pids=(10,)))]
    assert server == [(11, 0, None), (12, 1, None), (15, 1, 0)]
    plain = [_entry(10, 1), _entry(11, 10, "pt_data_worker")]
    alone = [(t.pid, t.rank, t.child) for t in choose(plain, [], Selection(pids=(10,)))]
    assert alone == [(10, 0, None), (11, 0, 0)]


def test_the_job_of_a_process_that_lost_its_parent_and_its_environment_is_that_of_its_cgroup() -> None:
    """Slurm keeps every process of a job in a cgroup of it."""
    orphan = replace(_entry(11, 1, "sglang::scheduler_TP0"), slurm_job="77")
    assert [t.pid for t in choose([orphan], [], Selection(job="77"))] == [11]
    assert not choose([orphan], [], Selection(job="78"))


def test_an_engine_and_its_workers_are_ranks_side_by_side() -> None:
    """vLLM's engine starts its workers; either may be what hangs."""
    titles = {10: "VLLM::APIServer", 11: "VLLM::EngineCore", 12: "VLLM::Worker_TP0", 13: "VLLM::Worker_TP1"}
    parents = {10: 1, 11: 10, 12: 11, 13: 11}
    chosen = choose([_entry(pid, parents[pid], titles[pid]) for pid in titles], [], Selection())
    assert [(t.pid, t.rank, t.child) for t in chosen] == [(12, 0, None), (13, 1, None), (11, 2, None)]


def test_under_srun_spawned_ranks_are_numbered_after_their_task() -> None:
    """torch.multiprocessing.spawn in one task per node: the task is the launcher, its number comes first."""
    task = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "77"}
    title = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"
    rank = replace(_entry(11, 10, title, **task), spawned=True)
    chosen = choose([_entry(10, 1, **task), rank, replace(rank, pid=12)], [], Selection(job="77"))
    assert [(t.pid, t.rank, t.child) for t in chosen] == [(11, 2, None), (12, 3, None)]


def test_a_task_of_srun_that_starts_no_rank_is_one() -> None:
    """srun -n 2 python train.py: its children load data."""
    task = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "77"}
    entries = [_entry(10, 1, **task), _entry(11, 10, "python worker.py", **task)]
    assert [(t.pid, t.rank, t.child) for t in choose(entries, [], Selection())] == [(10, 1, None), (11, 1, 0)]


def test_ranks_of_lightnings_own_launcher_are_found_though_no_rank_is_set() -> None:
    """`python train.py`: the typed process is rank 0 and starts the others with LOCAL_RANK, from 1."""
    common = {"WORLD_SIZE": "3", "NODE_RANK": "0"}
    entries = [
        _entry(10, 1),
        _entry(11, 10, LOCAL_RANK="1", **common),
        _entry(12, 10, LOCAL_RANK="2", **common),
        _entry(13, 10, "pt_data_worker"),
        _entry(14, 12, "pt_data_worker", LOCAL_RANK="2", **common),
    ]
    chosen = choose(entries, [], Selection())
    assert [(t.pid, t.rank, t.child) for t in chosen] == [
        (10, 0, None), (13, 0, 0), (11, 1, None), (12, 2, None), (14, 2, 0),
    ]  # fmt: skip


def test_ranks_that_multiprocessing_spawns_are_found_in_their_order() -> None:
    """No variable names them: they talk to each other, which a data loader's worker does not, or is named as such."""
    title = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"
    rank = replace(_entry(11, 10, title), spawned=True)
    entries = [
        _entry(10, 1),
        rank,
        replace(rank, pid=12),
        replace(rank, pid=13, spawned=False),
        replace(rank, pid=14, comm="pt_data_worker"),
        replace(rank, pid=15, ppid=12, comm="pt_data_worker"),
        _entry(20, 1, RANK="0", LOCAL_RANK="0"),
        replace(rank, pid=21, ppid=20),
    ]
    chosen = choose(entries[:6], [], Selection())
    assert [(t.pid, t.rank, t.child) for t in chosen] == [(11, 0, None), (12, 1, None), (15, 1, 0)]
    assert [(t.pid, t.child) for t in choose(entries[6:], [], Selection())] == [(20, None), (21, 0)]


def test_a_rank_in_a_folder_named_allranks_is_found_and_our_own_tools_are_not() -> None:
    """`git clone` makes a folder of that name; only the program itself is a tool, wherever it is installed."""
    ranks = [
        "/home/u/allranks/.venv/bin/python -u /home/u/allranks/examples/train.py --out /tmp/allranks out",
        "python -u -m allranks.launch.rank_entry train.py",
        "python -u /home/u/.venv/lib/python3.11/site-packages/allranks/launch/rank_entry.py train.py",
        "python train.py --profiler py-spy",
    ]
    tools = [
        "/home/u/allranks/.venv/bin/python /home/u/allranks/.venv/bin/allranks stacks --all-nodes",
        "/usr/bin/python3.11 -u -m allranks run --replicas 2 train.py",
        "python -S -s -m allranks.lighthouse.client.liveness_proxy --fd 3",
        "/usr/local/bin/allranks watch",
        "/x/bin/py-spy dump --pid 7",
    ]
    entries = [_entry(pid, 1, title, RANK=str(pid)) for pid, title in enumerate([*ranks, *tools], 2)]
    assert [target.title for target in choose(entries, [], Selection())] == ranks


def test_a_black_box_belongs_to_the_process_that_started_when_it_says() -> None:
    """A pid used again by another process does not inherit the box; a pid inside a container is matched."""
    box = LiveBox(Path("a.box"), 5, 8, 7, 70, 1.0, "job")
    inside = replace(_entry(70, 1), inner_pid=7, start_ticks=70)
    reused = replace(_entry(7, 1), start_ticks=71)
    assert [(t.pid, t.rank) for t in choose([inside, reused], [box], Selection())] == [(70, 5)]


def test_the_fallback_takes_sglang_by_its_command_line_but_no_router() -> None:
    """Without titles, environment and boxes the known script's pattern is used."""
    entries = [
        _entry(5, 1, "python -m sglang.launch_server --tp 2"),
        _entry(6, 1, "python -m sglang_router.launch_router"),
    ]
    assert [t.pid for t in choose(entries, [], Selection())] == [5]
    assert choose([_entry(7, 1, "python other.py")], [], Selection()) == []


def test_coordinates_give_rank_numbers() -> None:
    """Tensor parallel runs fastest; on a second node the numbers go on."""
    coords = [(("tp", tp), ("pp", pp)) for pp in range(2) for tp in range(4)]
    assert number_ranks(coords) == list(range(8))
    assert number_ranks([(("tp", 8),), (("tp", 9),)]) == [8, 9]
    assert sorted(number_ranks([(("tp", 0),), (("tp", 0),)])) == [0, 1]


@pytest.mark.parametrize(
    ("tool", "answer", "words"),
    [
        ("docker", "{pid}", ["docker", "inspect", "--format", "{{.State.Pid}}", "train"]),
        ("podman", "{pid}", ["podman", "inspect", "--format", "{{.State.Pid}}", "train"]),
        ("enroot", "NAME PID STATE\npyxis_4711_train {pid} S+ 10:00", ["enroot", "list", "--fancy"]),
    ],
)
def test_the_processes_of_a_named_container_are_those_of_its_namespace(
    tool: str, answer: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container's own tool names its first process (the tools cannot be installed here: a script answers)."""
    import os

    from allranks.stacktraces.containers import container_pids
    from allranks.stacktraces.debuggers import ToolRun, run_tool

    script = tmp_path / tool
    script.write_text("#!/bin/sh\ncat <<'X'\n" + answer.format(pid=os.getpid()) + "\nX\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    asked = []

    def run(line: list[str], limit_s: float) -> ToolRun:
        asked.append(line)
        return run_tool(line, limit_s)

    assert os.getpid() in container_pids("train", [os.getpid(), 2**22 - 3], run)
    assert asked[-1] == words
    with pytest.raises(InputError, match="no running container named 'other'"):
        container_pids("other", [], lambda line, limit_s: ToolRun("", "no such object"))


@pytest.mark.needs_root
def test_a_mapped_file_below_a_folder_of_another_user_is_looked_for_in_the_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container has a /dev/shm of its own; on the host the same path may belong to somebody who lets nobody in."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "7").mkdir()
        (folder / "closed").mkdir(mode=0o700)
        box = folder / "closed" / "rank.box"
        (folder / "7" / "maps").write_text(f"7f00-7f01 rw-s 00000000 00:1a 9 {box}\n")
        monkeypatch.setattr(procfs, "PROC", folder)
        os.seteuid(65534)
        try:
            found = procfs.mapped_files(7, ".box")
        finally:
            os.seteuid(0)
        assert found == [folder / "7" / "root" / str(box).lstrip("/")]


@pytest.mark.parametrize(
    ("title", "tool"),
    [
        ("/home/me/my work/.venv/bin/python -m allranks watch -o out", True),
        ("/home/me/my work/.venv/bin/python /home/me/my work/.venv/bin/allranks run train.py", True),
        ("/home/me/my work/.venv/bin/python -u -m allranks.launch.rank_entry train.py", False),
        ("/venv/bin/python -u /home/me/my work/allranks/launch/rank_entry.py train.py", False),
        ("/home/me/my work/.venv/bin/python train.py allranks", False),
        ("/usr/bin/python /data/train.py --with /usr/bin/py-spy", False),
    ],
)
def test_a_tool_is_known_below_a_folder_with_a_blank(title: str, tool: bool) -> None:
    """Words of a command line are joined by blanks."""
    assert is_frontend(title) is tool


def test_a_process_above_several_jobs_is_not_taken_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    """`--pid 1` gave one answer for the ranks of all jobs, with new numbers."""
    program = f"{shlex.quote(sys.executable)} -c 'print(flush=True); input()' <&3 &"
    line = " ".join(
        f"RANK={rank} ALLRANKS_JOB_ID={job} {program}" for job in ("night", "day") for rank in (0, 1)
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", f"exec 3<&0; {line} wait"], stdin=pipe, stdout=pipe) as shell:
        try:
            assert shell.stdout is not None
            for _ in range(4):
                shell.stdout.readline()
            assert main(["stacks", "--pid", str(shell.pid)]) == 2
            told = capsys.readouterr().err
            assert f"ranks of 2 jobs are below process {shell.pid}" in told, told
            assert "  allranks stacks day  # 2 ranks\n  allranks stacks night  # 2 ranks\n" in told, told
        finally:
            assert shell.stdin is not None
            shell.stdin.close()
