"""The report in words and as the public JSON object."""

from __future__ import annotations

import json

from allranks.model.diagnosis import Diagnosis, FileNote, Finding
from allranks.model.trace import Frame
from allranks.report import as_json, text

STACK = (
    Frame("all_reduce", "/opt/lib/site-packages/torch/distributed/c10d.py", 9),
    Frame("sync", "/home/me/train.py", 44),
)
VERDICT = Finding(
    "missing_rank", (5,), "rank 5 (node7) never entered all_reduce #1042 of group dp_0; 7 ranks have waited 31 s; it is at data.py:88",
    "root", "dp_0", 1042, 0.97, "data.py:88", (0, 1, 2, 3, 4, 6, 7), 31.0, (((0, 1, 2, 3, 4, 6, 7), STACK),),
    ("ranks 0-4, 6, 7 entered it",), ("where rank 5 is now: run `allranks stacks` on node7",), ("look at data.py:88",),
)  # fmt: skip
FOLLOWS = Finding(
    "missing_rank",
    (2,),
    "ranks 8-15 wait in all_reduce #3 of group tp_1 for rank 2",
    "consequence",
    "tp_1",
    3,
)
WARNING = Finding("missing_dump", (), "no file of rank 9")
FAULT = Diagnosis(
    "fault", VERDICT, (VERDICT, FOLLOWS, WARNING),
    (FileNote("trace_5", 5, "torch pickle 2.10", "ok"), FileNote("core.1", None, "", "skipped", "not a dump")),
    16, tuple(range(16)), ("16 of 16 ranks, 3 groups, 64 calls",),
)  # fmt: skip


def test_the_report_begins_with_the_verdict_and_ends_with_what_was_read() -> None:
    """Verdict, evidence, stacks, consequences, what is missing, what to do: in this order."""
    assert list(text.render(FAULT)) == [
        "rank 5 (node7) never entered all_reduce #1042 of group dp_0; 7 ranks have waited 31 s; it is at data.py:88",
        "cause missing_rank, confidence 97%, group dp_0 #1042, at data.py:88",
        "",
        "evidence",
        "  - ranks 0-4, 6, 7 entered it",
        "",
        "stacks",
        "  ranks 0-4, 6, 7 (waiting)",
        "    /home/me/train.py:44 in sync",
        "    … 1 more frames (--print_stack_trace)",
        "",
        "follows from it",
        "  - ranks 8-15 wait in all_reduce #3 of group tp_1 for rank 2",
        "",
        "missing evidence",
        "  - where rank 5 is now: run `allranks stacks` on node7",
        "",
        "what to do",
        "  - look at data.py:88",
        "",
        "also",
        "  - no file of rank 9",
        "",
        "files",
        "  - core.1: skipped, unknown, not a dump",
        "",
        "16 of 16 ranks, 3 groups, 64 calls",
    ]


def test_a_healthy_job_is_said_in_one_line() -> None:
    """Plus what was read."""
    lines = list(text.render(Diagnosis("ok", None, summary=("4 of 4 ranks",))))
    assert lines == [
        "nothing wrong: the calls of all ranks fit together and none is stuck",
        "",
        "4 of 4 ranks",
    ]


def test_whole_stacks_on_request() -> None:
    """Frames of torch included."""
    lines = list(text.render(FAULT, text.TextOptions(full_stacks=True)))
    assert "    /opt/lib/site-packages/torch/distributed/c10d.py:9 in all_reduce" in lines


def test_colour_only_when_asked_for() -> None:
    """Escape codes never reach a pipe by themselves."""
    assert not any("\x1b" in line for line in text.render(FAULT))
    assert next(iter(text.render(FAULT, text.TextOptions(color=True)))).startswith("\x1b[1;31m")


def test_a_hostile_name_cannot_steer_the_terminal() -> None:
    """Control characters of a dump are shown as question marks."""
    evil = Finding(
        "missing_rank", (1,), "rank 1 \x1b[2J\x07 gone\nnothing wrong", "root", "g\x1b]0;x", 1, 0.9
    )
    lines = list(text.render(Diagnosis("fault", evil, (evil,), summary=("",))))
    assert not any("\x1b" in line or "\n" in line or "\x07" in line for line in lines)


def test_the_json_object_is_the_contract() -> None:
    """Every promised key, with the promised types."""
    body = json.loads(as_json.render(FAULT))
    assert (body["schema"], body["status"]) == (1, "fault")
    assert {k: body["verdict"][k] for k in ("cause", "ranks", "group", "sequence", "confidence", "where", "sentence")} == {
        "cause": "missing_rank", "ranks": [5], "group": "dp_0", "sequence": 1042, "confidence": 0.97,
        "where": "data.py:88", "sentence": VERDICT.sentence,
    }  # fmt: skip
    assert [f["severity"] for f in body["findings"]] == ["root", "consequence", "warning"]
    assert set(body["findings"][0]) >= {"cause", "ranks", "group", "sequence", "severity", "sentence"}
    assert body["files"][0] == {
        "path": "trace_5",
        "rank": 5,
        "kind": "torch pickle 2.10",
        "status": "ok",
        "note": "",
    }


def test_the_verdict_is_null_when_all_is_well() -> None:
    """As promised."""
    assert json.loads(as_json.render(Diagnosis("ok", None)))["verdict"] is None
