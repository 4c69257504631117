"""The documentation stays short, plain and without a diary: words per page, length of sentences, phrases, navigation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
#: made by scripts/docs.py from the program: as long as the program is large
GENERATED = {path for path in (DOCS / "reference").glob("*.md") if path.name != "environment.md"}
WRITTEN = sorted(set(DOCS.rglob("*.md")) - GENERATED)
LONGEST_PAGE, LONGEST_SENTENCE, ALL_WORDS = 1500, 45, 32_000
DIARY = ("not run", "was measured by", "in the run before", "since then", "device time", "draft")


def words(path: Path) -> int:
    return len(path.read_text().split())


def sentences(text: str) -> list[str]:
    """Of prose: without front matter, code, tables, comments and headings; an item of a list is one."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    text = re.sub(r"```.*?```|<!--.*?-->", "\n\n", text, flags=re.S)
    lines = ["" if re.match(r"\s*(\||#|!\[)", line) else line for line in text.splitlines()]
    found: list[str] = []
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        found += re.split(r"(?<=[.!?])[\s)\"*]+(?=[A-Z`\[*(])", " ".join(part.split()))
    return [one for one in found if one]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    assert words(page) <= LONGEST_PAGE
    long = [one for one in sentences(page.read_text()) if len(one.split()) > LONGEST_SENTENCE]
    assert long == []


def test_all_pages_together_readme_changelog_and_architecture_are_short() -> None:
    assert sum(map(words, WRITTEN)) <= ALL_WORDS
    limits = {"README.md": 500, "CHANGELOG.md": 2500, "docs/architecture.md": 1200}
    assert {name: words(ROOT / name) for name, limit in limits.items() if words(ROOT / name) > limit} == {}


@pytest.mark.parametrize(
    "page",
    [*WRITTEN, *sorted(GENERATED), ROOT / "README.md", ROOT / "CHANGELOG.md"],
    ids=lambda path: path.name,
)
def test_no_page_is_a_diary(page: Path) -> None:
    text = " ".join(page.read_text().lower().split())
    assert [phrase for phrase in DIARY if re.search(rf"\b{phrase}\b", text)] == []


def test_the_navigation_has_every_page_in_at_most_seven_sections() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert len(nav) <= 7
    shown = [page for part in nav for entry in part.values() for page in _pages(entry)]
    assert sorted(shown) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def _pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    assert isinstance(entry, list)
    return [page for one in entry for inner in one.values() for page in _pages(inner)]


def test_every_result_file_names_its_script_and_its_day() -> None:
    """A number on a page can be traced."""
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        if path.name in ("gpu.json", "compatibility.json"):
            continue  # slices and tests: each has its own date
        found = json.loads(path.read_text())
        assert found["command"] and re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]), path.name
