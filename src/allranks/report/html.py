"""One page that opens from file:// with no network: verdict, timeline of ranks x time, groups, stacks, search.

Everything from a dump is data: it travels as JSON or typed columns and is put on the page as text. The content
security policy allows exactly one script, by its hash, so that a hostile name cannot become code.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files

from allranks.model.diagnosis import Diagnosis
from allranks.model.trace import RankTrace
from allranks.report import as_json
from allranks.report.text import short
from allranks.report.timeline import Timeline, build_timeline, pack

MAX_LISTED = 500
COLUMNS = ("starts", "lengths", "kinds", "seqs", "states", "stacks")


def render(diagnosis: Diagnosis, traces: Sequence[RankTrace]) -> Iterator[str]:
    """The page, in parts."""
    here = files("allranks.report")
    script, style = (here / "page.js").read_text("utf-8"), (here / "page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    body = (here / "page.html").read_text("utf-8")
    head, rest = body.split("<!--style-->")
    before_data, after_data = rest.split("<!--data-->")
    yield head.replace("SCRIPT_HASH", f"sha256-{digest}")
    yield f"<style>{style}</style>"
    yield before_data
    yield from _data(diagnosis, traces)
    yield f"<script>{script}</script>"
    yield after_data


def _data(diagnosis: Diagnosis, traces: Sequence[RankTrace]) -> Iterator[str]:
    line = build_timeline(traces)
    yield _block("report", _report(diagnosis))
    yield _block("timeline", _meta(line))
    for name in COLUMNS:
        yield f'<script type="application/octet-stream" id="column-{name}">{pack(getattr(line, name))}</script>\n'


def _report(diagnosis: Diagnosis) -> dict[str, object]:
    body = as_json.to_object(diagnosis)
    body["files"] = list(body["files"])[:MAX_LISTED]  # type: ignore[call-overload]
    body["groups"] = [
        {
            "label": group.label, "name": group.name, "backend": group.backend, "members": short(group.members),
            "size": len(group.members), "known": group.members_known, "first": group.first_sequence,
            "last": group.last_sequence, "behind": short(group.behind),
        }
        for group in sorted(diagnosis.groups, key=lambda g: (not g.behind, g.label))[:MAX_LISTED]
    ]  # fmt: skip
    body["group_count"] = len(diagnosis.groups)
    body["file_count"] = len(diagnosis.files)
    return body


def _meta(line: Timeline) -> dict[str, object]:
    return {
        "ranks": line.ranks, "hosts": line.hosts, "counts": line.counts, "base_ns": str(line.base_ns),
        "unit_ns": line.unit_ns, "end": line.end_units, "kinds": line.kind_table, "stacks": line.stack_table,
        "left_out": line.left_out,
    }  # fmt: skip


def _block(name: str, value: object) -> str:
    """A JSON block that cannot end its own script element, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="{name}">{text}</script>\n'
