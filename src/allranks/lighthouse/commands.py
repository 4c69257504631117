"""Actions that a client may ask for: looked up by name, answered with a Result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from allranks.channel.frames import BadFrame
from allranks.errors import LighthouseError
from allranks.lighthouse.codec import load
from allranks.lighthouse.messages import Command, Result
from allranks.lighthouse.service import Service
from allranks.model.cluster import CollectEvidence, PublishedIncident
from allranks.model.job import Presence
from allranks.model.parsing import printable


def carry_out(service: Service, command: Command, reply: Callable[[Result], None]) -> None:
    """Does what is asked and replies; to what must survive this lighthouse only once it is safe.

    The connection has shown the job token before it gets here.
    """
    result = _answer(service, command)
    if command.action in ("evict", "let_in", "finish"):
        service.former.after_kept(lambda: reply(result))
    else:
        reply(result)


def _answer(service: Service, command: Command) -> Result:
    act = _ACTIONS.get(command.action)
    if act is None or (command.action in _OF_A_REPLICA and not command.replica):
        why = "" if command.replica else " without a replica"
        return Result(command.id, False, f"cannot do {command.action!r}" + why)
    try:
        found = act(service, replace(command, reason=printable(command.reason)))
    except (BadFrame, LighthouseError) as error:
        return Result(command.id, False, str(error))
    return Result(command.id, True, msgspec.json.encode(found).decode())


def _evict(service: Service, command: Command) -> object:
    service.evict(command.replica, command.reason or "asked for")
    return {"evicted": command.replica}


def _let_in(service: Service, command: Command) -> object:
    if not service.let_in(command.replica):
        raise LighthouseError(f"{command.replica} is neither evicted nor in back-off nor too late")
    return {"let_in": command.replica}


def _report_incident(service: Service, command: Command) -> object:
    service.agents.report_incident(_cleaned(load(PublishedIncident, command.body.encode())))
    return {}


_ACTIONS: dict[str, Callable[[Service, Command], object]] = {
    "status": lambda service, command: service.snapshot(),
    "evict": _evict,
    "let_in": _let_in,
    "finish": lambda service, command: {"finished": service.finish(command.replica)},
    "gather": lambda service, command: service.agents.gather(load(CollectEvidence, command.body.encode())),
    "present": lambda service, command: service.agents.nodes.note(load(Presence, command.body.encode())),
    "presence": lambda service, command: {"node": service.agents.nodes.find(command.replica)},
    "collect": lambda service, command: {
        "incident": service.agents.collect(command.reason, command.replicas)
    },
    "accuse": lambda service, command: {"lost": service.accuse(command.replica, command.reason)},
    "incident": _report_incident,
}
_OF_A_REPLICA = frozenset({"evict", "let_in", "finish", "presence", "accuse"})


def _cleaned(incident: PublishedIncident) -> PublishedIncident:
    """It is shown on the page and in terminals."""
    texts: dict[str, Any] = {
        name: printable(value)
        for name, value in vars(incident).items()
        if isinstance(value, str) and name not in ("story", "evidence")  # HTML, shown in a sandbox; JSON
    }
    return replace(incident, **texts, replicas=tuple(map(printable, incident.replicas)))
