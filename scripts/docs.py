"""Writes what docs take from the program: the reference, the transcripts, the outputs of the tutorial; and the tables of
numbers, from benchmarks/results.

    python scripts/docs.py            write them anew
    python scripts/docs.py --check    exit 1 and name the files that are out of date; the tests do this

A console block after `<!-- transcript: FOLDER -->` is run with `dumps/` being FOLDER of this repository; its `$ allranks`
lines get their whole real output.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import docs_numbers  # noqa: E402
import docs_reference  # noqa: E402
from docs_reference import FRONT, NOTE  # noqa: E402

TRANSCRIPT = re.compile(r"(<!-- transcript: (\S+) -->\n```console\n)(.*?)(```\n)", re.S)
NOTEBOOK = ROOT / "docs" / "tasks" / "tutorial.ipynb"


def pages() -> dict[Path, str]:
    """Every written file and what it should hold."""
    found = {
        ROOT / "docs/reference/commands.md": "\n".join(commands_page()) + "\n",
        ROOT / "docs/reference/job_file.md": "\n".join(job_file_page()) + "\n",
        ROOT / "docs/reference/python.md": "\n".join([*docs_reference.python_page(), *options_of_parts()])
        + "\n",
        ROOT / "docs/reference/json.md": "\n".join(docs_reference.json_page()) + "\n",
        ROOT / "docs/reference/errors.md": "\n".join(docs_reference.errors_page()) + "\n",
    }
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if path in found:
            continue
        text = path.read_text()
        found[path] = docs_numbers.with_numbers(
            docs_reference.with_metrics(TRANSCRIPT.sub(_transcribed, text))
        )
    return found


# ---- the command line


def commands_page() -> Iterator[str]:
    """Every command with its arguments, flags and examples, from argparse."""
    from allranks.cli import COMMANDS, GROUPS, make_parser
    from allranks.cli.parser import EXAMPLES

    yield from (FRONT, "# Commands", "", NOTE, "")
    yield "Exit codes of every command: 0 nothing wrong, 1 a fault was found, 2 the command failed."
    for heading, names in GROUPS.items():
        yield from ("", f"## {heading}")
        for name in names:
            parser = _inner(make_parser(name, alone=True))[name]
            yield from ("", f"### allranks {name}", "", _sentence(COMMANDS[name][1]))
            yield from _arguments(parser)
            for action, inner in _inner(parser).items():
                yield from ("", f"#### allranks {name} {action}", "", _sentence(inner.description or ""))
                yield from _arguments(inner)
            if name in EXAMPLES:
                yield from ("", "```console", *(f"$ {line}" for line in EXAMPLES[name]), "```")


def _inner(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands or actions; those of a second name are left out."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: dict[int, tuple[str, argparse.ArgumentParser]] = {}
            for name, inner in action.choices.items():
                found.setdefault(id(inner), (name, inner))
            helps = {choice.dest: choice.help for choice in action._choices_actions}
            for name, inner in found.values():
                inner.description = inner.description or helps.get(name)
            return dict(found.values())
    return {}


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    rows = [
        (action, text)
        for action in parser._actions
        if action.help is not argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        for text in [parser._get_formatter()._expand_help(action) if action.help else ""]
    ]
    if rows:
        yield from ("", "| argument | meaning |", "|---|---|")
    for action, text in rows:
        names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{_metavar(action)}`"
        value = "" if not action.option_strings or action.nargs == 0 else f" `{_metavar(action)}`"
        yield f"| {names}{value} | {_cell(text)} |"


def _metavar(action: argparse.Action) -> str:
    if action.choices:
        return "|".join(str(choice) for choice in action.choices)
    return str(action.metavar or action.dest.upper())


# ---- options


def job_file_page() -> Iterator[str]:
    """Every section and key of the job file, from its schema."""
    from allranks.elastic.config import json_schema

    schema = json_schema()
    yield from (FRONT, "# The job file", "", NOTE, "")
    yield "`allranks run --config job.yaml` reads it, `allranks config check job.yaml` finds its mistakes,"
    yield "`allranks config schema` prints its JSON Schema for editors. Every key has a default; flags win over the file."
    for name, part in schema["properties"].items():
        section = _resolved(part, schema)
        if "properties" in section:
            yield from _section(name, section, schema)
        else:
            yield from ("", f"## {name}", "", "Free-form: read by your script.")


def _section(name: str, section: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    if text := section.get("description"):
        yield from (_sentence(str(text).split("\n")[0]), "")
    yield from ("| key | default | meaning |", "|---|---|---|")
    inner = []
    for key, part in section["properties"].items():
        whole = _resolved(part, schema)
        if "properties" in whole:
            inner.append((f"{name}.{key}", whole))
            continue
        default = part.get("default", whole.get("default"))
        shown = (
            ""
            if default in (None, "", [], {})
            else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        meaning = [str(part.get("description") or whole.get("description") or ""), _bounds(part)]
        yield f"| `{key}` | {shown} | {_cell('; '.join(text for text in meaning if text))} |"
    for title, whole in inner:
        yield from _section(title, whole, schema)


def _resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = str(part.get("$ref", "")).rpartition("/")[2]
    found: dict[str, Any] = schema["$defs"][name] if name else part
    return found


def _bounds(part: dict[str, Any]) -> str:
    every = [part, *part.get("anyOf", ())]
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    found = [f"{word} {one[key]:g}" for one in every for key, word in words.items() if key in one]
    found += ["one of " + ", ".join(f"`{value}`" for value in one["enum"]) for one in every if "enum" in one]
    return ", ".join(dict.fromkeys(found))


def markdown_table(options: type) -> list[str]:
    """The options as lines of a table for docs."""
    import enum

    from allranks.model.options import default_of, meanings

    lines = ["| option | default | meaning |", "|---|---|---|"]
    for one, meaning in meanings(options):
        default = default_of(one)
        shown = default.value if isinstance(default, enum.Enum) else default
        unit = f" {meaning.unit}" if meaning.unit and isinstance(shown, (int, float)) and shown else ""
        choices = f" ({', '.join(f'`{one}`' for one in meaning.choices)})" if meaning.choices else ""
        value = "" if shown in (None, "", (), {}) else f"`{shown}`{unit}"
        lines.append(f"| `{one.name}` | {value} | {meaning.help}{choices} |")
    return lines


def options_of_parts() -> Iterator[str]:
    """The options classes of the parts, and the sections of the job file that are made from them."""
    from allranks.lighthouse.options import Options, ServerOptions

    yield from ("", "## Options", "")
    yield "Frozen dataclasses; bounds and relations are checked when one is made. These have their fields in the job file:"
    yield from ("", "| class | section |", "|---|---|")
    for name, section in SECTIONS.items():
        yield f"| `{name}` | [{section}](job_file.md#{section}) |"
    for kind in (Options, ServerOptions):
        yield from ("", f"### {kind.__module__}.{kind.__name__}", "", *markdown_table(kind))


#: options class -> its section of the job file
SECTIONS = {
    "allranks.checkpoint.CheckpointConfig": "checkpoint",
    "allranks.model.debug_options.DebugOptions": "debug",
    "allranks.watch.silence.NoticeOptions": "debug",
    "allranks.incidents.policy.PolicyOptions": "recovery",
}


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return _cell(text if text.endswith((".", ":", "")) and text.endswith(".") else f"{text}.")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ---- transcripts and the tutorial


def _transcribed(match: re.Match[str]) -> str:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "dumps").symlink_to(ROOT / match[2])
        for line in match[3].splitlines():
            if line.startswith("$ "):
                lines.append(line)
                if line.startswith("$ allranks "):
                    lines += run(line[2:].partition("  #")[0], Path(folder))
    return f"{match[1]}{chr(10).join(lines)}\n{match[4]}"


def run(command: str, folder: Path) -> list[str]:
    """What a command prints, as a user would see it."""
    words = [sys.executable, "-m", *command.split()]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    if done.returncode > 1:
        raise SystemExit(f"{command}: {done.stderr}")
    return done.stdout.rstrip("\n").splitlines()


def executed_notebook() -> Any:
    """The tutorial, run from top to bottom in a fresh kernel."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    return notebook


def outputs(notebook: Any) -> list[list[str]]:
    """The text that each cell of code printed or returned."""
    return [
        [str(one.get("text") or one.get("data", {}).get("text/plain", "")) for one in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def write_notebook() -> None:
    """Keeps the text of the outputs; the pages that a notebook shows are made again when it is run."""
    import nbformat

    notebook = executed_notebook()
    for cell in notebook.cells:
        cell.metadata.clear()
        for one in cell.get("outputs", ()):
            one.get("data", {}).pop("text/html", None)
    nbformat.write(notebook, NOTEBOOK)


def main() -> int:
    """0: everything is up to date, or was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when something is out of date"
    )
    args = parser.parse_args()
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if args.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python scripts/docs.py")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages()[path])
        print(f"wrote {path.relative_to(ROOT)}")
    write_notebook()
    return 0


if __name__ == "__main__":
    sys.exit(main())
