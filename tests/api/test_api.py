"""allranks from Python and notebooks: the answers of the commands as objects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import allranks
from allranks.errors import AllranksError, InputError
from allranks.model.cluster import JobView, RankRow

TESTS = Path(__file__).parent.parent
DUMPS = TESTS / "diagnose" / "cases" / "nccl_missing_rank"
CAPTURES = TESTS / "stacks" / "cases" / "hangs" / "dataloader_worker_sleep"


def test_a_diagnosis_has_verdict_findings_and_json() -> None:
    """The same as the command says."""
    result = allranks.diagnose(DUMPS)
    assert result.status == "fault" and result.verdict.ranks == (2,)
    assert result.sentence.startswith("rank 2 never entered all_reduce #8")
    assert result.findings[0] is result.verdict
    body = json.loads(result.to_json())
    assert body["verdict"]["cause"] == "missing_rank" and body["schema"] == 1
    assert str(result).splitlines()[0] == result.sentence and "rank 2 never entered" in repr(result)


def test_the_calls_become_a_table() -> None:
    """One row per call, with ranks, names, times and lines."""
    pytest.importorskip("pandas")
    result = allranks.diagnose([str(DUMPS)])
    table = result.calls.to_pandas()
    assert len(table) == len(result.calls) == 34
    assert set(table["rank"]) == {0, 1, 2, 3} and set(table["op"]) == {"all_reduce"}
    assert table["created"].dt.year.min() > 2000 and table["where"].str.contains("nccl_cases.py").all()
    assert (table.loc[table["state"] == "completed", "ms"] >= 0).all()


def test_what_is_not_known_is_missing_in_every_kind_of_table() -> None:
    """No -1 that a mean would count."""
    pytest.importorskip("pandas")
    pytest.importorskip("polars")
    calls = allranks.diagnose(allranks.examples.missing_rank).calls
    assert calls.to_pandas()["peer"].isna().all() and calls.to_pandas()["rank"].notna().all()
    assert calls.to_arrow()["peer"].null_count == len(calls)
    frame = calls.to_polars()
    assert frame["peer"].null_count() == len(calls) and frame["completed"].null_count() >= 3
    assert frame["created"].dt.year().min() > 2000


def test_a_diagnosis_draws_itself() -> None:
    """A bar for each call, red where it never finished."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    result = allranks.diagnose(allranks.examples.missing_rank)
    axes = result.plot()
    colours = [tuple(c.get_facecolor()[0]) for c in axes.collections if len(c.get_facecolor())]
    assert axes.get_title() == result.sentence and len(axes.collections) == 8
    assert len(set(colours)) == 2
    assert len(repr(result.verdict)) < 300
    row = RankRow(0, 1, "n", True, 7, 14, 3.0, "computes")
    view = JobView("j", "/x", 0.0, (row,) * 1024, line="Training: step 7")
    assert repr(view) == "<JobView j: Training: step 7; 1,024 of 1,024 ranks run>"


def test_the_shipped_dumps_have_the_verdicts_that_they_promise() -> None:
    """Without files of one's own."""
    found = {
        name: allranks.diagnose(getattr(allranks.examples, name)) for name in ("missing_rank", "cascade")
    }
    assert found["missing_rank"].verdict.ranks == (2,) and found["cascade"].verdict.ranks == (3,)
    assert allranks.diagnose(allranks.examples.pipeline_healthy).status == "ok"


def test_jobs_of_this_node_and_their_ranks() -> None:
    """As `allranks status` shows them."""
    name = f"api-{uuid.uuid4()}"
    code = f"import allranks; allranks.record(job={name!r}, rank=0, world_size=1); allranks.step(3)"
    env = {k: v for k, v in os.environ.items() if k != "ALLRANKS_DIR"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=env)
    (job,) = [one for one in allranks.jobs() if one.name == name]
    try:
        assert (job.ranks, job.running) == (1, False)
        assert [row.step for row in allranks.status(name).rows] == [3]
    finally:
        shutil.rmtree(job.folder)
    with pytest.raises(InputError, match="no job"):
        allranks.status(name)


def test_a_notebook_shows_the_whole_page_apart_from_itself(tmp_path: Path) -> None:
    """In a frame of its own, so that styles and scripts of neither reach the other."""
    result = allranks.diagnose(DUMPS)
    shown = result._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "<script" not in shown
    result.to_html(tmp_path / "page.html")
    assert "never entered" in (tmp_path / "page.html").read_text()


def test_stacks_of_captures_are_an_object_too() -> None:
    """Sentence, culprits, JSON and page."""
    result = allranks.stacks(CAPTURES)
    assert result.culprits == (0,) and "DataLoader" in result.sentence
    assert json.loads(result.to_json())["culprits"] == [0]
    assert "iframe" in result._repr_html_() and str(result)


def test_the_index_of_a_checkpoint_is_read_without_its_tensors(tmp_path: Path) -> None:
    """By store or by name; nothing there is an error that says so."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    from allranks.cli import main

    safetensors.save_file({"w": torch.zeros(4, 3), "b": torch.zeros(3)}, tmp_path / "m.safetensors")
    (tmp_path / "store").mkdir()
    assert (
        main(
            ["checkpoint", "import", str(tmp_path / "m.safetensors"), str(tmp_path / "store"), "--step", "7"]
        )
        == 0
    )
    index = allranks.load_checkpoint_index(tmp_path / "store")
    assert index.step == 7 and index.bytes == 60
    shapes = {
        name.rpartition(".")[2].rpartition("/")[2]: entry["shape"] for name, entry in index.tensors.items()
    }
    assert shapes == {"w": [4, 3], "b": [3]}
    (name,) = (
        path.name for path in (tmp_path / "store").iterdir() if path.name.startswith("checkpoint_step")
    )
    assert allranks.load_checkpoint_index(tmp_path / "store" / name).tensors == index.tensors
    assert "<table>" in index._repr_html_() and json.loads(index.to_json())["step"] == 7
    with pytest.raises(AllranksError, match="no checkpoint"):
        allranks.load_checkpoint_index(tmp_path)


def test_a_wrong_path_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Not an empty answer."""
    with pytest.raises(InputError, match="nowhere"):
        allranks.diagnose(tmp_path / "nowhere")


def test_importing_the_package_loads_nothing_heavy() -> None:
    """Neither numpy nor jinja2 nor typing; the packages can be called whichever way they were imported."""
    code = (
        "import sys; before = set(sys.modules); import allranks; new = set(sys.modules) - before; "
        "assert not {'numpy', 'jinja2', 'torch', 'typing'} & new, new; "
        "import allranks.diagnosis; from allranks.stacktraces import classify; "
        "assert callable(allranks.diagnose) and callable(allranks.stacks); assert 'jinja2' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        check=True,
        timeout=300,
    )
