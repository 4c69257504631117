"""The ledger's file: small, readable after any crash, and what it says adds up."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.cli import main
from allranks.ledger.accounts import Accounts
from allranks.ledger.agent import LedgerKeeper
from allranks.ledger.file import find_ledgers, ledger_path, line_of, read_ledger
from allranks.ledger.records import Booked, Outage, Passed, Record, RunEnd, RunStart
from allranks.ledger.report import end_line, render_page, render_text, to_object
from allranks.ledger.summary import account, by_window
from goodput.timelines import T0, PaperRank


def keep(folder: Path, seconds: float, *, close: bool = True, began: float = T0) -> LedgerKeeper:
    """A run of four ranks for this long, sampled twice a second."""
    keeper = LedgerKeeper(folder, "job/1", "node.a", "whole_job")
    keeper.start(began)
    ranks = [PaperRank(n) for n in range(4)]
    for rank in ranks:
        rank.start(2.0)
        rank.steps(4.0, 0, 1000, 1.0)
    for turn in range(round(seconds * 2)):
        samples = [sample for rank in ranks if (sample := rank.at(turn / 2)) is not None]
        keeper.observe(samples, range(4), began + turn / 2)
    if close:
        keeper.close(began + seconds)
    return keeper


def test_rows_add_up_to_the_wall_clock(tmp_path: Path) -> None:
    keep(tmp_path, 120.0)
    found = account([read_ledger(path) for path in find_ledgers(tmp_path, "job/1")])
    assert (found.job, found.ranks, found.runs, found.crashed) == ("job/1", 4, 1, 0)
    assert found.rank_seconds == pytest.approx(4 * 120.0, rel=0.001)
    assert found.goodput == pytest.approx(115 / 120, abs=0.01)


def test_a_killed_agent_loses_seconds_and_the_next_run_continues_the_file(tmp_path: Path) -> None:
    killed = keep(tmp_path, 60.0, close=False)  # the agent is killed: nothing is closed
    assert killed._file is not None
    killed._file._release()  # by the kernel
    (path,) = find_ledgers(tmp_path)
    assert account([read_ledger(path)]).rank_seconds == pytest.approx(4 * 55.0, abs=4 * 5.5)
    keep(tmp_path, 60.0, began=T0 + 200.0)
    found = account([read_ledger(path)])
    assert (found.runs, found.crashed, found.damaged) == (2, 1, 0)
    assert found.rank_seconds == pytest.approx(4 * 115.0, abs=4 * 5.5)
    assert found.running_s == pytest.approx(115.0, abs=5.5)
    rows = [one for one in read_ledger(path).records if isinstance(one, Booked)]
    assert len({(row.begin, row.ranks) for row in rows}) == len(rows)  # nothing twice


def test_an_agent_that_is_killed_at_once_has_all_its_ranks_in_the_ledger(tmp_path: Path) -> None:
    """Boxes appear one after the other: the first look that sees one of them is not written."""
    keeper = LedgerKeeper(tmp_path, "job", "n", "whole_job")
    keeper.start(T0)
    ranks = [PaperRank(0), PaperRank(1)]
    for rank in ranks:
        rank.start(1.0 + rank.number)
    for turn in range(1, 7):
        samples = [sample for rank in ranks if (sample := rank.at(turn / 2)) is not None]
        keeper.observe(samples, range(2), T0 + turn / 2)
    found = account([read_ledger(path) for path in find_ledgers(tmp_path)])
    assert (
        found.ranks == 2
        and found.rank_seconds == pytest.approx(2 * found.running_s)
        and found.running_s >= 2.0
    )


@pytest.mark.parametrize("cut", [2, 7, 20])
def test_a_line_that_is_cut_or_changed_costs_only_itself(tmp_path: Path, cut: int) -> None:
    keep(tmp_path, 60.0)
    (path,) = find_ledgers(tmp_path)
    whole = read_ledger(path)
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    assert len(read_ledger(path).records) == len(whole.records) - 1
    lines = data.split(b"\n")
    lines[2] = lines[2].replace(b"1", b"2", 1)
    path.write_bytes(b"\n".join(lines))
    damaged = read_ledger(path)
    assert (len(damaged.records), damaged.damaged) == (len(whole.records) - 1, 1)
    path.write_bytes(data[:-cut])  # the next run begins a line of its own
    keep(tmp_path, 20.0, began=T0 + 100.0)
    assert account([read_ledger(path)]).runs == 2


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    keeper = keep(tmp_path / "file" / "below", 20.0)
    assert [line.message[:28] for line in caplog.records] == ["the goodput ledger is not up"]
    assert keeper.rows  # and the line at the end of the run is still there


def test_a_full_disk_loses_nothing_once_there_is_room_again(tmp_path: Path) -> None:
    keeper = keep(tmp_path, 20.0, close=False)
    assert keeper._file is not None
    path, hidden = keeper._file.path, tmp_path / "hidden"
    path.rename(hidden)
    path.mkdir()  # appending fails as on a full disk
    ranks = [PaperRank(n) for n in range(4)]
    for rank in ranks:
        rank.start(2.0)
        rank.steps(4.0, 0, 1000, 1.0)
    for turn in range(40, 80):
        keeper.observe([rank.at(turn / 2) for rank in ranks], range(4), T0 + turn / 2)  # type: ignore[misc]
    path.rmdir()
    hidden.rename(path)
    keeper.close(T0 + 40.0)
    assert account([read_ledger(path)]).rank_seconds == pytest.approx(4 * 40.0, rel=0.001)


def month(ranks: int, per_node: int, days: int) -> list[tuple[str, list[Record]]]:
    """What agents write in a month: a row every half hour, saves, waits and an incident every two hours."""
    ledgers = []
    for node in range(ranks // per_node):
        name = f"node{node:04d}"
        low = node * per_node
        text = f"{low}-{low + per_node - 1}"
        records: list[Record] = [RunStart(T0, "month", name, "whole_job")]
        at, number = T0, 0
        while at < T0 + days * 86400:
            number += 1
            seconds = {"useful": 1700.0 * per_node, "saving": 60.0 * per_node, "waiting:5": 40.0 * per_node}
            records.append(Booked(number, at, at + 1800, text, seconds, number * 100, {"saving": 3}))
            if number % 3 == 1:
                keys = [(7 << 32) + number * 1000 + one for one in range(4)]
                records.append(Passed(at, at + 1800, 1000, keys, [900 + node] * 4, [low] * 4, [per_node] * 4))
            at += 1800
            if number % 4 == 0:
                id = f"i{number}"
                records.append(
                    Outage(id, "hang", "rank_died", name, (5,), at, at + 10, at + 12, at + 60, at + 60)
                )
                number += 1
                stalled = {f"stalled:{id}": 60.0 * per_node}
                records.append(Booked(number, at, at + 60, text, stalled, number * 100))
                at += 60
        records.append(RunEnd(at))
        ledgers.append((name, records))
    return ledgers


def test_a_month_of_a_large_job_is_small_and_read_in_seconds(tmp_path: Path) -> None:
    """The limit for a thousand ranks is 5 s (benchmarks/goodput.py measures it): here an eighth of them."""
    for name, records in month(128, 8, 30):
        ledger_path(tmp_path, "month", name).write_bytes(b"".join(line_of(one) for one in records))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 8 << 20
    begin = time.process_time()
    found = account([read_ledger(path) for path in find_ledgers(tmp_path)])
    assert time.process_time() - begin < 30.0
    assert found.ranks == 128
    assert found.rank_seconds == pytest.approx(found.running_s * 128, rel=0.005)
    assert sum(found.stalled_by.values()) == pytest.approx(found.seconds["stalled"])
    assert "".join(render_text(found, 2.5, 86400.0))
    assert len(render_page(found, 2.5, 0.0)) < 3 << 20


def test_the_windows_of_a_long_job_grow(tmp_path: Path) -> None:
    """A rank that trains for ten days leaves a few hundred rows."""
    accounts = Accounts(T0)
    rank = PaperRank(0)
    rank.start(0.0)
    rank.mark(1.0, 0)
    rows = []
    rank.mark(2.0, 1)
    sample = rank.at(2.0)
    assert sample is not None
    for minute in range(5, 10 * 1440, 5):
        now = T0 + 60.0 * minute + 2
        sample = replace(sample, step=minute + 2, step_ns=round((now - 1) * 1e9))
        rows += accounts.observe(now, [sample])
    assert 300 < len(rows) < 700
    assert sum(sum(row.seconds.values()) for row in rows) == pytest.approx(10 * 86400, rel=0.01)


def test_the_report_begins_with_the_answer(tmp_path: Path) -> None:
    keep(tmp_path, 120.0)
    found = account([read_ledger(path) for path in find_ledgers(tmp_path)])
    assert next(iter(render_text(found, 0.0))).startswith(
        "95.8% of the time of 4 ranks was useful training (step 115"
    )
    assert end_line(found).startswith("goodput 95.8%; starting 3.3%")
    body = to_object(found, 2.0, 60.0)
    assert body["goodput"] == pytest.approx(0.958, abs=0.01)
    assert sum(body["shares"].values()) == pytest.approx(1.0)  # type: ignore[attr-defined]
    windows = by_window(found, 60.0)
    assert sum(sum(states.values()) for _, states in windows) == pytest.approx(found.rank_seconds)
    assert "<script>" in render_page(found, 2.0, T0)


def test_a_file_without_a_row_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a job of 0 ranks: damaged, cut to nothing, or another kind of file."""
    (tmp_path / "bad.ledger").write_text("garbage\n")
    assert main(["goodput", str(tmp_path / "bad.ledger")]) == 2
    assert "no row of a ledger" in capsys.readouterr().err


def test_python_and_the_command_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import allranks
    from allranks.cli import main

    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "allranks-incidents", 60.0)
    assert main(["goodput", "job/1", "--json", "--html", "page.html"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema"] == 1  # as the reference promises for every command
    assert allranks.goodput("job/1").goodput == pytest.approx(shown["goodput"])
    assert "Where the time went" in (tmp_path / "page.html").read_text()
    assert main(["advise", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert main(["goodput", "no-such-job"]) == 2


def test_metrics_get_the_seconds_by_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from allranks.lighthouse.metrics import render, spent_metrics

    assert spent_metrics() == []
    monkeypatch.setattr("allranks.lighthouse.metrics.SPENT", [keep(tmp_path, 60.0).spent])
    lines = list(render(spent_metrics()))
    assert any(line.startswith("allranks_goodput_ratio 0.9") for line in lines)
    assert any(line.startswith('allranks_rank_seconds{state="useful"} 2') for line in lines)
