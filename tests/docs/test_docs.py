"""The documentation is true: generated pages, transcripts and links are current, every command shown can be parsed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from allranks.cli import COMMANDS, main, make_parser
from allranks.cli.parser import EXAMPLES

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/docs.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_script", ROOT / "scripts" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_and_transcripts_are_current(script: ModuleType) -> None:
    """`python scripts/docs.py` writes them anew."""
    stale = [path.name for path, text in script.pages().items() if path.read_text() != text]
    assert stale == []


@pytest.mark.everything
def test_the_tutorial_runs_and_shows_what_it_prints(script: ModuleType) -> None:
    """Every cell, in a fresh kernel; the page of the last cell is not stored."""
    import nbformat

    stored = script.outputs(nbformat.read(script.NOTEBOOK, as_version=4))
    assert script.outputs(script.executed_notebook()) == stored
    assert "rank 1 never entered all_reduce #7" in stored[0][0]


def test_every_variable_is_in_the_reference() -> None:
    """And none that the program does not read."""
    pattern = re.compile(r"\bALLRANKS_[A-Z_]+[A-Z]\b")
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    used = {name for text in sources for name in pattern.findall(text)}
    listed = set(pattern.findall((ROOT / "docs" / "reference" / "environment.md").read_text()))
    assert listed == used


def _anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """Files and headings of this repository; what `mkdocs build --strict` checks, without installing it."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in _anchors(found)):
            wrong.append(target)
    assert wrong == []


def test_every_file_that_the_architecture_names_exists() -> None:
    """Relative to the package, the repository or, behind "·" and "→", the folder of the name before."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|js|yaml))?)`", text)
    assert len(names) > 50
    assert [
        name for name in names if not ((ROOT / "src/allranks" / name).exists() or (ROOT / name).exists())
    ] == []


def _shown_commands() -> list[tuple[str, str]]:
    found = []
    for path in PAGES:
        for block in re.findall(r"```(?:console|bash|sh|)\n(.*?)```", path.read_text(), re.S):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found += [
                (path.name, line.removeprefix("$ "))
                for line in lines
                if re.match(r"(\$ )?allranks [a-z]", line)
            ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(("page", "line"), _shown_commands())
def test_every_command_that_is_shown_can_be_parsed(page: str, line: str) -> None:
    """Flags and arguments exist. Optional parts in brackets are left out."""
    bare = re.split(r"\s+(?:#|\||>|&)|\s{3,}(?=[^-\s])", line)[0]
    filled = re.sub(r"\bPID\b", "1", re.sub(r"\[[^\]]*\]|…", "", bare))
    words = shlex.split(filled)[1:]
    module = importlib.import_module(f"allranks.cli.{COMMANDS[words[0]][0]}")
    arranged = module.arrange_words(words) if hasattr(module, "arrange_words") else words
    assert make_parser(words[0], alone=True).parse_args(arranged).command == words[0]


def _python_blocks() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(ROOT)}-{number}", block)
        for path in PAGES
        for number, block in enumerate(re.findall(r"```python[^\n]*\n(.*?)```", path.read_text(), re.S))
        if path.parent.name != "reference"  # signatures
    ]


@pytest.mark.parametrize(
    ("name", "block"), _python_blocks(), ids=lambda value: value if len(value) < 60 else ""
)
def test_every_python_block_is_python_and_imports_what_exists(name: str, block: str) -> None:
    """Names of ours; libraries of others may be missing here."""
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "allranks":
            if node.module.startswith("allranks.integrations."):
                pytest.importorskip(node.module.rpartition(".")[2], reason="its library")
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "allranks"
        ):
            home = importlib.import_module("allranks")
            assert hasattr(home, node.attr) or importlib.util.find_spec(f"allranks.{node.attr}"), node.attr


def test_the_numbers_of_the_readme_are_in_the_table_of_performance() -> None:
    """With their script: one place, and the README repeats it."""
    readme = (ROOT / "README.md").read_text()
    table = (ROOT / "docs" / "performance.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", readme.partition("## Four numbers")[2], re.M)
    assert len(rows) == 4
    missing = [
        (what, number)
        for what, *cells in rows
        for cell in cells
        for number in re.findall(r"[\d.]+", cell)
        if number not in table
    ]
    assert missing == []


def test_numbers_come_from_kept_results_and_others_stay(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark that is measured replaces its lines; one that was not leaves them alone."""
    numbers = script.docs_numbers
    page = "<!-- numbers: readme -->\n| | allranks | peer |\n|---|---|---|\n"
    kept = "| recording one collective, without / with stacks | 1.8 µs | 3.2 µs |\n"
    killed = "| kill -9 of a replica until the next committed step | {} | {} |\n"
    monkeypatch.setattr(numbers, "RESULTS", tmp_path)
    before = f"{page}{killed.format('9 s', 'torchft 5 s')}{kept}\nend"
    assert numbers.with_numbers(before) == before
    found = {"allranks_kill_s": 0.0281, "allranks_kill_worst_s": 0.05, "allranks_leave_s": 0.01}
    steps = {"step_allranks_ms": 1.9, "step_plain_ms": 1.5}
    result = {
        "command": "benchmarks/recovery.py --quick",
        "date": "2026-11-16",
        "numbers": {**found, **steps},
        "machine": {"load": 0.3},
    }
    peer = {"numbers": {"kill_s": 5.07, "leave_s": 5.3, "step_over_plain_ms": 1.8}}
    (tmp_path / "recovery.json").write_text(json.dumps(result))
    (tmp_path / "torchft.json").write_text(json.dumps(peer))
    assert numbers.with_numbers(before) == f"{page}{killed.format('0.028 s', 'torchft 5.07 s')}{kept}\nend"
    table = numbers.with_numbers("<!-- numbers: measured -->\n")
    assert "| 0.028 s (0.050) | torchft 5.07 s | `recovery.py` | 2026-11-16 |" in table


_RUNS_ANYWHERE = re.compile(
    r"allranks (?:(?:diagnose|frtrace|dump) dumps/(?!\w*rank3)|completion (?:bash|zsh|fish)|config schema|doctor explain logs/)"
)


def _commands_that_run_anywhere() -> list[str]:
    """Those that need nothing but dumps or logs, from every page."""
    lines = [re.split(r"\s+(?:#|\||>)|\s{3,}", line)[0] for _, line in _shown_commands()]
    return sorted({line for line in lines if _RUNS_ANYWHERE.match(line) and not re.search(r"[…\[]", line)})


@pytest.mark.parametrize("line", _commands_that_run_anywhere())
def test_a_shown_command_that_needs_only_dumps_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands in the docs: 0, or 1 for the fault that is in the dumps."""
    (tmp_path / "dumps").symlink_to(ROOT / "tests" / "diagnose" / "cases" / "nccl_missing_rank" / "dumps")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").write_text("[rank0]: torch.OutOfMemoryError: CUDA out of memory.\n")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) in (0, 1)


def _room(folder: Path) -> None:
    """What the examples of the help name: a job file, texts, a box, and a store of checkpoints."""

    from tests.box_files import box_bytes

    from allranks.checkpoint import NVMeBackend
    from checkpoint.jobs import make_state
    from pages.gallery import make_traces

    (folder / "job.yaml").write_text((ROOT / "examples" / "job.yaml").read_text())
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text('{"text": "abc"}\n')
    (folder / "dumps").mkdir()
    (folder / "dumps" / "rank3.box").write_bytes(box_bytes(make_traces(1, 30)[0]))
    for step in (400, 500):
        NVMeBackend(folder / "nvme" / "run-7").save(make_state(step), f"checkpoint_step_{step:08d}")


@pytest.mark.parametrize("command", ["checkpoint", "config", "index", "doctor"])
def test_the_examples_of_the_help_run_in_their_order(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that need no job; folders stand for a disk of ours and for a bucket."""
    _room(tmp_path)
    monkeypatch.chdir(tmp_path)
    for line in EXAMPLES[command]:
        if "explain" in line:
            continue  # needs logs: run with the commands of the pages
        if "node1.json" in line:
            assert main(["doctor", "--json"]) in (0, 1)
            checked = capsys.readouterr().out
            for name in ("node1.json", "node2.json"):
                Path(name).write_text(checked)
        bare = re.split(r"\s+(?:#|>)", line)[0]
        here = bare.replace("/nvme/", f"{tmp_path}/nvme/").replace("s3://bucket/", f"{tmp_path}/bucket/")
        code = main(shlex.split(here)[1:])
        assert code == 0 or (code == 1 and command == "doctor"), (line, capsys.readouterr().err)
        capsys.readouterr()
