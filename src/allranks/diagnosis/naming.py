"""The ranks of a job of several worlds as people know them: "rollout 1" where a diagnosis says "rank 3". Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allranks.model.diagnosis import Diagnosis, Finding
from allranks.model.formatting import rename
from allranks.model.trace import World


def with_names(found: Diagnosis, worlds: Sequence[World]) -> Diagnosis:
    """The same diagnosis with roles and numbers in its sentences; unchanged in a job of one world."""
    if not worlds:
        return found

    def tell(finding: Finding) -> Finding:
        texts = {name: rename(getattr(finding, name), worlds) for name in ("sentence", "wrong_if")}
        lists = ("evidence", "missing_evidence", "advice", "stack_labels")
        many = {name: tuple(rename(one, worlds) for one in getattr(finding, name)) for name in lists}
        return replace(finding, **texts, **many)

    verdict = tell(found.verdict) if found.verdict is not None else None
    summary = tuple(rename(line, worlds) for line in found.summary)
    return replace(
        found, verdict=verdict, findings=tuple(map(tell, found.findings)), summary=summary, worlds=(*worlds,)
    )
