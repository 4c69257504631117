"""Live processes of several roles: their links, tasks, roles, and the verdict of `allranks stacks --tree`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.proc import settle

from allranks.cli import main
from allranks.cli.stacks import finding_json, render
from allranks.diagnosis.process_verdict import explain_processes
from allranks.errors import ConfigurationError
from allranks.model.debug_options import DebugOptions
from allranks.model.stacks import GroupCall, JobLook, Process, ProcessLink, StackFrame, ThreadLook, WaitFor
from allranks.stacktraces import source
from allranks.stacktraces.html import draw, render_processes
from allranks.stacktraces.roles import give_roles, load_roles, parse_roles, with_roles
from allranks.stacktraces.tasks import line_at, read_tasks
from allranks.stacktraces.tree import (
    LookOptions,
    find_tree,
    how_ended,
    look_at_processes,
    read_looks,
    write_look,
)
from allranks.stacktraces.variables import read_variables
from allranks.stacktraces.views import user_frame


@contextmanager
def running(folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """A program that prints "ready" before it waits, given after that; it is killed with all that it started."""
    script = folder / "job.py"
    script.write_text(textwrap.dedent(text))
    words = [sys.executable, "-u", str(script)]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert job.stdout is not None
        for line in job.stdout:
            if line.strip() == "ready":
                break
        settle(job.pid)
        yield job
    finally:
        os.killpg(job.pid, 9)
        job.communicate()


def look_at(pid: int, seconds: float = 1.0) -> JobLook:
    return look_at_processes(find_tree([pid]), LookOptions(for_s=seconds, rounds=2))


SERVER = """
    import os, socket, subprocess, sys, threading

    def reward(port):
        connection = socket.create_connection(("127.0.0.1", int(port)))
        connection.sendall(b"x")
        judge, held, asks = threading.Lock(), threading.Event(), threading.Event()

        def refresh():
            with judge:
                held.set()
                asks.wait()
                print("ready")
                threading.Event().wait()

        threading.Thread(target=refresh, name="refresh").start()
        held.wait()
        asks.set()
        with judge:
            connection.sendall(b"answer")

    def trainer():
        server = socket.create_server(("127.0.0.1", 0))
        words = [sys.executable, "-u", __file__, "reward", str(server.getsockname()[1])]
        child = subprocess.Popen(words)
        connection, _ = server.accept()
        connection.recv(1)
        connection.recv(1)

    reward(sys.argv[2]) if len(sys.argv) > 1 else trainer()
    """


def test_a_wait_is_followed_through_a_socket_to_the_holder_of_a_lock(tmp_path: Path) -> None:
    """Trainer → socket → the server's main thread → lock → the thread that holds it. The same from a bundle."""
    with running(tmp_path, SERVER) as job:
        look = look_at(job.pid)
    found = explain_processes(look)
    lines = (tmp_path / "job.py").read_text().splitlines()
    guilty = [(one.role, lines[one.line - 1].strip()) for one in found.guilty]
    assert (found.state, guilty) == ("stuck", [("reward", "threading.Event().wait()")]), found.sentence
    assert [link.role for link in found.chain] == ["trainer"]
    write_look(look, tmp_path / "bundle")
    write_look(look, tmp_path / "again")  # the same processes: two folders of one node
    both = read_looks([tmp_path / "bundle", tmp_path / "again"])
    assert (explain_processes(both), len(both.processes)) == (found, len(look.processes))
    page = render_processes(look, found)
    assert "What must move first" in page and "refresh" in page
    assert f"job.py:{found.guilty[0].line} in refresh" in draw(look, found)  # not the line of its main thread
    shape = finding_json(found, look)
    assert json.loads(json.dumps(shape))["guilty"][0]["function"] == "refresh"


def test_a_lock_file_that_was_left_is_a_wait_for_a_lock_that_nobody_holds(tmp_path: Path) -> None:
    """The file itself is the lock, and asked for again and again: that was "in code that waits for no other process"."""
    text = """
        from filelock import SoftFileLock

        def download(path):
            open(path, "w").close()
            print("ready")
            with SoftFileLock(path):
                pass

        download(__file__ + ".lock")
        """
    with running(tmp_path, text) as job:
        (process,) = look_at(job.pid).processes
    waits = [one.wait for one in process.threads if one.main]
    assert [(one.kind, one.pids) for one in waits] == [("file_lock", ())], waits
    assert "that no process of this machine holds" in waits[0].says


def test_a_launcher_whose_ranks_are_unclear_is_inspected_with_all_below_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --tree, too: the process of --pid alone would be unclear. The JSON keeps the keys of ranks. Nobody waits for two
    looks, one after the other."""
    with running(tmp_path, SERVER) as job:
        code = main(["stacks", "--pid", str(job.pid), "--for", "2.5", "--json"])
        answer = json.loads(capsys.readouterr().out)
        once = ["--rounds", "1"]  # of the ranks; the time of the look is that of --for
        assert main(["stacks", "--pid", str(job.pid), "--for", "2.5", *once]) == code == 1
    text, progress = capsys.readouterr()
    assert (answer["state"], answer["hung"], answer["schema"]) == ("stuck", True, 1)
    assert progress.count("sampling") == 1 and "inspecting all" not in progress, progress
    assert int(text.split("nothing in this chain moved for ")[1].split()[0]) >= 2, text
    assert [one["function"] for one in answer["guilty"]] == ["refresh"]
    assert "ranks" in answer and answer["chain"][0]["role"] == "trainer"
    assert text.startswith("STUCK: reward") and "refresh" in text


def test_suspended_tasks_are_read_from_memory(tmp_path: Path) -> None:
    """The loop sleeps in epoll; the coroutine that waits, and the one that awaits it, are found with their lines."""
    text = """
        import asyncio

        async def inner(event):
            await event.wait()

        async def handler():
            await inner(asyncio.Event())

        async def main():
            task = asyncio.create_task(handler())
            await asyncio.sleep(0.05)
            asyncio.get_running_loop().call_soon(print, "ready")  # when this one is suspended, too
            await asyncio.sleep(3000)

        asyncio.run(main())
        """
    if sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)):
        pytest.skip("the layout of this interpreter's coroutines is not known")
    with running(tmp_path, text) as job:
        chains = read_tasks(job.pid)
    lines = {tuple(f.line for f in frames if f.file.endswith("job.py")): delay for frames, delay in chains}
    assert (5, 8) in lines
    assert 3000.0 in lines.values() or 0.05 in lines.values()


@pytest.mark.parametrize(
    "awaited",
    ["child.stdout.readline()", "child.wait()", "child.communicate()"],
)
def test_a_task_that_awaits_a_process_is_followed_into_it(tmp_path: Path, awaited: str) -> None:
    """Event loops read pipes and wait for children by themselves: the task's line says for what it waits."""
    text = f"""
        import asyncio, sys

        async def main():
            pipe = asyncio.subprocess.PIPE
            words = [sys.executable, "-c", "import time; print(1, flush=True); (lambda: time.sleep(3000))()"]
            child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
            await child.stdout.readline()
            print("ready")
            await {awaited}

        asyncio.run(main())
        """
    if sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)):
        pytest.skip("the layout of this interpreter's coroutines is not known")
    with running(tmp_path, text) as job:
        found = explain_processes(look_at(job.pid))
    assert found.state == "stuck", found.sentence
    assert [one.wait for one in found.guilty] == ["sleeps"], found
    (link,) = found.chain
    assert link.waits_for.endswith(": a process that it started") and link.at == "job.py:10 in main"


def test_the_size_of_a_group_that_forms_is_read_from_the_variables_of_torch() -> None:
    """The innermost frame of torch.distributed tells; a variable of the user's code does not."""

    def frame(file: str, **values: object) -> dict[str, object]:
        rows = [{"name": name, "addr": 255, "repr": str(value)} for name, value in values.items()]
        return {"name": "f", "filename": file, "line": 1, "locals": rows}

    torch = "/lib/site-packages/torch/distributed/distributed_c10d.py"
    frames = [frame(torch, group_size=2), frame(torch, world_size=4, self=1), frame("/job.py", world_size=9)]
    rows = [{"os_thread_id": 7, "frames": frames}, {"os_thread_id": 8, "frames": frames[2:]}]
    found = read_variables(json.dumps(rows))
    assert (found[7].selves, found[7].members, found[8].members) == (("", "ff", ""), 2, 0)


def test_a_call_that_is_still_ahead_is_found_in_the_function_and_in_what_it_calls() -> None:
    text = """
def join():
    dist.init_process_group("gloo")
def rollout():
    control.accept()
    join()
def trainer():
    dist.init_process_group("gloo")
    control.accept()
main(rollout, join)
"""
    ahead = [source.calls_later(text, line, "init_process_group") for line in (5, 6, 9, 10)]
    assert ahead == [True, False, False, False]


def test_processes_of_other_users_are_not_read(tmp_path: Path) -> None:
    """A child that has another user's rights is left out."""
    if os.geteuid() != 0:
        pytest.skip("root")
    text = """
        import os, time
        if not os.fork():
            os.setuid(65534)
            print("ready")
        time.sleep(1000)
        """
    with running(tmp_path, text) as job:
        assert [entry.pid for entry in find_tree([job.pid])] == [job.pid]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="coroutines of Python 3.10 are not read")
def test_lines_of_a_code_object() -> None:
    def function(value: int) -> int:
        if value:
            value += 1

        return value

    code = function.__code__
    expected = [line for *_, line in code.co_lines() if line is not None]
    found = {line_at(code.co_linetable, code.co_firstlineno, i) for i in range(len(code.co_code) // 2)}
    assert found == set(expected)


def test_who_computes_is_named_and_not_a_loop_that_waits_for_requests() -> None:
    """An event loop wakes up ten times a second, too."""
    loop = ThreadLook(1, "MainThread", WaitFor("idle", "waits for its next work"), main=True, busy=True)
    work = ThreadLook(2, "MainThread", WaitFor("work", "runs Python code"), main=True, busy=True)
    server, trainer = (Process(t.tid, role=r, threads=(t,)) for t, r in ((loop, "server"), (work, "trainer")))
    found = explain_processes(JobLook((server, trainer), 5.0))
    assert (found.state, found.sentence[:14]) == ("unclear", "trainer (pid 2")


def test_a_line_of_a_file_counts_more_than_code_that_was_made_from_a_string() -> None:
    """Proxies of multiprocessing and dataclasses make functions; `python -c` has nothing else."""
    made, line = StackFrame("get", "<string>", 2), StackFrame("tokenizer", "/job/t.py", 7)
    assert user_frame([made, line]) == line
    assert user_frame([made]) == made


def test_a_process_without_a_name_is_called_by_its_parent() -> None:
    """`python -c`, and one that has ended: its title is gone."""
    family = [
        Process(1, title="python x.py reward"),
        Process(2, 1, title="python3 -c code"),
        Process(3, 1, alive=False),
    ]
    named = give_roles(family, {1: None, 2: None, 3: None}, load_roles())  # type: ignore[dict-item]
    assert {one.name for one in named[1:]} == {"subprocess of reward 0", "subprocess of reward 1"}


@pytest.mark.parametrize(("status", "text"), [(9, "killed by SIGKILL"), (256, "exit code 1"), (0, "")])
def test_how_a_process_ended(status: int, text: str) -> None:
    assert how_ended(status) == text


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("sglang::scheduler_TP0", "scheduler"),
        ("sglang::detokenizer", "detokenizer"),
        ("VLLM::EngineCore_DP0", "engine core"),
        ("VLLM::Worker_TP1", "engine worker"),
        ("VLLM::APIServer_0", "server"),
        ("ray::TaskRunner.run", "driver"),
        ("ray::AgentLoopWorker.generate_sequences", "rollout engine"),
        ("ray::vLLMHttpServer", "rollout engine"),
        ("ray::ActorModelRayActor.fit", "trainer"),
        ("ray::RewardModelRayActor", "reward"),
        ("ray::LLMRayActor.generate", "rollout engine"),
        ("ray::WorkerDict.actor_rollout_update_actor", "trainer"),
        ("ray::IDLE", "Ray's raylet"),
        ("ray::Shop.sell", "Shop"),
        ("python -u serve.py reward 8000", "reward"),
        ("python /job/reward_server.py --port 1", "reward server"),
        ("/usr/bin/torchrun --nproc-per-node 2 train.py", "launcher"),
    ],
)
def test_roles_by_title(title: str, role: str) -> None:
    """Titles as the packages set them."""
    assert [p.role for p in give_roles([Process(2, title=title)], {}, load_roles())] == [role]


def test_a_job_file_adds_roles_before_ours() -> None:
    rules = (*parse_roles([{"role": "shop", "ray": "^Shop"}]), *load_roles())
    assert give_roles([Process(2, title="ray::Shop.sell")], {}, rules)[0].role == "shop"
    assert give_roles([Process(2, title="ray::Shop.sell")], {}, with_roles(["till=Shop"]))[0].role == "till"
    with pytest.raises(ConfigurationError, match="no ROLE=EXPRESSION"):
        DebugOptions(roles=("Shop",))
    with pytest.raises(ConfigurationError, match="row 1"):
        parse_roles([{"role": "x", "titel": "y"}])


def _asking(server: ThreadLook) -> JobLook:
    frame = StackFrame("train", "/job/train.py", 8)
    asks = ThreadLook(
        1, "MainThread", WaitFor("poll", "asks again", operation="retry"), (frame,), main=True, user=frame
    )
    link = ProcessLink(3, "listen", "tcp n listen 80", "")
    return JobLook(
        (
            Process(1, role="trainer", threads=(asks,)),
            Process(2, role="reward", threads=(server,), links=(link,)),
        ),
        5.0,
    )


def test_who_asks_a_server_that_does_nothing_is_stuck_and_one_that_works_is_waited_for() -> None:
    idle = ThreadLook(2, "MainThread", WaitFor("idle"), main=True)
    found = explain_processes(_asking(idle))
    assert (found.state, [(one.role, one.line) for one in found.guilty]) == ("stuck", [("trainer", 8)])
    for loads in (
        ThreadLook(3, "load", WaitFor("socket", ends=("x",))),
        ThreadLook(3, "load", WaitFor("work"), busy=True),
    ):
        assert explain_processes(_asking(loads)).state != "stuck"


def _rank(pid: int, role: str, wait: WaitFor, *calls: GroupCall) -> Process:
    frame = StackFrame(role, "/job/train.py", pid)
    thread = ThreadLook(pid, "MainThread", wait, (frame,), main=True, user=frame)
    return Process(pid, role=role, threads=(thread,), calls=calls)


def test_black_boxes_say_who_has_not_come_to_a_call_of_a_group() -> None:
    """No connection tells: the groups may be NCCL's, and the trainer waits for its device."""
    look = JobLook(
        (
            _rank(1, "trainer", WaitFor("device"), GroupCall("a:1 weights", "weights", "broadcast", 3, True)),
            _rank(2, "rollout", WaitFor("device"), GroupCall("a:1 weights", "weights", "broadcast", 3, True)),
            _rank(3, "rollout", WaitFor("event"), GroupCall("a:1 weights", "weights", "broadcast", 2, False)),
            _rank(4, "other", WaitFor("idle"), GroupCall("b:1 weights", "weights", "broadcast", 2, False)),
        ),
        5.0,
    )
    found = explain_processes(look)
    assert (found.state, [one.pid for one in found.guilty]) == ("stuck", [3])
    assert set(found.edges) == {(("", 1), ("", 3)), (("", 2), ("", 3))}
    picture = draw(look, found)
    assert picture.count("<rect") == 3 and picture.count("marker-end") == 2


def test_ranks_of_two_worlds_are_named_by_their_programs() -> None:
    words = [("train.py", 0), ("train.py", 1), ("serve.py rollout", 0), ("serve.py rollout", 1)]
    found = [
        Process(n + 1, title=f"python -u /job/{word}", rank=rank, started_s=float(n))
        for n, (word, rank) in enumerate(words)
    ]
    named = give_roles(found, {}, load_roles())
    assert [one.name for one in named] == ["train 0", "train 1", "rollout 0", "rollout 1"]
    assert [one.name for one in give_roles(found[:2], {}, load_roles())] == ["rank 0", "rank 1"]


RANKS = """
    import os, subprocess, sys

    if len(sys.argv) > 1:
        subprocess.Popen(["sleep", "300"])
        print("ready")
        sys.stdin.read()
    else:
        for rank in "0", "1":
            environ = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
            child = subprocess.Popen(
                [sys.executable, "-u", __file__, "again"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
            )
            child.stdout.readline()
        print("ready")
        child.wait()
    """


def test_a_command_that_a_rank_has_started_is_no_rank(tmp_path: Path) -> None:
    """It has the environment of the rank, with its number."""
    with running(tmp_path, RANKS) as job:
        names = sorted(one.name for one in look_at(job.pid).processes)
    assert names == ["driver", "rank 0", "rank 1", "sleep 0", "sleep 1"]


def _linked(pid: int, role: str, wait: WaitFor, *links: ProcessLink) -> Process:
    return replace(_rank(pid, role, wait), links=links)


def _to_store(port: int) -> tuple[ProcessLink, ProcessLink]:
    """The two ends of a connection to a store at port 500."""
    near, far = f"tcp n 127.0.0.1:{port}>127.0.0.1:500", f"tcp n 127.0.0.1:500>127.0.0.1:{port}"
    return ProcessLink(3, "tcp", near, far, "client"), ProcessLink(4, "tcp", far, near, "server")


def test_who_still_forms_a_group_that_the_others_use_has_come_late() -> None:
    """A rollout that was started anew; the trainer and the other rollout wait for keys of the same store."""
    ends = {port: _to_store(port) for port in (1, 2, 3)}
    look = JobLook(
        (
            _linked(1, "trainer", WaitFor("store", ends=(ends[1][0].end,)), *ends[1], ends[2][1], ends[3][1]),
            _linked(2, "rollout", WaitFor("rendezvous", ends=(ends[2][0].end,)), ends[2][0]),
            _linked(3, "rollout", WaitFor("store", ends=(ends[3][0].end,)), ends[3][0]),
            _rank(4, "trainer", WaitFor("idle")),
        ),
        5.0,
    )
    found = explain_processes(look)
    assert (found.state, [one.pid for one in found.guilty]) == ("stuck", [2]), found.sentence


def _gloo(number: int, here: str, there: str) -> ProcessLink:
    return ProcessLink(number, "tcp", f"{here}>{there}", f"{there}>{here}", owner=f"gloo {number}")


def test_an_idle_member_of_another_group_is_not_accused() -> None:
    """Trainer 0 is in a call, and in two groups; nobody of either has come, but only those of one do something."""
    look = JobLook(
        (
            _linked(1, "trainer", WaitFor("collective"), _gloo(7, "a", "b"), _gloo(8, "a", "c")),
            _linked(2, "trainer", WaitFor("idle"), _gloo(7, "b", "a")),
            _linked(3, "rollout", WaitFor("event", lock="weights"), _gloo(8, "c", "a")),
        ),
        5.0,
    )
    assert [one.pid for one in explain_processes(look).guilty] == [3]


def test_processes_of_two_nodes_with_the_same_id_are_not_mixed_up() -> None:
    """Containers number their processes alike: the trainer has the process id of the guilty reward server."""
    done = ThreadLook(2, "t", WaitFor("event", "waits", lock="done"), main=True, handles=True)
    asks = ThreadLook(2, "t", WaitFor("socket", "asks", ends=("tcp a:50>b:80",)), main=True)
    client = ProcessLink(3, "tcp", "tcp a:50>b:80", "tcp b:80>a:50", "client", turn="awaits")
    server = ProcessLink(4, "tcp", "tcp b:80>a:50", "tcp a:50>b:80", "server", turn="owes")
    trainer = Process(3, node="a", role="trainer", threads=(asks,), links=(client,))
    reward = Process(3, node="b", role="reward", threads=(done,), links=(server,))
    look = JobLook((trainer, reward), 5.0)
    lines = list(render(explain_processes(look), look))
    assert "  reward (pid 3 on b): no line: waits" in lines
    assert "reward ◄ (pid 3 on b): waits" in lines and "trainer (pid 3 on a): asks" in lines, lines
