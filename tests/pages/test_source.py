"""The code that a page shows around a line: the writer of the dump has chosen the path."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.pages import FrameLine, read_source


def test_code_is_shown_without_secrets(tmp_path: Path) -> None:
    """The page of an incident is open to anyone who reaches the lighthouse."""
    script = tmp_path / "train.py"
    script.write_text('api_key = "hidden-1"\nstore = "https://me:hidden-2@host/x"\ntrain()\n')
    found = read_source([FrameLine("main", str(script), 3)])
    assert found is not None
    assert [text for _, text, _ in found.lines] == [
        'api_key = "***"',
        'store = "https://me:***@host/x"',
        "train()",
    ]


@pytest.mark.parametrize("target", ["credentials", "train.py/..", "loop.py"])
def test_a_link_that_leads_to_something_else_is_not_followed(target: str, tmp_path: Path) -> None:
    """Another user's /tmp/x.py may be a link to what only the reader of the dump may read."""
    (tmp_path / "credentials").write_text("hidden\n")
    link = tmp_path / ("loop.py" if target == "loop.py" else "train.py")
    link.symlink_to(tmp_path / target)
    assert read_source([FrameLine("main", str(link), 1)]) is None
