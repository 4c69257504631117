"""Reference pages that are written from the program: error texts, Python API, JSON, metrics. Used by scripts/docs.py."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- Written by scripts/docs.py; do not edit. -->"
#: task pages come first in the search
FRONT = "---\nsearch:\n  boost: 0.3\n---"
METRICS = re.compile(r"(<!-- metrics: [^\n]* -->\n).*?(<!-- end -->)", re.S)
LEVELS = {
    "root": ("Causes", "Each of these explains a failure by itself."),
    "symptom": (
        "Consequences",
        "These usually follow from something else: look for the first cause in the logs of the other ranks.",
    ),
    "warning": ("Warnings", "These do not stop a job."),
}


def errors_page() -> Iterator[str]:
    """Every error text that `allranks doctor explain` knows."""
    from allranks.doctor.explain import LogLine, match_line, patterns

    yield from (FRONT, "# Errors by text", "", NOTE, "")
    yield "`allranks doctor explain LOGS…` finds these texts in the logs of all ranks, names the first cause and leaves out"
    yield "what follows from it. Every entry here is one of its patterns; search this page for a piece of your error."
    for level, (title, meaning) in LEVELS.items():
        yield from ("", f"## {title}", "", meaning)
        for pattern in patterns():
            if pattern.level == level:
                match = match_line(LogLine("", 1, pattern.sample))
                assert match is not None and match.pattern is pattern, pattern.id
                yield from ("", f"### {pattern.id.replace('_', ' ')}", "", "```text", pattern.sample, "```")
                yield from ("", f"**Cause:** {match.cause}", "", f"**What to do:** {match.hint}")


# ---- Python

#: (heading, module, names); a class is shown with its public methods
API: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("My job hangs now", "allranks", ("diagnose", "stacks")),
    ("", "allranks.api.functions", ("DiagnosisResult", "RecordedCalls", "StacksResult", "CheckpointIndex")),
    ("Recording", "allranks", ("record", "step", "phase", "expect", "Recorder", "FlightRecorderHook")),
    ("Keep my job running", "allranks", ("Manager", "Optimizer", "DistributedDataParallel")),
    ("Lose nothing", "allranks", ("load_checkpoint_index",)),
    ("", "allranks.checkpoint", ("CheckpointManager", "CheckpointConfig")),
    ("Errors", "allranks", ("AllranksError",)),
)
CALLED = {"diagnose": ("allranks.api.functions", "diagnose"), "stacks": ("allranks.api.functions", "stacks"), "record": ("allranks.recording.api", "record")}  # fmt: skip


def python_page() -> Iterator[str]:
    """Signatures and first sentences of the public names."""
    yield from (FRONT, "# Python API", "", NOTE, "")
    yield "What programs may use. Names that are not listed here may change without notice."
    yield "[Python and notebooks](../tasks/python.md) shows them at work."
    for heading, module, names in API:
        if heading:
            yield from ("", f"## {heading}")
        for name in names:
            home, real = CALLED.get(name, (module, name))
            yield from _object(f"{module}.{name}", _found(home, real))


def _found(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return getattr(importlib.import_module("allranks.recording"), name)


def _object(title: str, thing: Any) -> Iterator[str]:
    shown = _signature(title.rpartition(".")[2], thing)
    yield from ("", f"### {title}", "", "```python", shown, "```", "", _first(thing))
    members = (
        dict.fromkeys(name for kind in inspect.getmro(thing) for name in vars(kind))
        if inspect.isclass(thing)
        else {}
    )
    rows = [
        f"| `{_signature(name, found).replace(' | ', ' or ')}` | {_first(found)} |"
        for name in members
        if not name.startswith("_") and (found := _member(thing, name)) is not None
    ]
    if rows:
        yield from ("", "| member | meaning |", "|---|---|", *rows)


def _member(owner: type, name: str) -> Any:
    """A documented method or property of our own; None for others."""
    found = inspect.getattr_static(owner, name)
    found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    function = found.fget if isinstance(found, property) else found
    ours = str(getattr(function, "__module__", "")).startswith("allranks")
    return found if ours and callable(function) and getattr(function, "__doc__", None) else None


def _signature(name: str, thing: Any) -> str:
    if isinstance(thing, property):
        return name
    if name == "CheckpointConfig":
        return f"{name}(…)"
    try:
        found = str(inspect.signature(thing))
    except (TypeError, ValueError):
        found = "(…)"
    found = re.sub(r"\bself(?:, )?", "", found, count=1).replace(" -> 'None'", "").replace(" -> None", "")
    return re.sub(r"<[^>]*>", "…", re.sub(r"(: |-> )'([^']+)'", r"\1\2", f"{name}{found}"))


def _first(thing: Any) -> str:
    text = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---- JSON

#: (heading, command run with `dumps/` and `captured/` of the tests)
OBJECTS = (
    ("allranks diagnose PATH… --json", ("diagnose", "tests/load/cases/flight_recorder/missing_rank", "--json")),
    ("allranks stacks --json", ("stacks", "--from", "tests/stacks/cases/hangs/dataloader_worker_sleep", "--json")),
)  # fmt: skip


def json_page() -> Iterator[str]:
    """Keys, types and values of what the commands print with --json, and of what the lighthouse serves."""
    yield from (FRONT, "# JSON reference", "", NOTE, "")
    yield "Every key of the objects that commands print with `--json`, with a value of a real run. The shapes are public: they are"
    yield "versioned by `schema`, may grow, and are never broken."
    yield from _promises()
    for title, words in OBJECTS:
        done = subprocess.run(
            [sys.executable, "-m", "allranks", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode > 1:
            raise SystemExit(f"{title}: {done.stderr}")
        yield from ("", f"## `{title}`", "", "| key | type | for example |", "|---|---|---|")
        for key, value in _keys("", json.loads(done.stdout)):
            yield f"| `{key}` | {_type(value)} | {_example(value)} |"
    yield from (
        "",
        "## `GET /api/status`",
        "",
        "Also `allranks lighthouse status ADDRESS --json`, and each event of `GET /api/events`.",
    )
    yield from ("", "| key | type |", "|---|---|", *(f"| `{key}` | {kind} |" for key, kind in _schema()))


def _promises() -> Iterator[str]:
    """What the keys mean where their names do not say it."""
    from allranks.diagnosis.kinds import CAUSES
    from allranks.model.stacks import CAUSES as STUCK

    yield from ("", "| key | values |", "|---|---|")
    yield "| `status` | `ok` (exit 0), `fault` or `unclear` (exit 1); exit 2: nothing readable |"
    yield "| `verdict` | null when the status is `ok`; its `ranks` are the guilty ranks only |"
    yield f"| `cause` of `diagnose` | {', '.join(f'`{cause}`' for cause in CAUSES)} |"
    yield "| `label` of a stack | `live`, `in this call`, `last finished call`, `last call`, or empty |"
    yield "| `hung` of `stacks` | true, false, or null when nothing allows telling |"
    yield f"| `cause` of `stacks` | {', '.join(f'`{cause}`' for cause in STUCK)} |"
    yield from ("", "## `allranks lighthouse --json`", "")
    yield 'One line once it listens: `{"address", "http", "grpc", "token_file"}`. `lighthouse status` exits with 0; with 1 when a member is lost'
    yield "or a replica waits without a quorum; with 2 when no lighthouse answers."
    yield from ("", "## `allranks drill --plan FILE --json -- COMMAND`", "")
    yield 'A plan is YAML or JSON: `seed`, and `faults: [{kind, rank or replica: N or "random", at_step: N or [a, b], for_s: S}]`. The result:'
    yield "`{faults: [{kind, rank, step, fired, noticed_s, verdict, verdict_right, recovered_s}], identical_replicas, lost_steps, lost_samples,"
    yield "repeated_samples, false_alarms, false_evictions}`."


def _keys(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """("verdict.ranks", [1]) for every key; of a list of objects the first one stands for all."""
    if isinstance(value, dict) and value and all(key.isdigit() for key in value):
        yield from _keys(f"{path}.N", next(iter(value.values())))
    elif isinstance(value, dict):
        for key, inner in sorted(value.items()):
            yield from _keys(f"{path}.{key}".lstrip("."), inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from _keys(f"{path}[]", value[0])
    else:
        yield path, value


def _type(value: Any) -> str:
    if isinstance(value, list):
        return f"list of {_type(value[0])}" if value else "list"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "object"}
    return "null" if value is None else names[type(value)]


def _example(value: Any) -> str:
    shown = json.dumps(value[:4] if isinstance(value, list) else value, ensure_ascii=False).replace(
        "|", "\\|"
    )
    shown = shown.replace("`", "'")
    return f"`{shown if len(shown) <= 90 else shown[:87] + '…'}`"


def _schema() -> Iterator[tuple[str, str]]:
    import msgspec

    from allranks.lighthouse.status import Status

    (top,), parts = msgspec.json.schema_components([Status], ref_template="{name}")
    yield from _fields("", parts[str(top["$ref"])], parts)


def _fields(path: str, part: dict[str, Any], parts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, inner in part["properties"].items():
        kinds = inner.get("anyOf", [inner])
        many = [kind.get("items", kind) for kind in kinds]
        name = next((kind["$ref"] for kind in many if "$ref" in kind), None)
        suffix = "[]" if any("items" in kind for kind in kinds) else ""
        if name:
            yield from _fields(f"{path}{key}{suffix}.", parts[name], parts)
        else:
            shown = " or ".join(
                "null" if kind.get("type") == "null" else str(kind.get("type", "any")) for kind in kinds
            )
            yield f"{path}{key}{suffix}", {"string": "text", "boolean": "true or false"}.get(shown, shown)


# ---- metrics


def with_metrics(text: str) -> str:
    """The page of the metrics with its table written from the lighthouse's own help texts."""
    return METRICS.sub(lambda match: f"{match[1]}{chr(10).join(_metrics())}\n{match[2]}", text)


def _metrics() -> Iterator[str]:
    from allranks.model.metrics import SPENT

    from allranks.lighthouse.status import ReplicaStatus, Status
    from allranks.lighthouse.web import render_metrics
    from allranks.model.cluster import PublishedIncident

    row = ReplicaStatus("r", "s", "n", "member", 1, 1, 0.0, "", 0.0, "", 1)
    incident = PublishedIncident("i", "x", kind="hang", cause="x")
    status = Status(
        1, "a", True, "", 1, 1, "", "", None, (row,), {}, {}, (), (incident,), 1.0, 0.0, 0, events={"lost": 1}
    )
    spent = lambda: {"useful": 1.0}  # noqa: E731
    SPENT.append(spent)  # as in the agent of a job that keeps a ledger
    lines = list(render_metrics(status))
    SPENT.remove(spent)
    helps = dict(line[7:].split(" ", 1) for line in lines if line.startswith("# HELP "))
    kinds = dict(line[7:].split(" ", 1) for line in lines if line.startswith("# TYPE "))
    yield from ("| metric | type | meaning |", "|---|---|---|")
    for name, meaning in helps.items():
        sample = next((line for line in lines if line.startswith(f"{name}{{")), "")
        labels = ",".join(re.findall(r"(\w+)=", sample))
        yield f"| `{name}{f'{{{labels}}}' if labels else ''}` | {kinds[name]} | {meaning[:1].lower()}{meaning[1:]} |"
