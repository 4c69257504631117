"""What `allranks run --config FILE` takes from the job file. Flags that were given win over the file."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.errors import InputError

if TYPE_CHECKING:
    from allranks.incidents.policy import PolicyOptions
    from allranks.watch.silence import NoticeOptions

Settings = Mapping[str, Any]


#: Keys of the `elastic` section and the flag of torchrun that each one is.
FLAGS = {
    "nproc_per_node": "--nproc-per-node", "rdzv_backend": "--rdzv-backend", "rdzv_endpoint": "--rdzv-endpoint",
    "rdzv_id": "--rdzv-id", "max_restarts": "--max-restarts",
}  # fmt: skip


def read_settings(path: Path) -> dict[str, Any]:
    """The job file as plain data, checked as a whole."""
    from allranks.elastic.config import read_config

    found: dict[str, Any] = read_config(path).model_dump()
    return found


def chosen_flags(path: Path) -> set[str]:
    """The flags of torchrun that the file itself sets, defaults aside."""
    from allranks.elastic.config import read_config

    keys = read_config(path).elastic.model_fields_set
    return {FLAGS[key] for key in keys & set(FLAGS)} | ({"--nnodes"} if "max_nodes" in keys else set())


def take_defaults(args: argparse.Namespace, settings: Settings, script: list[str]) -> list[str]:
    """Fills in the flags that were not given, and returns the script with its arguments."""
    if not settings:
        return script
    debug, lighthouse, training = settings["debug"], settings["lighthouse"], settings["training"]
    args.no_record = args.no_record or not debug["record"]
    args.no_watch = args.no_watch or not debug["watch"]
    if debug["log_level"] == "debug":
        args.verbose = True
        logging.getLogger().setLevel(logging.DEBUG)
    if args.incidents is None and debug["incidents"]:
        args.incidents = Path(debug["incidents"])
    args.fresh = args.fresh or settings["checkpoint"]["fresh"]
    args.lighthouse = args.lighthouse or lighthouse["address"]
    args.no_lighthouse = args.no_lighthouse or not (lighthouse["embedded"] or lighthouse["address"])
    args.min_replicas = args.min_replicas or lighthouse["min_replicas"]
    if args.bind == "127.0.0.1:0":
        args.bind = lighthouse["bind"]
    if not script and training["script"]:
        return [training["script"], *training["args"]]
    return script


def heartbeats(settings: Settings) -> str:
    """The heartbeats of the `elastic` section as torchrun's --rdzv-conf."""
    from allranks.elastic.world import keep_alive

    return keep_alive(settings["elastic"]["heartbeat_interval"], settings["elastic"]["heartbeat_timeout"])


def quorum_times(settings: Settings) -> dict[str, Any]:
    """The times of the embedded lighthouse, as its Options name them."""
    section = settings.get("lighthouse") or {}
    names = {"heartbeat_interval_s": "heartbeat_s"}
    keys = ("join_timeout_s", "quorum_tick_s", "heartbeat_interval_s", "heartbeat_timeout_s")
    return {names.get(key, key): section[key] for key in keys if section.get(key) is not None}


def policy_options(how: str | None, settings: Settings) -> PolicyOptions:
    """The policy of the closed loop; `how` is --recovery or None."""
    from allranks.incidents.policy import PolicyOptions

    recovery = settings.get("recovery") or {}
    mode = how or recovery.get("mode")
    taken = ("min_confidence", "max_actions", "window_s", "back_off_s")
    return PolicyOptions(
        enabled={"on": True, "dry-run": False, "dry_run": False, "off": False}.get(mode or ""),
        on_hang="collect" if mode in ("collect", "off") else recovery.get("on_hang"),
        command=recovery.get("command") or "",
        **{key: recovery[key] for key in taken if recovery.get(key) is not None},
    )


def manager_timeout_s(environment: Mapping[str, str]) -> float:
    """After how long managers of this job may give a collective up, unless the script says otherwise.

    Never more than the default: a group that the script makes itself has that one, whatever the manager's is.
    """
    from allranks.watch.silence import MANAGER_TIMEOUT_S

    for name in ("ALLRANKS_TIMEOUT_S", "TORCHFT_TIMEOUT_SEC"):
        if text := environment.get(name):
            try:
                return min(MANAGER_TIMEOUT_S, float(text))
            except ValueError:
                raise InputError(f"{name}={text!r} is not a number of seconds") from None
    return MANAGER_TIMEOUT_S


def notice_options(floor_s: float | None, settings: Settings, retry_s: float | None = None) -> NoticeOptions:
    """When silence is looked at; `floor_s` is --notice-s or None, `retry_s` the managers' timeout in replica mode."""
    from allranks.watch.silence import NoticeOptions

    debug, recovery = settings.get("debug") or {}, settings.get("recovery") or {}
    asked = floor_s or recovery.get("notice_s")
    floor = float(asked or debug.get("hang_floor_s") or NoticeOptions.floor_s)
    cap = max(float(debug.get("hang_cap_s") or NoticeOptions.cap_s), floor)
    warm_up = float(debug.get("startup_s") or NoticeOptions.warm_up_s)
    return NoticeOptions(floor_s=floor, cap_s=cap, warm_up_s=warm_up, asked=bool(asked), retry_s=retry_s)
