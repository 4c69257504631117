"""The diagnosis as the JSON object of docs/reference/json.md. Plain dictionaries only here, at the very edge."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from allranks.model.diagnosis import INCIDENT_SCHEMA, Diagnosis, Finding, Incident

SCHEMA = 1
Json = dict[str, object]


def to_object(diagnosis: Diagnosis) -> Json:
    """The public object; `verdict` is null when the status is ok."""
    return {
        "schema": SCHEMA,
        "status": diagnosis.status,
        "verdict": None if diagnosis.verdict is None else verdict(diagnosis.verdict),
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "files": [dict(vars(note)) for note in diagnosis.files],
        "world_size": diagnosis.world_size,
        "ranks": list(diagnosis.ranks),
        "groups": [
            {**vars(group), "members": list(group.members), "behind": list(group.behind)}
            for group in diagnosis.groups
        ],
        "worlds": [vars(world) for world in diagnosis.worlds],
        "summary": list(diagnosis.summary),
    }


def render(diagnosis: Diagnosis) -> str:
    return json.dumps(to_object(diagnosis), ensure_ascii=False)


def _finding(finding: Finding) -> Json:
    return {
        "cause": finding.cause,
        "ranks": list(finding.ranks),
        "group": finding.group,
        "sequence": finding.sequence,
        "severity": finding.severity,
        "sentence": finding.sentence,
        "confidence": finding.confidence,
        "where": finding.where,
        "waiting": list(finding.waiting),
        "waited_s": None if finding.waited_s is None else round(finding.waited_s, 3),
    }


def incident(found: Incident) -> Json:
    """incident.json: the story with its verdict."""
    body: Json = {"schema": INCIDENT_SCHEMA, **asdict(replace(found, verdict=None))}
    body["verdict"] = None if found.verdict is None else verdict(found.verdict)
    return body


def verdict(finding: Finding) -> Json:
    """The verdict alone, as it stands in an incident too."""
    body = _finding(finding)
    del body["severity"]
    body["evidence"] = list(finding.evidence)
    body["missing_evidence"] = list(finding.missing_evidence)
    body["advice"] = list(finding.advice)
    body["wrong_if"] = finding.wrong_if
    body["stacks"] = [
        {
            "ranks": list(ranks),
            "label": finding.stack_labels[i] if i < len(finding.stack_labels) else "",
            "frames": [{"name": f.name, "file": f.file, "line": f.line} for f in frames],
        }
        for i, (ranks, frames) in enumerate(finding.stacks)
    ]
    return body
