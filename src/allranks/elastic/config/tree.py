"""YAML text → plain values, with the line and column of every key. Pure: text in, tree out.

The scalar rules are those of YAML 1.2: `on`, `yes` and `12:30` are strings, `1e-4` is a number. Keys written
twice are problems, not silently the last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from allranks.elastic.config.problems import Problem, explain

Path = tuple[str | int, ...]
_MAX_NODES = 100_000
_TOO_DEEP = "values are nested too deeply to be read: a bracket that is never closed?"


@dataclass
class Tree:
    """`values` is None when the text is no YAML at all; `marks` holds (line, column), from 1, of every path."""

    values: Any = None
    marks: dict[Path, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def mark(self, path: Path) -> tuple[int, int] | None:
        """Where a path stands; a missing key is placed at its nearest written parent."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2 (core schema)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {}


def _add_resolvers() -> None:
    rules: list[tuple[str, str, list[str | None]]] = [
        ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
        ("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+)$", list("-+0123456789")),
        (
            "tag:yaml.org,2002:float",
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
            list("-+0123456789."),
        ),
        ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
        ("tag:yaml.org,2002:merge", r"^(?:<<)$", ["<"]),
    ]
    for tag, pattern, first in rules:
        _Loader.add_implicit_resolver(tag, re.compile(pattern), first)


_add_resolvers()


def read_tree(text: str) -> Tree:
    """Parses YAML; what cannot be parsed becomes problems in plain words."""
    tree = Tree()
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (yaml.MarkedYAMLError, yaml.reader.ReaderError) as error:
        tree.problems.extend(explain(text, error))
        return tree
    except RecursionError:
        tree.problems.append(Problem(_TOO_DEEP))
        return tree
    if node is None:
        tree.values = {}
        return tree
    tree.marks[()] = _mark(node)
    try:
        tree.values = _Reader(tree).value(node, ())
    except (yaml.YAMLError, ValueError) as error:
        tree.problems.append(Problem(str(error)))
    except RecursionError:
        tree.values = None
        tree.problems.append(Problem(_TOO_DEEP))
    return tree


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


@dataclass
class _Reader:
    """Walks a composed document; `count` bounds what aliases may expand to."""

    tree: Tree
    count: int = 0
    open: set[int] = field(default_factory=set)

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.count += 1
        if self.count > _MAX_NODES:
            raise ValueError(f"the file expands to more than {_MAX_NODES} values: aliases that multiply?")
        if id(node) in self.open:
            raise ValueError(f"line {_mark(node)[0]}: an alias contains itself")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self._item(child, (*path, i)) for i, child in enumerate(node.value)]
            return _scalar(node)
        finally:
            self.open.discard(id(node))

    def _item(self, node: yaml.Node, path: Path) -> Any:
        self.tree.marks[path] = _mark(node)
        return self.value(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                for source in _sources(value_node):
                    merged = {**self.value(source, path), **merged}
                continue
            key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else str(key_node.value)
            here = (*path, key)
            if key in own:
                first = self.tree.marks[here][0]
                said = f"'{key}' is written twice (first in line {first}); the second would hide the first"
                self.tree.problems.append(Problem(said, _dotted(here), _mark(key_node)))
            self.tree.marks[here] = _mark(key_node)
            own[key] = self.value(value_node, here)
        return {**merged, **own}


def _sources(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    """The mappings that a merge key `<<` names."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for one in nodes:
        if not isinstance(one, yaml.MappingNode):
            raise ValueError(f"line {_mark(node)[0]}: '<<' needs a mapping to merge")
        yield one


def _scalar(node: yaml.Node) -> Any:
    text = str(node.value)
    if node.tag == "tag:yaml.org,2002:null":
        return None
    if node.tag == "tag:yaml.org,2002:bool":
        return text.lower() == "true"
    if node.tag == "tag:yaml.org,2002:int":
        return int(text, 0) if text[:2] in {"0x", "0o"} else int(text)
    if node.tag == "tag:yaml.org,2002:float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    return text


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)
