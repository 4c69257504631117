"""Parses YAML into plain values with the line and column of every key. Pure.

Scalars follow YAML 1.2: `on`, `yes` and `12:30` are strings, `1e-4` is a number. Duplicate keys are problems. The parser stops
at the first mistake, so every line is also checked for the two most common ones (tabs and `key:value`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from allranks.model.parsing import hide_secrets, printable, without_secrets


class ConfigProblem(str):
    """A message with its position, without secrets. A str, so that it can be used as a plain message.

    `message` is the text without position; `path` is dotted ("elastic.min_nodes"); `line` and `column` count from 1 and are
    None if the configuration does not come from YAML text.
    """

    message: str
    path: str
    line: int | None
    column: int | None

    def __new__(cls, message: str, path: str = "", mark: tuple[int, int] | None = None) -> ConfigProblem:
        text = message = printable(without_secrets(message))
        path = printable(without_secrets(path))
        if mark is not None:
            text = f"line {mark[0]}, column {mark[1]}: {path + ': ' if path else ''}{message}"
        self = super().__new__(cls, text)
        self.message, self.path = message, path
        self.line, self.column = mark if mark is not None else (None, None)
        return self

    def to_dict(self) -> dict[str, str | int | None]:
        return {"message": self.message, "path": self.path, "line": self.line, "column": self.column}


_NO_SPACE = re.compile(r"^(?P<indent>\s*(?:- +)?)(?P<key>[A-Za-z_][\w.-]*):(?P<value>[^\s:/\\].*)$")


def explain(text: str, error: yaml.MarkedYAMLError | yaml.reader.ReaderError) -> list[ConfigProblem]:
    """All mistakes in the text, at least one, in order."""
    found = {problem.line: problem for problem in _obvious_mistakes(text.splitlines())}
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        message = f"the character {text[error.position : error.position + 1]!r} is not allowed"
    else:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        message = ": ".join(filter(None, (error.context, error.problem)))
    if not {line - 1, line} & set(found):
        found[line] = ConfigProblem(f"not valid YAML: {message}", mark=(line, column))
    return [found[key] for key in sorted(found, key=lambda key: key or 0)]


def missing_space(text: str) -> str | None:
    """The fix if `text` is a mapping without a space after the colon ("lr:1e-4"), else None."""
    match = _NO_SPACE.match(text.split("\n")[0].split(" ")[0])
    return _write_space(match) if match else None


def _write_space(match: re.Match[str]) -> str:
    value = hide_secrets(match["value"].strip(), match["key"])
    return f"missing space after the colon: write '{match['key']}: {value}'"


def _obvious_mistakes(lines: list[str]) -> Iterator[ConfigProblem]:
    for number, line in enumerate(lines, 1):
        indent = line[: len(line) - len(line.lstrip())]
        if "\t" in indent and line.strip():
            tab = "indented with a tab, but YAML allows only spaces: replace each tab with two spaces"
            yield ConfigProblem(tab, mark=(number, indent.index("\t") + 1))
        elif match := _NO_SPACE.match(line):
            yield ConfigProblem(_write_space(match), mark=(number, match.start("value")))


KeyPath = tuple[str | int, ...]
_MAX_NODES = 50_000
_TOO_DEEP = "values are nested too deeply: is a bracket not closed?"


@dataclass
class Tree:
    """`values` is None if the text is not valid YAML; `marks` has (line, column), from 1, of every path."""

    values: object = None
    marks: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)

    def mark(self, path: KeyPath) -> tuple[int, int] | None:
        """The position of a path; for a missing key, the position of its nearest parent."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 (core schema), limited to _MAX_NODES values."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {}
    count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.count += 1
        if self.count > _MAX_NODES:
            raise _TooMuch(f"more than {_MAX_NODES} values", self.line + 1)
        return super().compose_node(parent, index)


class _TooMuch(ValueError):
    """(what, line)"""


_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
#: (tag, pattern of its scalars, their first characters); the first match counts
for _tag, _pattern, _begins in (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _begins)


def read_tree(text: str) -> Tree:
    """Parses YAML; mistakes become problems."""
    tree = Tree()
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return Tree({})
        tree.marks[()] = _mark(node)
        tree.values = _Reader(tree).value(node, ())
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError) as error:
        tree.problems += explain(text, error)
    except _TooMuch as error:
        tree.problems.append(ConfigProblem(error.args[0], mark=(error.args[1], 1)))
    except ValueError as error:
        tree.problems.append(ConfigProblem(str(error)))
    except RecursionError:
        tree.problems.append(ConfigProblem(_TOO_DEEP))
    return tree


def read_yaml(text: str) -> object:
    """Plain data; ValueError with all mistakes if the text is not valid YAML."""
    tree = read_tree(text)
    if tree.problems:
        raise ValueError("; ".join(tree.problems))
    return tree.values


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


@dataclass
class _Reader:
    """Walks a composed document; `count` limits the expansion of aliases."""

    tree: Tree
    count: int = 0
    open: set[int] = field(default_factory=set)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.count += 1
        if self.count > _MAX_NODES:
            raise ValueError(f"aliases expand the file to more than {_MAX_NODES} values")
        if id(node) in self.open:
            raise ValueError(f"line {_mark(node)[0]}: an alias contains itself")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                self.tree.marks.update({(*path, i): _mark(child) for i, child in enumerate(node.value)})
                return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]
            return _scalar(node)
        finally:
            self.open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, object]:
        merged: dict[Any, object] = {}
        own: dict[Any, object] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    if not isinstance(source, yaml.MappingNode):
                        raise ValueError(f"line {_mark(value_node)[0]}: '<<' needs a mapping to merge")
                    merged = {**self.value(source, path), **merged}
                continue
            key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else str(key_node.value)
            here = (*path, key)
            if key in own:
                first = self.tree.marks[here][0]
                message = f"'{key}' is written twice (first in line {first}); the second would hide the first"
                self.tree.problems.append(ConfigProblem(message, dotted(here), _mark(key_node)))
            self.tree.marks[here] = _mark(key_node)
            own[key] = self.value(value_node, here)
        return {**merged, **own}


def _scalar(node: yaml.Node) -> Any:
    text, tag = str(node.value), node.tag.removeprefix("tag:yaml.org,2002:")
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        return int(text, 0) if text[:2] in {"0x", "0o"} else int(text)
    if tag == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    return text


def dotted(path: KeyPath) -> str:
    """A path as shown in messages."""
    return ".".join(str(part) for part in path)
