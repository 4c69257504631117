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

    def all_of(texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(rename(one, worlds) for one in texts)

    def tell(finding: Finding) -> Finding:
        return replace(
            finding,
            sentence=rename(finding.sentence, worlds),
            wrong_if=rename(finding.wrong_if, worlds),
            evidence=all_of(finding.evidence),
            missing_evidence=all_of(finding.missing_evidence),
            advice=all_of(finding.advice),
            stack_labels=all_of(finding.stack_labels),
        )

    verdict = tell(found.verdict) if found.verdict is not None else None
    findings = tuple(map(tell, found.findings))
    return replace(
        found, verdict=verdict, findings=findings, summary=all_of(found.summary), worlds=tuple(worlds)
    )
