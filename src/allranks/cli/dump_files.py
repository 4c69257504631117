"""`allranks dump FILES`: what files are and hold (--info), or the same calls in another format. Decides nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.cli.terminal import answer, note
from allranks.errors import InputError
from allranks.model.parsing import printable

if TYPE_CHECKING:
    from allranks.load import LoadResult
    from allranks.model.trace import RankTrace

ENDINGS = {".box": "box", ".json": "json", ".pickle": "pickle", ".pkl": "pickle"}


def show(args: argparse.Namespace) -> int:
    """0 everything is readable, 1 something is damaged or not a dump, 2 could not run."""
    from allranks.load import LoadOptions, load_paths

    result = load_paths(args.paths, LoadOptions(allow_nothing=True, number_unknown=True))
    traces = {trace.path: describe(trace, args.calls) for trace in result.traces}
    files = [{**asdict(one), **traces.get(one.path, {})} for one in result.files]
    facts = {"schema": 1, "attempt": result.attempt, "attempts": result.attempts, "files": files}
    answer(args.json, facts, map(printable, render(result, traces)))
    if not result.files:
        print("allranks dump: no files", file=sys.stderr)
        return 2
    return 0 if all(one.status == "ok" for one in result.files) else 1


def convert(args: argparse.Namespace) -> int:
    """Writes each rank's calls in another format. 0 all were written, 1 some files were damaged or left out, 2 could not run."""
    from allranks.load import LoadOptions, load_paths
    from allranks.model.files import write_atomically

    output = Path(args.output or f"allranks-dump-{Path(args.paths[0]).stem}")
    form = args.format or ENDINGS.get(output.suffix.lower()) or "pickle"
    if form == "box":
        raise InputError("files cannot be made into black boxes", hint="Use --format pickle or json.")
    result = load_paths(args.paths, LoadOptions(number_unknown=True))
    one_file = len(result.traces) == 1 and output.suffix.lower() in ENDINGS and not output.is_dir()
    written = []
    for trace in result.traces:
        path = output if one_file else output / _file_name(trace, form)
        if path.exists() and not args.force:
            raise InputError(f"{path} exists", hint="Choose another name with -o, or --force.")
        try:
            write_atomically(path, _encode(trace, form, not args.active), 0o666)
        except OSError as error:
            raise InputError(f"{path} cannot be written: {error.strerror}") from error
        written.append({"path": str(path), "rank": trace.header.rank})
    bad = [one for one in result.files if one.status != "ok"]
    for one in bad:
        note(f"{one.path}: {one.status}: {one.note}")
    facts = {"schema": 1, "files": written, "left_out": [one.path for one in bad]}
    answer(args.json, facts, [f"Wrote {one['path']}" for one in written])
    return 1 if bad else 0


def _encode(trace: RankTrace, form: str, completed: bool) -> bytes:
    from allranks.model.torch_dump import to_torch_json, to_torch_pickle

    if form == "pickle":
        return to_torch_pickle(trace, include_completed=completed)
    return to_torch_json(trace, include_completed=completed).encode()


def _file_name(trace: RankTrace, form: str) -> str:
    """The name under which torch's tools and ours find the rank."""
    return f"trace_{trace.header.rank or 0}" + (".json" if form == "json" else "")


def describe(trace: RankTrace, last: int = 0) -> dict[str, Any]:
    """A trace as plain data: its header, groups and windows."""
    from allranks.model.trace import State

    header, rows = trace.header, trace.calls
    states = {state.name.lower(): int((rows["state"] == state).sum()) for state in State}
    created = rows["created_ns"][rows["created_ns"] > 0]
    described: dict[str, Any] = {
        **{
            name: getattr(header, name) for name in ("host", "pid", "job", "attempt", "world_size", "backend")
        },
        "versions": dict(header.versions),
        "calls": len(rows),
        "dropped": header.dropped,
        "torn": trace.torn,
        "first_call_ns": int(created.min()) if len(created) else 0,
        "last_call_ns": int(created.max()) if len(created) else 0,
        "written_ns": header.written_ns,
        "progress": asdict(trace.progress),
        "states": {name: count for name, count in states.items() if count},
        "stacks": bool((rows["stack"] > 0).any()),
        "groups": [_group(trace, i) for i in range(1, len(trace.groups))],
    }
    if last:
        described["last_calls"] = [_call(trace, row) for row in range(max(0, len(rows) - last), len(rows))]
    return described


def _group(trace: RankTrace, index: int) -> dict[str, Any]:
    group, rows = trace.groups[index], trace.calls[trace.calls["group"] == index]
    seqs = rows["seq"][rows["p2p_seq"] == 0]
    return {
        "name": group.name,
        "desc": group.desc,
        "backend": group.backend,
        "ranks": list(group.ranks),
        "calls": len(rows),
        "first_sequence": int(seqs.min()) if len(seqs) else None,
        "last_sequence": int(seqs.max()) if len(seqs) else None,
    }


def _call(trace: RankTrace, row: int) -> dict[str, Any]:
    from allranks.model.trace import State

    call = trace.calls[row]
    stack = trace.stacks[int(call["stack"])]
    shapes = trace.shapes[int(call["shapes"])]
    where = next((f for f in stack if "/torch/" not in f.file), stack[0] if stack else None)
    return {
        "record": int(call["begin"]) - 1,
        "group": trace.groups[int(call["group"])].name,
        "op": trace.names[int(call["op"])],
        "sequence": int(call["seq"]),
        "p2p_sequence": int(call["p2p_seq"]),
        "peer": int(call["peer"]),
        "inputs": shapes.inputs,
        "dtypes": shapes.input_dtypes or shapes.output_dtypes,
        "state": State(int(call["state"])).name.lower(),
        "created_ns": int(call["created_ns"]),
        "where": f"{where.file}:{where.line} in {where.name}" if where else "",
    }


def render(result: LoadResult, traces: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The description for people, a line at a time. `traces` are described by path."""
    for one in result.files:
        rank = "" if one.rank is None else f", rank {one.rank}"
        yield f"{one.path}: {one.kind}{rank}" + ("" if one.status == "ok" else f" [{one.status}]")
        if one.note:
            yield f"  note: {one.note}"
        if one.path in traces:
            yield from _render_trace(traces[one.path])
    if len(result.attempts) > 1:
        yield f"attempts: {', '.join(map(str, result.attempts))}; shown: {result.attempt} (the newest)"


def _render_trace(about: dict[str, Any]) -> Iterator[str]:
    who = [f"{name} {about[name]}" for name in ("host", "pid", "job", "backend") if about[name]]
    who += [f"{name} {text}" for name, text in about["versions"].items()]
    who += [f"world size {about['world_size']}"] if about["world_size"] else []
    if who:
        yield "  " + ", ".join(who)
    states = ", ".join(f"{count} {name}" for name, count in about["states"].items())
    yield f"  {about['calls']} calls ({states or 'none'}), {about['dropped']} older ones overwritten"
    if about["last_call_ns"]:
        yield f"  from {_time(about['first_call_ns'])} to {_time(about['last_call_ns'])}"
    progress = about["progress"]
    if progress["step"] >= 0:
        yield f"  step {progress['step']}" + (f", phase {progress['phase']}" if progress["phase"] else "")
    if progress["closed"]:
        yield f"  closed: {progress['closed']}"
    for group in about["groups"]:
        ranks, first = group["ranks"], group["first_sequence"]
        window = "-" if first is None else f"#{first}…#{group['last_sequence']}"
        more = f", … {len(ranks)} in all" if len(ranks) > 8 else ""
        members = f"[{', '.join(map(str, ranks[:8]))}{more}]" if ranks else "(members unknown)"
        yield f"  group {group['name']} {group['desc']} {members}: {group['calls']} calls, {window}"
    for call in about.get("last_calls", ()):
        peer = f" peer {call['peer']}" if call["peer"] >= 0 else ""
        what = f"{call['op']} #{call['sequence']} of {call['group']}{peer}"
        yield f"    {what} {list(map(list, call['inputs']))} {call['state']} {call['where']}"


def _time(ns: int) -> str:
    try:
        return datetime.fromtimestamp(ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f UTC")
    except (ValueError, OverflowError, OSError):
        return f"{ns} ns"
