"""The HTML page in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from allranks.cli import main

CASE = Path(__file__).parent / "cases" / "hangs" / "dataloader_worker_sleep"


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    """The page of a captured hang."""
    path = tmp_path / "page.html"
    assert main(["stacks", "--from", str(CASE), "--html", str(path), "--all-threads"]) == 1
    return path


def test_the_page_asks_nothing_of_the_network(page_file: Path) -> None:
    """No address of another file or host is in it."""
    text = page_file.read_text()
    assert "http://" not in text and "https://" not in text
    assert 'src="' not in text
    assert "Content-Security-Policy" in text


def test_the_tree_folds_and_the_flame_graph_zooms_in_a_browser(page_file: Path) -> None:
    """Verdict and table are shown, folding and zooming work, and nothing fails on the page."""
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    sync_api = pytest.importorskip("playwright.sync_api")
    if browser_path is None:
        pytest.skip("chromium is not installed")
    problems: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        page = browser.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(page_file.as_uri())
        assert "Rank 0 waits for its DataLoader" in page.inner_text("#sentence")
        assert page.locator("#ranks tr.bad td").first.inner_text().strip() == "0"
        page.click("[data-fold=shut]")
        assert page.locator(".tree details[open]").count() == 0
        page.click("[data-fold=open]")
        assert page.locator(".tree details[open]").count() == page.locator(".tree details").count()
        bar = page.locator(".flame div.bad").first
        before = bar.bounding_box()
        bar.click()
        after = bar.bounding_box()
        assert before is not None and after is not None and after["width"] > before["width"]
        browser.close()
    assert problems == []
