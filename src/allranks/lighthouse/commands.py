"""Actions that a client may ask for: looked up by name, answered with a Result."""

from __future__ import annotations

import json

import msgspec

from allranks.lighthouse.codec import BadFrame, load
from allranks.lighthouse.messages import Command, Result
from allranks.lighthouse.service import Service
from allranks.model.cluster import Incident


def answer(service: Service, command: Command) -> Result:
    """Does what is asked. The connection has shown the job token before it gets here."""
    name, reason = command.replica, command.reason
    if command.action == "status":
        return Result(command.id, True, msgspec.json.encode(service.snapshot()).decode())
    if command.action == "evict" and name:
        service.evict(name, reason or "asked for")
        return Result(command.id, True, json.dumps({"evicted": name}))
    if command.action == "let_in" and name:
        if service.let_in(name):
            return Result(command.id, True, json.dumps({"let_in": name}))
        return Result(command.id, False, f"{name} is neither evicted nor pausing")
    if command.action == "collect":
        return Result(command.id, True, json.dumps({"incident": service.collect(reason, command.replicas)}))
    if command.action == "accuse" and name:
        return Result(command.id, True, json.dumps({"lost": service.accuse(name, reason)}))
    if command.action == "incident":
        try:
            service.tell_incident(load(Incident, command.body.encode()))
        except BadFrame as error:
            return Result(command.id, False, str(error))
        return Result(command.id, True, "{}")
    return Result(command.id, False, f"cannot do {command.action!r}" + ("" if name else " without a replica"))
