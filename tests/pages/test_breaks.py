"""Where lines of a page may break."""

from __future__ import annotations

import re

import pytest

from allranks import pages


@pytest.mark.parametrize("name", ["breaks", "sentence"])
@pytest.mark.parametrize(
    "flag", ["--replicas", "allranks run --first-replica", "--no-lighthouse-of-a-long-name"]
)
def test_a_flag_stays_on_one_line(name: str, flag: str) -> None:
    """With the command before it; browsers break behind each dash."""
    text = f"rank 1 is gone <now>: start again with {flag} 4, see /a/long/path/of--the/incident_folder"
    made = pages._environment().from_string("{{ text | " + name + " }}").render(text=text)
    assert f'<span class="whole">{flag}</span> 4' in made
    assert made.count("whole") == 1 and "&lt;now&gt;" in made
    assert re.sub(r"<(?:wbr|/?span[^>]*)>", "", made) == text.replace("<now>", "&lt;now&gt;")


def test_a_short_command_stays_on_one_line_and_a_long_one_may_wrap() -> None:
    short, long = "allranks run --replicas 4", "allranks checkpoint ls s3://bucket/of/a/very/long/name"
    template = pages._environment().from_string("{{ text | sentence }}")
    assert f'<code class="whole">{short}</code>.' in template.render(text=f"Start with `{short}`.")
    assert "<code>allranks checkpoint ls s3://" in template.render(text=f"List them: `{long}`.")
