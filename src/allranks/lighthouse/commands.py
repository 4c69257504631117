"""Actions that a client may ask for: looked up by name, answered with a Result."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgspec

from allranks.channel.frames import BadFrame
from allranks.lighthouse.codec import load
from allranks.lighthouse.messages import Command, Result
from allranks.lighthouse.service import Service
from allranks.model.cluster import CollectEvidence, Incident
from allranks.model.nodes import Presence
from allranks.model.text import printable


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
    name, reason = command.replica, printable(command.reason)
    if command.action == "status":
        return Result(command.id, True, msgspec.json.encode(service.snapshot()).decode())
    if command.action == "evict" and name:
        service.evict(name, reason or "asked for")
        return Result(command.id, True, json.dumps({"evicted": name}))
    if command.action == "let_in" and name:
        if service.let_in(name):
            return Result(command.id, True, json.dumps({"let_in": name}))
        return Result(command.id, False, f"{name} is neither evicted nor pausing nor too late")
    if command.action == "finish" and name:
        return Result(command.id, True, json.dumps({"finished": service.finish(name)}))
    if command.action == "gather":
        try:
            wanted = load(CollectEvidence, command.body.encode())
        except BadFrame as error:
            return Result(command.id, False, str(error))
        found = service.agents.gather(wanted)
        return Result(command.id, True, msgspec.json.encode(found).decode())
    if command.action == "present":
        try:
            presence = load(Presence, command.body.encode())
        except BadFrame as error:
            return Result(command.id, False, str(error))
        return Result(command.id, True, msgspec.json.encode(service.agents.nodes.note(presence)).decode())
    if command.action == "presence" and name:
        return Result(
            command.id, True, msgspec.json.encode({"node": service.agents.nodes.find(name)}).decode()
        )
    if command.action == "collect":
        return Result(
            command.id, True, json.dumps({"incident": service.agents.collect(reason, command.replicas)})
        )
    if command.action == "accuse" and name:
        return Result(command.id, True, json.dumps({"lost": service.accuse(name, reason)}))
    if command.action == "incident":
        try:
            service.agents.tell_incident(_cleaned(load(Incident, command.body.encode())))
        except BadFrame as error:
            return Result(command.id, False, str(error))
        return Result(command.id, True, "{}")
    return Result(command.id, False, f"cannot do {command.action!r}" + ("" if name else " without a replica"))


def _cleaned(incident: Incident) -> Incident:
    """It is shown on the page and in terminals."""
    texts: dict[str, Any] = {
        name: printable(value)
        for name, value in vars(incident).items()
        if isinstance(value, str) and name != "story"  # HTML, shown in a sandbox
    }
    return dataclasses.replace(incident, **texts, replicas=tuple(map(printable, incident.replicas)))
