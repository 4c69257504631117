"""Lines of Python in each package, beside an earlier version: what existed then, and what is new since.

    python scripts/lines.py --since 0.1.0      # a commit, or 0.1.0, 0.2.0, 0.3.0; prints a table

Both trees are formatted with the settings of today and without `fmt: skip`. A function (or method, or class without methods)
is new when the earlier version has none of its name in the packages of the same row, and no function anywhere that holds
half of its tokens (as sequences of three). Methods with names of Python's own (`__init__`) go by their tokens alone. A file
is new when four fifths of its functions' lines are. What was added inside of functions that existed counts as existing.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = {"0.1.0": "8d751ce^", "0.2.0": "2de75a8", "0.3.0": "77734fa"}
#: row of the table -> folders then, folders now
ROWS = {
    "blackbox, record, load": (("record", "load"), ("blackbox", "record", "load")),
    "launch, supervise, watch, incidents": (("agent",), ("launch", "supervise", "watch", "incidents")),
    "lighthouse, channel": (("lighthouse",), ("lighthouse", "channel")),
    "drill": (("testing",), ("drill",)),
    "report, pages": (("report",), ("report", "pages")),
}
ALIKE, NEW_FILE = 0.5, 0.8


@dataclass(frozen=True)
class Function:
    file: str
    name: str
    lines: int
    tokens: frozenset[int]


def functions(folder: Path) -> Iterator[Function]:
    """Every function, method, and class without methods, of the files below a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in _units(ast.parse(path.read_text())):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            yield Function(
                path.relative_to(folder).as_posix(),
                node.name,
                (node.end_lineno or first) - first + 1,
                _tokens(node),
            )


def _units(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            inner = list(_units(node))
            yield from inner or [node]


def _tokens(node: ast.AST) -> frozenset[int]:
    """Sequences of three tokens, without docstrings."""
    for inner in ast.walk(node):
        body = getattr(inner, "body", None)
        if isinstance(body, list) and len(body) > 1 and _is_text(body[0]):
            del body[0]
    words = ast.unparse(node).replace("(", " ( ").replace(".", " . ").split()
    return frozenset(hash(tuple(words[at : at + 3])) for at in range(max(1, len(words) - 2)))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def find_new(before: list[Function], now: list[Function]) -> set[Function]:
    """Those without a counterpart."""
    names = {(row_of(one.file), one.name) for one in before if not one.name.startswith("__")}
    holders: dict[int, list[int]] = defaultdict(list)
    for number, one in enumerate(before):
        for token in one.tokens:
            holders[token].append(number)
    found = set()
    for one in now:
        if (row_of(one.file), one.name) in names:
            continue
        shared = Counter(number for token in one.tokens for number in holders.get(token, ()))
        if max(shared.values(), default=0) < ALIKE * len(one.tokens):
            found.add(one)
    return found


def formatted(folder: Path, target: Path) -> Path:
    """A copy of a tree in today's format."""
    for path in folder.rglob("*.py"):
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("  # fmt: skip", ""))
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "-q",
        "--config",
        str(ROOT / "pyproject.toml"),
        str(target),
    ]
    subprocess.run(command, check=True)
    return target


def package_of(file: str) -> str:
    first, _, rest = file.partition("/")
    return first if rest else "errors, etcd and the top"


def row_of(file: str) -> str:
    """The row that a file of either version belongs to."""
    package = package_of(file)
    return next((row for row, (then, today) in ROWS.items() if package in then + today), package)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--since", default="0.1.0", help="version or commit")
    parser.add_argument("--files", action="store_true", help="list the new files and their lines, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        commit = VERSIONS.get(args.since, args.since)
        packed = subprocess.run(
            ["git", "archive", commit, "src/allranks"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder)
        before = formatted(Path(folder, "src/allranks"), Path(folder, "before"))
        now = formatted(ROOT / "src" / "allranks", Path(folder, "now"))
        print("\n".join(table(before, now, args.since, args.files)))
    return 0


def table(before: Path, now: Path, since: str, files: bool) -> Iterator[str]:
    """The lines of the table."""
    lines_before, lines_now = _lines(before), _lines(now)
    current = list(functions(now))
    new = find_new(list(functions(before)), current)
    whole, part = _split(current, new, lines_now)
    yield f"| package | {since} | now | in new files | in new functions | for what existed |"
    yield "|---|---|---|---|---|---|"
    total = [0] * 5
    for row in sorted({row_of(file) for file in [*lines_before, *lines_now]}):
        values = [
            sum(count for file, count in counts.items() if row_of(file) == row)
            for counts in (lines_before, lines_now, whole, part)
        ]
        values.append(values[1] - values[2] - values[3])
        total = [one + more for one, more in zip(total, values, strict=True)]
        yield f"| {row} | " + " | ".join(f"{value:,}" for value in values) + " |"
    yield "| **all** | " + " | ".join(f"**{value:,}**" for value in total) + " |"
    if files:
        yield from (f"{count:6,} {file}" for file, count in sorted(whole.items()))


def _lines(folder: Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): len(path.read_text().splitlines())
        for path in folder.rglob("*.py")
    }


def _split(
    current: list[Function], new: set[Function], lines: dict[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """(file -> its lines, of new files; file -> lines of new functions, of the others)."""
    all_of, new_of = Counter[str](), Counter[str]()
    for one in current:
        all_of[one.file] += one.lines
        new_of[one.file] += one.lines if one in new else 0
    whole = {file: lines[file] for file in all_of if new_of[file] >= NEW_FILE * all_of[file]}
    return whole, {file: count for file, count in new_of.items() if file not in whole}


if __name__ == "__main__":
    sys.exit(main())
