"""The report as the JSON object of the contract. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.model.stacks import ChildState, RankState, StacksReport
from allranks.stacks.rank_sets import compress
from allranks.stacks.tree import Node, find_outliers
from allranks.stacks.user_code import place

SCHEMA = 1
Json = dict[str, object]


def report_json(report: StacksReport, roots: Sequence[Node] = ()) -> Json:
    """The public shape; fields may be added, never taken away."""
    return {
        "schema": SCHEMA,
        "hung": report.hung,
        "culprits": list(report.culprits),
        "sentence": report.sentence,
        "reason": report.reason,
        "ranks": {str(rank): _rank(state) for rank, state in sorted(report.ranks.items())},
        "outliers": [
            {"ranks": compress(ranks), "at": place(node.frame) if node.frame else ""}
            for ranks, node in find_outliers(roots)[:20]
        ],
        "ras": list(report.ras),
        "notes": list(report.notes),
    }


def _rank(state: RankState) -> Json:
    return {
        "cause": state.cause,
        "where": state.where,
        "evidence": state.evidence,
        "children": [_child(child) for child in state.children],
        "threads": state.threads,
        "operation": state.operation,
        "thread": state.thread,
        "confidence": state.confidence,
        "host": state.host,
        "pid": state.pid,
        "stack": [place(frame) for frame in state.stack[:60]],
        "notes": list(state.notes),
    }


def _child(child: ChildState) -> Json:
    return {
        "child": child.child,
        "pid": child.pid,
        "cause": child.cause,
        "where": child.where,
        "evidence": child.evidence,
    }
