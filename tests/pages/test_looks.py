"""Every report in a real browser: phones, laptops, large screens, light and dark, small and large jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages.gallery import Visit, gallery, running_browser


@pytest.fixture(scope="module")
def browser(keep_child: set[int]) -> Iterator[Any]:
    """One browser for all pages."""
    with running_browser(keep_child) as running:
        yield running


@pytest.mark.parametrize("ranks", [3, 64, 1024])
def test_no_report_overflows_cuts_words_or_is_too_faint(browser: Any, tmp_path: Path, ranks: int) -> None:
    """At 400, 1,000 and 1,600 px, light and dark, without a request to elsewhere."""
    flaws = []
    for path in gallery(tmp_path, (ranks,)):
        visit = Visit(browser, path.as_uri())
        for width in (400, 1000, 1600):
            for scheme in ("light", "dark"):
                flaws += [f"{path.stem} at {flaw}" for flaw in visit.flaws(width, scheme)]
        assert visit.errors == []
        assert visit.requests == [path.as_uri()]
        visit.page.close()
    assert flaws == []


def test_every_report_says_job_host_date_and_version_and_can_be_copied_from(
    browser: Any, tmp_path: Path
) -> None:
    """The answer first, then what it is about; the code line of the guilty rank stands beside its stack."""
    for path in gallery(tmp_path, (3,)):
        visit = Visit(browser, path.as_uri())
        about = visit.page.inner_text("#about")
        assert (
            "llama-pretrain-42" in about
            and "node0" in about
            and "2023-11-14" in about
            and "allranks 0." in about
        )
        assert visit.page.inner_text("#guilty .pill").lower() == "live stack"
        assert "gallery.py:40" in visit.page.inner_text("#guilty .source figcaption")
        assert visit.page.locator("#guilty .source .hit").count() == 1
        assert "gallery.py:40" in visit.page.inner_text("#todo")
        visit.page.close()
