"""The screen of `allranks status` and `allranks top`."""

from __future__ import annotations

import json
import os
import pickle
import pwd
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from allranks.blackbox.files import job_folder, remove_finished
from allranks.blackbox.reader import read_trace
from allranks.channel import web_client
from allranks.cli import main
from allranks.cli.status import render
from allranks.errors import InputError
from allranks.incidents.folder import open_incident, read_incidents, remove_oldest
from allranks.incidents.job_overview import (
    Overview,
    find_absent,
    find_job,
    find_open,
    incident_texts,
    local_facts,
)
from allranks.incidents.loop import Watch
from allranks.incidents.pipeline import Explained, WatchOptions
from allranks.launch.node_agent import NodeAgent
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.model.cluster import JobView, RankRow
from allranks.model.job_state import describe
from allranks.model.trace import State
from allranks.watch.samples import read_sample, sleeps
from boxes import write_box
from pages.jobs import whole_job


def row(rank: int, doing: str, waits_for: tuple[int, ...] = (), alive: bool = True) -> RankRow:
    """One rank at step 7."""
    return RankRow(rank, 100 + rank, "n", alive, 7, 14, 3.0, doing, waits_for)


ANSWER = "Hung for 3 s, at step 7: rank 1 never entered all_reduce #8 of group dp; it sleeps at train.py:7 in load_batch"
MOVING = {"line": "Training: step 7, 2.0 steps/s", "level": "good", "state": "training"}
VIEW = JobView(
    "job", "/x", 0.0,
    (row(0, "all_reduce #8 of dp", (1,)), row(1, "computes"), row(2, "all_reduce #8 of dp", (1,)), row(3, "died", alive=False)),
    incidents=("20260101-030000 (hang, open): rank 1 never entered all_reduce #8 of group dp; it sleeps at train.py:7 in load_batch",),
    line=ANSWER, level="bad", state="hung",
)  # fmt: skip


def test_the_rank_that_others_wait_for_stands_out() -> None:
    """Who waits says for whom, and the one waited for says how many wait."""
    lines = list(render(VIEW, colour=True))
    assert lines[:2] == ["job: 3 of 4 ranks run", f"\x1b[31m{ANSWER}\x1b[0m"]
    assert "waits for rank 1" in lines[3] and "\x1b" not in lines[3]
    assert lines[4].startswith("\x1b[31m") and "<- 2 ranks wait for it: computes" in lines[4]
    assert lines[6].startswith("\x1b[31m") and "died" in lines[6]
    calm = list(render(replace(VIEW, **MOVING), colour=True))  # a long wait that the agent knows to be usual
    assert not any("wait" in line for line in calm[:7]) and "\x1b" not in calm[4]


def test_a_rank_that_has_ended_has_no_phase_and_no_incident_is_open_then() -> None:
    """ "exit [leaving]", and "(hang, open)" of a job that had ended; incidents came in the order of their ends."""
    ended = replace(row(0, "exit", alive=False), phase="leaving")
    stories = [
        {"id": "20260101-030009", "kind": "death", "closed": 5.0, "sentence": "Rank 1 died of SIGKILL"},
        {"id": "20260101-030001", "kind": "hang", "closed": None, "sentence": "Rank 1 never entered it; 2 ranks have waited 20 s"},
    ]  # fmt: skip
    shown = incident_texts(stories, running=False)
    lines = list(render(JobView("job", "/x", 0.0, (ended,), line="Finished", incidents=shown)))
    assert lines[3].endswith(" ended")
    assert lines[4:] == [
        "incident 20260101-030001 (hang, open at the end): rank 1 never entered it; 2 ranks have waited 20 s",
        "incident 20260101-030009 (death, closed): rank 1 died of SIGKILL",
    ]
    assert incident_texts(stories, running=True)[0].endswith(
        "(hang, open): rank 1 never entered it; 2 ranks wait for it"
    )


def test_a_rank_whose_node_is_not_known_yet_makes_no_second_node() -> None:
    """A restarted rank that had made no call showed a column of empty nodes; long silences pushed the row out of its column."""
    rows = (replace(row(0, "computes"), host="", silent_s=208.0), row(1, "computes"))
    lines = list(render(JobView("job", "/x", 0.0, rows, **MOVING)))
    assert "node" not in lines[2] and lines[3].index("computes") == lines[4].index("computes")


def test_in_a_job_that_moves_nobody_is_said_to_wait(tmp_path: Path) -> None:
    """In healthy training a rank is always a little later than the others: `top` showed it in red, at 0.0 s of silence."""
    trace = read_trace(Path(__file__).parents[1] / "record" / "cases" / "mixed_calls.r0.box")
    calls = trace.calls.copy()
    calls["state"][-1] = State.SCHEDULED
    trace = replace(trace, calls=calls)
    sample = read_sample(write_box(tmp_path, 0, 7))
    assert sample is not None
    now, traces = time.time(), {0: trace, 1: replace(trace, calls=calls[:0])}
    absent = partial(find_absent, traces)
    for silent_s, waited in ((0.01, ()), (60.0, (1,))):
        seen = replace(sample, last_ns=int((now - silent_s) * 1e9))
        assert Overview(tmp_path)._row(seen, now, trace, absent).waits_for == waited
    (call,) = find_open(trace)
    calls["state"][-1] = State.COMPLETED
    traces[1] = replace(trace, calls=calls)
    assert absent(call) == ()  # it has finished its part of the call


def test_a_rank_that_sleeps_does_not_compute() -> None:
    """Its process says so; one that burns CPU computes."""
    for script, expected in (("time.sleep(600)", True), ("\nwhile True: pass", False)):
        command = [sys.executable, "-c", f"import time; print(1, flush=True); {script}".replace("; \n", "\n")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            while sleeps(process.pid) is not expected:  # a moment after the line was written
                pass
            process.send_signal(signal.SIGSTOP)
            while not sleeps(process.pid):  # a stopped process does not compute either
                pass
            process.kill()
    assert not sleeps(process.pid)


def test_a_large_job_is_summed_up_and_what_is_odd_is_listed() -> None:
    """`status` of 1,024 ranks printed 1,026 lines."""
    rows = [row(rank, "all_reduce #8 of dp", (11,)) for rank in range(1024)]
    rows[11], rows[700] = row(11, "blocked"), row(700, "died", alive=False)
    lines = list(render(JobView("job", "/x", 0.0, tuple(rows), line=ANSWER, level="bad", state="hung")))
    assert lines[2] == "1,022 ranks (0-10, 12-699, 701-1023): all_reduce #8 of dp, wait for rank 11"
    assert "<- 1,022 ranks wait for it: blocked" in lines[3] and "died" in lines[4] and len(lines) == 5
    apart = [row(rank, f"all_reduce #8 of dp_{rank // 8}") for rank in range(1024)]
    lines = list(render(JobView("job", "/x", 0.0, tuple(apart), **MOVING)))
    assert len(lines) == 19 and lines[-1] == "… and 896 more that do other things"


def test_without_a_lighthouse_the_line_is_made_of_boxes_and_incidents() -> None:
    """`status` printed "Training: step 5" and, below, "incident … (hang, open)"."""
    sentence = "rank 1 is at train.py:7"
    hang: dict[str, Any] = {"kind": "hang", "job": "job", "verdict": {"sentence": sentence}}
    found = describe(local_facts(VIEW.rows, [hang], watched=True))
    assert (found.text, found.level) == (f"Hung for 3 s, at step 7: {sentence}", "bad")
    found = describe(local_facts(VIEW.rows, [{**hang, "kind": "stall"}], watched=True))
    assert found.text.startswith("Looking into it: no progress for 3 s, at step 7") and found.level == "warn"
    stall = {"kind": "stall", "reason": "no rank has made progress for 10.1 s"}  # the line counts by itself
    found = describe(local_facts(VIEW.rows, [stall], watched=True))
    assert found.text == "Looking into it: no progress for 3 s, at step 7"
    for incidents in ([], [{**hang, "closed": 5.0}]):
        assert describe(local_facts(VIEW.rows, incidents, watched=True)).text == "Training: step 7"
    done = replace(VIEW.rows[0], alive=False, doing="exit")
    assert describe(local_facts([done], [], watched=False)).text == "Finished at step 7"


def test_a_job_whose_agent_has_ended_is_not_starting(tmp_path: Path) -> None:
    """It was "Starting" for ever when no rank had come so far, and an unmodified script had "no replica"."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    lines = []
    for pid in (os.getpid(), ended.pid):
        (tmp_path / "job.json").write_text(json.dumps({"job": "j", "pid": pid}))
        lines.append(Overview(tmp_path).look().line)
    assert lines == ["Starting", "Stopped: no rank is running"]
    assert list(render(Overview(tmp_path).look())) == ["j: no rank has started", lines[-1]]
    dead = (replace(row(0, "died"), alive=False),)
    said = describe(local_facts(dead, (), watched=True))
    assert said.text == "Stopped: no rank is running; the last step was 7"


def test_the_line_is_that_of_the_page_word_for_word(tmp_path: Path) -> None:
    """With the ranks of other nodes, and GPUs, as their agents report them."""
    server = ServerOptions(job="llama-pretrain-42")
    with Lighthouse(Options(heartbeat_timeout_s=600.0), server) as lighthouse:
        lighthouse.call(lambda service: whole_job(service, 16, "hung"))
        write_box(tmp_path, 3, 7)
        (tmp_path / "job.json").write_text(json.dumps({"lighthouse": lighthouse.address, "job": "x"}))
        view = Overview(tmp_path).look()
        page = json.loads(web_client.get(lighthouse.address, "/api/page", timeout_s=20).body)
    assert (
        view.line.startswith("Hung for ")
        and view.line.split(" s,")[1] == page["line"]["text"].split(" s,")[1]
    )
    assert (view.level, view.state) == ("bad", "hung") and view.incidents[0].endswith("in load_batch")
    assert [row.rank for row in view.rows] == list(range(16))
    assert (
        view.rows[1].doing == "blocked"
        and view.rows[1].gpu == "97 %, 61.0 GB"
        and view.rows[9].host == "gpu-node-001"
    )
    assert view.line in "\n".join(render(view))


def test_lines_fit_the_terminal_and_silent_ranks_come_first_when_not_all_fit() -> None:
    """A narrow and low window."""
    lines = list(render(VIEW, width=50, height=12))
    assert all(len(line) <= 50 for line in lines[1:])
    told = "incident 20260101-030000 (hang, open): `allranks diagnose job` prints the evidence, `allranks page job` opens the page"
    assert " ".join(map(str.strip, lines[-3:])) == told  # the line has the sentence of the incident already
    other = "20260101-020000 (death, closed): rank 0 died of SIGKILL"
    lines = list(render(replace(VIEW, incidents=(other,)), width=50, height=12))
    assert " ".join(map(str.strip, lines[-2:])) == f"incident {other}"  # the answer is not cut
    assert [line for line in lines if "waits for rank 1" in line]  # 80 columns cut "waits for r"
    many = JobView("job", "/x", 0.0, tuple(row(rank, "computes") for rank in range(40)))
    assert "… and 30 more" in "\n".join(render(many, height=16))


def test_finished_jobs_leave_no_more_than_a_limit_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that runs, one that was heard of a moment ago, and the one that starts stay, however large."""
    monkeypatch.setattr("allranks.blackbox.files.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    gone = 2**22  # no process has such a number
    ages = {"oldest": 9000, "old": 8000, "runs": 9999, "starts": 9998, "late": 0}
    for job, age in ages.items():
        folder = job_folder(job)
        folder.mkdir(parents=True)
        box = folder / f"{job}.a0.r0.p{os.getpid() if job == 'runs' else gone}.box"
        box.write_bytes(b"x" * 100_000)
        for path in (box, folder):
            os.utime(path, (time.time() - age,) * 2)
    assert remove_finished(job_folder("starts"), 150_000) == [job_folder("oldest")]
    assert {path.name for path in job_folder("x").parent.iterdir()} == {"old", "runs", "starts", "late"}


def test_a_folder_of_the_programs_own_with_the_jobs_name_does_not_hide_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job "train" whose outputs go to ./train: `status train` showed no ranks. A folder of black boxes is one itself."""
    monkeypatch.setattr("allranks.blackbox.files.base_folder", lambda: tmp_path / "base")
    boxes, elsewhere = tmp_path / "base" / "train", tmp_path / "train"
    boxes.mkdir(parents=True)
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no job 'train' on this node"):
        find_job("train")
    write_box(boxes, 0, 3)
    assert find_job("train") == boxes
    write_box(elsewhere, 0, 3)
    assert find_job("train") == Path("train")


def test_a_name_that_fits_no_job_or_several_lists_the_newest_jobs_and_only_those_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old jobs stood before the one that runs, by the alphabet, and nothing said that there were more."""
    monkeypatch.setattr("allranks.blackbox.files.base_folder", lambda: tmp_path)
    for age, job in enumerate(["train-b", "train-a", "trial", *(f"old-{n}" for n in range(8))]):
        (tmp_path / job).mkdir()
        os.utime(write_box(tmp_path / job, 0, 3), (time.time() - age,) * 2)
    with pytest.raises(InputError, match="2 jobs match 'train'") as several:
        find_job("train")
    assert several.value.hint == "One of: train-b, train-a."
    with pytest.raises(InputError, match="no job 'nosuch'") as none:
        find_job("nosuch")
    assert none.value.hint.startswith("Jobs on this node: train-b, train-a, trial, old-0,")
    assert none.value.hint.endswith("old-4 and 3 older ones.")


def test_jobs_of_another_user_are_told_of_with_the_command_that_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job runs as a service user: `allranks status` said that there was none, and to start one."""
    monkeypatch.setattr("allranks.blackbox.files.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InputError) as none:
        find_job(None)
    assert none.value.hint.startswith("Start one with")
    (tmp_path / f"allranks-{os.getuid()}").mkdir()
    # not its owner's: somebody made it in that user's name
    (tmp_path / f"allranks-{os.getuid() + 4242}").mkdir()
    with pytest.raises(InputError) as still:
        find_job("night")
    assert still.value.hint == none.value.hint
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    user = pwd.getpwuid(owner).pw_name
    for name in (None, "night"):
        with pytest.raises(InputError) as other:
            find_job(name)
        assert other.value.hint == f"Jobs of other users ({user}): as that user, `sudo -u {user} allranks …`."
    assert main(["dump", "--list"]) == 2
    error = capsys.readouterr().err
    assert f"`sudo -u {user} allranks …`" in error and "dump --list" not in error


def test_the_folder_of_a_job_shows_no_files_of_our_own_as_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`allranks diagnose JOB` listed its job.json, its token and the empty logs of its ranks."""
    box = Path(__file__).parents[1] / "record" / "cases" / "mixed_calls.r0.box"
    (tmp_path / "job.a0.r0.p7.box").write_bytes(box.read_bytes())
    (tmp_path / "logs").mkdir()
    for name, text in {"job.json": "{}", "token": "secret", "logs/stderr.log": ""}.items():
        (tmp_path / name).write_text(text)
    Explained().share([], tmp_path)  # stopped when no rank ran any more
    Explained().share([7], tmp_path / "logs")
    main(["diagnose", str(tmp_path)])
    assert "files" not in capsys.readouterr().out
    main(["diagnose", str(tmp_path), "-v"])
    assert "job.json: skipped" in capsys.readouterr().out


def test_closed_incidents_are_bounded_the_oldest_go_first(tmp_path: Path) -> None:
    """An open one stays, and so does the newest."""
    opened = [open_incident(tmp_path, kind="death", job="j", reason=str(number)) for number in range(4)]
    for number, one in enumerate(opened):
        (one.path / "boxes").mkdir()
        (one.path / "boxes" / "x.box").write_bytes(b"x" * 100_000)
        if number:
            one.update(closed=1.0)
    assert remove_oldest(tmp_path, opened[3].current.id, 250_000) == [opened[1].path, opened[2].path]
    assert [story["reason"] for story in read_incidents(tmp_path)] == ["0", "3"]


def test_a_file_that_somebody_laid_into_the_incidents_removes_nothing_elsewhere(tmp_path: Path) -> None:
    """In a folder that several people write to: an id that leads out of it, a link, a pipe, something that is not an incident."""
    incidents, precious = tmp_path / "incidents", tmp_path / "precious"
    precious.mkdir()
    (precious / "model.pt").write_bytes(b"x" * 100_000)
    for name, text in {
        "up": '{"id": "../precious", "closed": 1.0}',
        "absolute": json.dumps({"id": str(precious), "closed": 1.0}),
        "list": "[]",
        "deep": "[" * 100_000,
    }.items():
        (incidents / name).mkdir(parents=True)
        (incidents / name / "incident.json").write_text(text)
    (precious / "incident.json").write_text('{"id": "link", "closed": 1.0}')
    (incidents / "link").symlink_to(precious)
    (incidents / "pipe").mkdir()
    os.mkfifo(incidents / "pipe" / "incident.json")
    ours = open_incident(incidents, kind="death", job="j", reason="x")
    remove_oldest(incidents, ours.current.id, 1000)
    assert (precious / "model.pt").stat().st_size == 100_000 and ours.path.exists()
    assert all(isinstance(story, dict) for story in read_incidents(incidents))


def test_an_incident_is_written_in_any_locale(tmp_path: Path) -> None:
    """Its page has signs that ASCII lacks, and names of files may hold bytes that are no text."""
    script = "import sys; from pathlib import Path; from allranks.model.files import write_atomically; "
    script += "write_atomically(Path(sys.argv[1]), '5 \\xb5s in \\udcff')"
    plain = {**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", script, tmp_path / "page"], env=plain, timeout=300, check=True)
    assert (tmp_path / "page").read_bytes() == b"5 \xc2\xb5s in ?"


RANK = """
import os, allranks
allranks.record()
allranks.step(3)
os.kill(os.getpid(), 9) if os.environ["RANK"] == "1" else None
"""


@pytest.mark.usefixtures("forks")
def test_a_killed_rank_gets_its_torch_dump_from_its_black_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the agent ends: rank 1 was killed; rank 0 ended well, and is compared with it."""
    boxes = tmp_path / "boxes"
    for rank in "01":
        environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2", "ALLRANKS_DIR": str(boxes)}
        subprocess.run([sys.executable, "-c", RANK], env=environment, check=False, timeout=300)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    NodeAgent(Watch(WatchOptions(boxes, tmp_path / "incidents", "job"))).close()
    assert sorted(path.name for path in tmp_path.glob("trace_*")) == ["trace_0", "trace_1"]
    assert pickle.loads((tmp_path / "trace_1").read_bytes())["version"]


def test_a_group_without_a_description_is_called_by_its_name() -> None:
    """torch describes a group that nobody described as "undefined"."""
    trace = read_trace(Path(__file__).parents[1] / "record" / "cases" / "mixed_calls.r0.box")
    groups = tuple(replace(group, desc="undefined", name="2") for group in trace.groups)
    calls = trace.calls.copy()
    calls["state"][-1] = State.SCHEDULED
    assert [
        text.split(" of ")[1] for text in find_open(replace(trace, calls=calls, groups=groups)).values()
    ] == ["2"]


@pytest.mark.parametrize(
    "content", ["[]", "1", "[" * 100_000, "\x00", '{"job": ["x"], "lighthouse": 5, "incidents": 7}', None]
)
def test_a_job_file_of_others_may_hold_anything(content: str | None, tmp_path: Path) -> None:
    """None: a pipe, which nobody writes to."""
    if content is None:
        os.mkfifo(tmp_path / "job.json")
    else:
        (tmp_path / "job.json").write_text(content)
    story = tmp_path / "incidents" / "hang-1"
    story.mkdir(parents=True)
    (story / "incident.json").write_text(
        json.dumps({"id": "hang-1", "job": tmp_path.name, "verdict": "text"})
    )
    view = Overview(tmp_path).look()
    assert view.rows == ()
