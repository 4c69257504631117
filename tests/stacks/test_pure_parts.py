"""Rank sets, tree, titles, patterns, triggers, RAS and configuration: decisions without a process."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.errors import ConfigurationError, InputError
from allranks.model.stacks import (
    Capture,
    Mark,
    ProcessCapture,
    RankMarks,
    RankState,
    RasReply,
    Snapshot,
    StackFrame,
    ThreadFacts,
    ThreadStack,
)
from allranks.stacks import Stillness, classify, ras, read_capture
from allranks.stacks.boxes import LiveBox
from allranks.stacks.debug_config import DebugOptions, parse_debug, read_debug_options
from allranks.stacks.debuggers import explain_pyspy
from allranks.stacks.find import Selection, choose, coordinates, is_rank_title, number_ranks, split_jobs
from allranks.stacks.patterns import load_patterns, parse_patterns
from allranks.stacks.procfs import ProcessEntry, parse_syscall
from allranks.stacks.progress import decide_progress
from allranks.stacks.text import compress, find_outliers, grow_tree, render_text
from allranks.stacks.tool_output import parse_kernels
from allranks.stacks.triggers import Observation, TriggerState, decide_trigger

CASES = Path(__file__).parent / "cases"


def test_rank_sets_are_written_as_people_write_them() -> None:
    """Runs of three and more become spans."""
    assert compress([*range(4), 5, *range(7, 1024)]) == "0-3,5,7-1023"
    assert compress([1, 0]) == "0,1"
    assert compress([]) == ""


@given(st.sets(st.integers(0, 300)))
def test_a_rank_set_can_be_read_back(ranks: set[int]) -> None:
    """Compressing loses nothing."""
    found: set[int] = set()
    for part in filter(None, compress(ranks).split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == ranks


def test_the_tree_parts_where_the_ranks_part_and_names_the_odd_one() -> None:
    """Rank 2 leaves the common path at the line that differs."""
    capture = read_capture(CASES / "hangs" / "gloo_allreduce_missing_rank")
    root = grow_tree(capture)[0]
    assert root.ranks == (0, 1, 2, 3)
    assert root.looks == 8
    ranks, node = find_outliers([root])[0]
    assert ranks == (2,)
    assert node.frame is not None and node.frame.line == 20
    assert node.always


def test_forked_children_are_cut_at_the_fork() -> None:
    """The worker's tree starts at its bootstrap, not in the training loop it was forked from."""
    roots = grow_tree(read_capture(CASES / "hangs" / "dataloader_worker_sleep"), all_threads=True)
    child = next(root for root in roots if root.role == "child")
    assert [node.frame.name for node in child.children if node.frame] == ["BaseProcess._bootstrap"]
    assert any("QueueFeederThread" in root.role for root in roots)


def test_a_thousand_ranks_are_merged_into_one_small_tree() -> None:
    """1,024 ranks with 30 threads give a report and a tree of a few lines, with the odd rank named."""
    capture = _many(1024, odd=517)
    report = classify(capture)
    lines = list(render_text(report, grow_tree(capture, all_threads=True)))
    assert report.culprits == (517,)
    assert len(lines) < 60
    assert any("0-516,518-1023" in line for line in lines)


def _many(count: int, odd: int) -> Capture:
    source = read_capture(CASES / "hangs" / "dataloader_worker_sleep")
    starved, waiting = (next(p for p in source.processes if p.rank == r and p.child is None) for r in (0, 1))
    helper = next(t for t in waiting.snapshots[0].stacks if t.name != "MainThread")
    extra = tuple(replace(helper, tid=900_000 + number, name=f"helper-{number}") for number in range(28))

    def grown(process: ProcessCapture, rank: int) -> ProcessCapture:
        shots = tuple(replace(shot, stacks=shot.stacks + extra) for shot in process.snapshots)
        return replace(process, rank=rank, snapshots=shots)

    processes = tuple(grown(starved if rank == odd else waiting, rank) for rank in range(count))
    return replace(
        source, processes=processes, marks=tuple(replace(source.marks[0], rank=r) for r in range(count))
    )


def test_a_very_deep_stack_is_no_problem() -> None:
    """Runaway recursion of thousands of frames is merged and shown without recursion of ours."""
    frames = tuple(StackFrame(f"f{number}", "/home/user/deep.py", number) for number in range(5000))
    shot = Snapshot(1, None, (ThreadStack(1, "MainThread", frames, True, True),))
    capture = Capture((ProcessCapture(0, None, 1, snapshots=(shot,)),))
    roots = grow_tree(capture)
    assert list(render_text(classify(capture), roots))
    from allranks.stacks.html import render_html

    assert "f4999" in render_html(classify(capture), roots)


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
    return ProcessEntry(pid, ppid, "S", pid * 10, "python", title, environ, 0, pid, True)


def test_actors_of_ray_are_ranks_only_where_they_train() -> None:
    """With black boxes these tell; without, the titles of workers do."""
    titles = ("ray::RayTrainWorker", "ray::RayTrainWorker", "ray::RayTrainWorker", "ray::TrainController")
    entries = [_entry(pid, 1, title) for pid, title in enumerate(titles, 10)]
    box = LiveBox(Path("a.box"), 0, 2, 10, 100, 1.0, "job")
    assert [target.pid for target in choose(entries, [], Selection())] == [10, 11, 12]
    other = replace(box, path=Path("b.box"), rank=1, pid=12, start_ticks=120)
    assert [target.pid for target in choose(entries, [box, other], Selection())] == [10, 12]


def test_the_training_thread_behind_a_serving_main_thread_is_the_rank() -> None:
    """Ray Train runs the user's loop in a thread of its own, whatever that does."""
    serving = ThreadStack(
        5, "MainThread", (StackFrame("main_loop", "/x/site-packages/ray/_private/worker.py", 1069),)
    )
    sleeping = ThreadStack(
        6,
        "TrainingThread(0)",
        (StackFrame("load_batch", "/home/user/t.py", 7), StackFrame("train", "/home/user/t.py", 9)),
    )
    facts = (
        ThreadFacts(5, state="S", syscall="epoll_wait"),
        ThreadFacts(6, state="S", syscall="clock_nanosleep"),
    )
    shots = tuple(Snapshot(number, None, (serving, sleeping), facts) for number in (1, 2))
    capture = Capture((ProcessCapture(1, None, 5, snapshots=shots),))
    state = classify(capture).ranks[1]
    assert (state.cause, state.thread) == ("sleep", "TrainingThread(0)")
    assert state.where.startswith("t.py:7")
    assert any("load_batch" in line for line in render_text(classify(capture), grow_tree(capture)))


def _looked_at(*native: str, kernels: tuple[str, ...] = ()) -> RankState:
    """A rank whose main thread stands in user code, with these native frames above it."""
    frames = (
        *(StackFrame(name, "libx.so", 0, native=True) for name in native),
        StackFrame("init", "/home/user/t.py", 3),
    )
    stack = ThreadStack(5, "MainThread", frames, False, False)
    facts = (ThreadFacts(5, state="S", syscall="futex", args=(1, 0x80, 0, 0)),)
    shots = tuple(Snapshot(number, None, (stack,), facts) for number in (1, 2))
    process = ProcessCapture(0, None, 5, snapshots=shots, native=(stack,), kernels=kernels)
    return classify(Capture((process,))).ranks[0]


def test_waiting_for_the_gil_and_for_an_nccl_communicator_have_their_own_words() -> None:
    """Neither is a call of unknown native code."""
    state = _looked_at("futex_wait", "take_gil", "PyGILState_Ensure")
    assert state.cause == "gil_contention" and "GIL" in state.evidence
    state = _looked_at("futex_wait", "bootstrapAllGather", "ncclCommInitRankConfig")
    assert state.cause == "rendezvous_wait" and "NCCL communicator" in state.evidence


def test_the_kernels_that_cuda_gdb_saw_are_named() -> None:
    """In the evidence of the rank, which text and JSON show."""
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert kernel in _looked_at("cudaStreamSynchronize", kernels=(kernel,)).evidence


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


def test_a_rank_in_a_folder_named_allranks_is_found_and_our_own_tools_are_not() -> None:
    """`git clone` makes a folder of that name; only the program itself is a tool, wherever it is installed."""
    ranks = [
        "/home/u/allranks/.venv/bin/python -u /home/u/allranks/examples/train.py --out /tmp/allranks out",
        "python -u -m allranks.launch.rank_entry train.py",
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


def test_patterns_are_checked_when_they_are_read() -> None:
    """A misspelt condition is named; the shipped ones are sound."""
    assert len(load_patterns()) > 50
    with pytest.raises(ConfigurationError, match="unknown condition"):
        parse_patterns("- {cause: sleep, when: {sycall: [read]}}")
    with pytest.raises(ConfigurationError, match="unknown keys"):
        parse_patterns("- {cause: sleep, whn: {}}")


def test_a_new_pattern_is_data() -> None:
    """A user's own pattern decides before the shipped ones."""
    own = parse_patterns(
        '- {cause: network_io, says: "waits for our storage", when: {frame: ["load_batch_slow_storage"]}}'
    )
    capture = read_capture(CASES / "hangs" / "gloo_allreduce_missing_rank")
    report = classify(capture, (*own, *load_patterns()))
    assert report.ranks[2].cause == "network_io"
    assert report.ranks[2].evidence == "waits for our storage"


def test_system_calls_are_named_on_both_machine_types() -> None:
    """The same wait has another number on aarch64."""
    assert parse_syscall("202 0x1 0x189")[0] == "futex"
    assert parse_syscall("98 0x1 0x189", "aarch64")[0] == "futex"
    assert parse_syscall("running") == ("running", ())
    assert parse_syscall("-1 0x0") == ("", ())


def _timed(rank: int, times: list[float], seen: float, **more: object) -> RankMarks:
    return RankMarks(rank, tuple(Mark(t, i) for i, t in enumerate(times)), seen, **more)  # type: ignore[arg-type]


def test_the_clock_decides_where_it_is_known() -> None:
    """Old marks: hung; new ones: not; fresh but silent: cannot tell; a declared silence is no hang."""
    steps = [float(second) for second in range(100)]
    decide = lambda *marks: decide_progress({m.rank: m for m in marks}, {}, {}, Stillness())  # noqa: E731
    assert decide(_timed(0, steps, 160.0)).hung is True
    assert decide(_timed(0, steps, 100.5)).hung is False
    assert decide(_timed(0, steps, 106.0)).hung is None
    assert decide(_timed(0, steps, 160.0, expect_until_s=500.0)).hung is None
    slow = [30.0 * number for number in range(10)]
    assert decide(_timed(0, slow, 270.0 + 45.0)).hung is not True
    assert decide().hung is None


RAS = """Job summary
===========
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    0         1         1         2         2         2   RUNNING  MISMATCH

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 7 has launched up to operation {behind} -- GPU 3 managed by process 4711 on node node1
"""


def _replies(first: int, last: int, apart_s: float = 30.0) -> tuple[RasReply, RasReply]:
    return (
        RasReply("a", 100.0, RAS.replace("{behind}", str(first))),
        RasReply("a", 100.0 + apart_s, RAS.replace("{behind}", str(last))),
    )


def test_only_what_ras_says_twice_is_told() -> None:
    """Different operation counts for a moment are normal; the same ones twice name the rank that is behind."""
    assert ras.find_laggards(_replies(60, 63)) == ()
    assert ras.find_laggards(_replies(60, 60)[:1]) == ()
    behind = ras.find_laggards(_replies(60, 60))
    assert [(one.rank, one.pid, one.operation) for one in behind] == [(7, 4711, 60)]
    assert (
        "rank 7 (process 4711) has launched up to operation 60, others up to 64"
        in ras.tell(_replies(60, 60))[0]
    )


def test_operation_counts_stand_in_for_marks() -> None:
    """Without marks, counts that stand still long enough mean hung; moving ones mean not; the process is named."""
    waiting = read_capture(CASES / "victims" / "hang_all.json").processes
    processes = (replace(waiting[0], pid=1), replace(waiting[1], pid=4711))
    hung = classify(Capture(processes, ras=_replies(60, 60)))
    assert (hung.hung, hung.culprits) == (True, (1,))
    assert classify(Capture(processes, ras=_replies(60, 63))).hung is False
    early = classify(Capture(processes, ras=_replies(60, 60, apart_s=1.0)))
    assert early.hung is None and early.culprits == (1,)


def test_ras_is_asked_over_tcp_and_silence_is_no_error() -> None:
    """The service answers and closes; where nobody listens there is simply no answer."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                asked.append(connection.recv(100))
                connection.sendall(RAS.encode())

        thread = threading.Thread(target=serve, name="ras")
        thread.start()
        reply = ras.ask(f"127.0.0.1:{port}")
        thread.join()
    assert reply is not None and reply.text == RAS
    assert asked == [b"VERBOSE STATUS\n"]
    assert ras.ask(f"127.0.0.1:{port}") is None


def test_device_kernels_are_read_from_cuda_gdb() -> None:
    """The names of the invocation column, each once."""
    text = (
        "  Kernel Parent Dev Grid Status   SMs Mask GridDim  BlockDim Invocation\n"
        "*      0      -   0    5 Active 0x00000001 (2,1,1) (544,1,1) ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)\n"
        "       1      -   0    6 Active 0x00000001 (1,1,1) (1,1,1) at::cuda::(anonymous namespace)::spin_kernel(long)\n\n"
    )
    assert parse_kernels(text) == (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "at::cuda::(anonymous namespace)::spin_kernel",
    )  # fmt: skip


def test_a_kernel_on_the_device_decides_the_cause() -> None:
    """A collective's kernel is a wait for others; any other kernel is the rank's own."""
    capture = read_capture(CASES / "victims" / "nogil_pause.json")
    for kernel, cause in (("ncclDevKernel_AllReduce", "collective_wait"), ("spin_kernel", "cuda_kernel")):
        process = replace(capture.processes[0], kernels=(kernel,))
        assert classify(replace(capture, processes=(process,))).ranks[0].cause == cause


def test_device_waits_are_told_from_frames() -> None:
    """torch.cuda.synchronize in Python, or the driver's call in the native frames."""
    top = StackFrame("synchronize", "/opt/venv/lib/python3.11/site-packages/torch/cuda/__init__.py", 900)
    user = StackFrame("train", "/home/user/train.py", 12)
    native = StackFrame("cuCtxSynchronize", "/usr/lib/libcuda.so.1", 0, True, "/usr/lib/libcuda.so.1")
    by_frame = ProcessCapture(
        0, None, 1, snapshots=(Snapshot(1, None, (ThreadStack(1, "MainThread", (top, user), True, False),)),)
    )
    by_leaf = ProcessCapture(
        1, None, 2, snapshots=(Snapshot(1, None, (ThreadStack(2, "MainThread", (user,), False, False),)),),
        native=(ThreadStack(2, "MainThread", (native, user)),),
    )  # fmt: skip
    report = classify(Capture((by_frame, by_leaf)))
    assert {state.cause for state in report.ranks.values()} == {"cuda_wait"}


def test_a_server_without_a_line_of_the_users_own_is_told_by_its_engine() -> None:
    """An idle vLLM worker waits for requests, its engine core for the worker; the place is the engine's line."""
    lib = "/usr/lib/python3.12/site-packages/"
    poll = StackFrame("poll", lib + "zmq/sugar/poll.py", 106)
    read = StackFrame("acquire_read", lib + "vllm/distributed/device_communicators/shm_broadcast.py", 698)
    loop = StackFrame("worker_busy_loop", lib + "vllm/v1/executor/multiproc_executor.py", 973)
    answer = StackFrame("get_response", lib + "vllm/v1/executor/multiproc_executor.py", 387)
    shot = lambda *frames: (Snapshot(1, None, (ThreadStack(1, "MainThread", frames, False, False),)),)  # noqa: E731
    worker = ProcessCapture(0, None, 1, title="VLLM::Worker_TP0", snapshots=shot(poll, read, loop))
    engine = ProcessCapture(1, None, 1, title="VLLM::EngineCore", snapshots=shot(poll, answer))
    report = classify(Capture((worker, engine)))
    assert report.ranks[0].cause == "request_wait"
    assert report.ranks[0].where == "shm_broadcast.py:698 in acquire_read"
    assert report.ranks[1].cause == "p2p_wait"


def test_misleading_messages_of_py_spy_are_explained() -> None:
    """A process that ended, and one that is no Python, are told apart from a refusal."""
    import os

    assert "ended while" in explain_pyspy("Error: Failed to get process executable name", 2**22 - 3)
    assert "not a Python process" in explain_pyspy(
        "Error: Failed to find python version from target process", os.getpid()
    )


def test_triggers_fire_once_for_each_standstill_and_again_later() -> None:
    """No progress: at the limit, at twice and four times it; progress starts over."""
    options = DebugOptions(wait_s=0, no_progress_s=10, repeats=3, rank_lost=False)
    state, fired = TriggerState(), []
    for second in range(200):
        mark = (1, 5, 4) if second < 100 else (2, 6, 5)
        reason, state = decide_trigger(
            Observation(float(second), {0: mark}, alive=frozenset({0})), state, options
        )
        fired += [second] if reason else []
    assert fired == [10, 20, 40, 110, 120, 140]


def test_triggers_by_time_by_loss_by_output_and_by_an_overdue_call() -> None:
    """Each says its reason; a declared silence holds the standstill triggers back."""
    options = DebugOptions(wait_s=5, at_s=(8.0,), no_progress_s=0, collective_overdue_s=30, no_output_s=50)
    state, fired = TriggerState(), {}
    for second in range(120):
        seen = Observation(
            float(second), {}, {0: 10}, 5.0 + second if second > 20 else None,
            frozenset({0, 1}) if second < 60 else frozenset({0}), silent_until_s=40.0,
        )  # fmt: skip
        reason, state = decide_trigger(seen, state, options)
        if reason:
            fired[second] = reason
    assert fired == {
        5: "5 s after the start", 8: "8 s after the start", 40: "a collective is open for 45 s",
        50: "no output for 50 s", 60: "rank 1 ended while 1 others run", 100: "no output for 100 s",
    }  # fmt: skip


def test_the_debug_section_is_read_as_people_know_it(tmp_path: Path) -> None:
    """enabled, wait_seconds and output_dir, plus the triggers; mistakes are named."""
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: x\ndebug:\n  enabled: true\n  wait_seconds: 120\n  triggers: {no_progress_seconds: 30, at_seconds: [60]}\n"
    )
    options = read_debug_options(file)
    assert options.fixed_points() == (60.0, 120.0)
    assert options.no_progress_s == 30.0
    assert options.folder({"LOG_DIR": "/logs"}) == Path("/logs/backtraces")
    with pytest.raises(ConfigurationError, match=r"debug\.wait_second is unknown"):
        parse_debug({"wait_second": 1})
    with pytest.raises(ConfigurationError, match=r"debug\.enabled is 'yes'"):
        parse_debug({"enabled": "yes"})
    with pytest.raises(ConfigurationError, match=r"wait_seconds .* must not be negative"):
        parse_debug({"wait_seconds": -1})


@pytest.mark.parametrize(
    ("function", "file", "cause"),
    [
        ("TrainingState._wait_for_group", "training.py", "rendezvous_wait"),
        ("TrainingState._wait_for_verdict", "training.py", "rendezvous_wait"),
        ("wait_while", "work.py", "collective_wait"),
        ("VoteMesh.cast", "vote_mesh.py", "collective_wait"),
    ],
)
def test_a_replica_that_waits_in_its_manager_is_no_culprit(function: str, file: str, cause: str) -> None:
    """Survivors wait for a group, a gradient or a vote; the one that sleeps in its data code is to blame."""
    wait = StackFrame("Condition.wait", "/usr/lib/python3.12/threading.py", 359)
    inside = StackFrame(function, f"/usr/lib/python3.12/site-packages/allranks/manager/{file}", 120)
    user = StackFrame("main", "train.py", 20)
    load = StackFrame("load_batch", "data.py", 31)
    shot = lambda *frames: (Snapshot(1, None, (ThreadStack(1, "MainThread", frames, False, False),)),)  # noqa: E731
    survivor = ProcessCapture(0, None, 1, snapshots=shot(wait, inside, user))
    sleeper = ProcessCapture(1, None, 2, snapshots=shot(load, user))
    report = classify(Capture((survivor, sleeper)))
    assert report.ranks[0].cause == cause
    assert report.culprits == (1,)


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

    from allranks.stacks.containers import container_pids
    from allranks.stacks.debuggers import ToolRun, run_tool

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
        container_pids("other", [], lambda line, limit_s: ToolRun("", "no such object", 0.0))
