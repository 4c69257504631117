"""What a rank's manager says of its state, in the free text of a member (manager/plan.py: ReplicaClaim), as far as others
must understand it: whether it is well formed, and where the replica listens. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from allranks.model.cluster import Member

DIALECT = "manager"  # of members whose text is a claim
MAX_RANKS = 4096  # of one replica
MAX_CHARS = 1 << 20
_MAX_TEXT = 512  # of one field
_MAX_NUMBER = 1 << 53  # exact in every JSON reader


def _is_number(value: object) -> bool:
    return type(value) is int and -1 <= value <= _MAX_NUMBER


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= _MAX_TEXT and value.isprintable()


def _is_address(value: object) -> bool:
    if not _is_text(value):
        return False
    host, _, port = str(value).rpartition(":")
    return value == "" or (bool(host) and port.isdigit() and int(port) <= 65535)


_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(
        ("term", "step", "seen", "pending", "port", "global_rank", "min_replicas"),
        (_is_number, "a number"),
    ),
    **dict.fromkeys(("torn", "broken", "init_sync", "fixed", "beside", "prepares"), (_is_flag, "a flag")),
    **dict.fromkeys(("prepared", "backend"), (_is_text, "a short text")),
    "address": (_is_address, "HOST:PORT"),
}


def find_fault(text: str) -> str:
    """Why this text is not a claim that every member can read; "" when it is one."""
    if len(text) > MAX_CHARS:
        return f"it has {len(text)} characters, at most {MAX_CHARS} are allowed"
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not valid JSON: {error}"
    ranks = raw.get("ranks") if isinstance(raw, dict) else None
    if not isinstance(ranks, list) or not 0 < len(ranks) <= MAX_RANKS:
        return f"it has no list of 1 to {MAX_RANKS} ranks"
    whole = _find_fault({name: value for name, value in raw.items() if name != "ranks"})
    for number, claim in enumerate(ranks):
        if whole:
            break
        why = _find_fault(claim) if isinstance(claim, dict) else "it is not an object"
        whole = f"rank {number}: {why}" if why else ""
    return whole


def _find_fault(fields: dict[str, Any]) -> str:
    for name, value in fields.items():
        check, what = _KINDS.get(name, (_is_simple, "a number, a flag or a short text"))
        if not check(value):
            return f"{name[:64]!r} is not {what}"
    return ""


def _is_simple(value: object) -> bool:
    """Of a field of a newer version."""
    return _is_flag(value) or _is_number(value) or _is_text(value)


def addresses_of(member: Member) -> tuple[str, ...]:
    """Where the other members will connect to it: the servers of its ranks, and its store."""
    found = {member.address: None, member.store: None}
    if member.dialect == DIALECT:
        found |= {str(claim.get("address", "")): None for claim in json.loads(member.data)["ranks"]}
    return tuple(address for address in found if _is_address(address) and address)
