"""Checks a whole configuration and reports every problem at once, with its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from allranks.elastic.config.messages import near, not_a_mapping, sentence, written
from allranks.elastic.config.relations import find_breaches
from allranks.elastic.config.yaml_tree import (
    ConfigProblem,
    KeyPath,
    Tree,
    ValidationResult,
    read_tree,
    result_of,
)
from allranks.errors import ConfigurationError, InputError, require


def schema_module() -> ModuleType:
    """The pydantic models; one clear sentence when the extra is missing."""
    require("pydantic", feature="A job configuration", extra="config")
    from allranks.elastic.config import schema

    return schema


@dataclass
class Checked:
    """`config` is the typed configuration (a JobConfig), None when there are errors."""

    config: Any = None
    errors: list[ConfigProblem] = field(default_factory=list)
    warnings: list[ConfigProblem] = field(default_factory=list)


def check(source: Any) -> Checked:
    """Checks a YAML file (a path), YAML text (of several lines), a mapping or an OmegaConf container.

    Raises only when a file cannot be read.
    """
    return _Check(_tree(source), schema_module()).run()


def validate_config(source: Any, validate_s3: bool = False) -> ValidationResult:
    """Every problem of a configuration; with `validate_s3` the bucket is tried too."""
    checked = check(source)
    errors: list[str] = list(checked.errors)
    warnings: list[str] = list(checked.warnings)
    if validate_s3 and checked.config is not None and checked.config.checkpoint.s3_bucket:
        from allranks.elastic.config.s3 import validate_s3_access

        section = checked.config.checkpoint
        access = validate_s3_access(section.s3_bucket, section.s3_region, endpoint=section.s3_endpoint_url)
        errors += access.errors
        warnings += access.warnings
    return result_of(errors, warnings)


def validate_elastic_config(source: Any) -> ValidationResult:
    """As `validate_config`, and never touches the network."""
    return validate_config(source)


def load_config(source: Any) -> Any:
    """The typed JobConfig, or a ConfigurationError that names every problem."""
    checked = check(source)
    if checked.errors:
        name = source if isinstance(source, (str, Path)) else "the configuration"
        count = len(checked.errors)
        lines = "\n".join(f"  {problem}" for problem in checked.errors)
        raise ConfigurationError(f"{count} problem{'s' * (count > 1)} in {name}:\n{lines}")
    return checked.config


def read_config(source: Any) -> Any:
    """The same as `load_config`."""
    return load_config(source)


def _tree(source: Any) -> Tree:
    if isinstance(source, str) and "\n" in source:
        return read_tree(source)
    if isinstance(source, (str, Path)):
        try:
            return read_tree(Path(source).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise InputError(f"{source} is not UTF-8 text: {error}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {source}: {getattr(error, 'strerror', None) or error}") from error
    if type(source).__module__.split(".")[0] == "omegaconf":
        from omegaconf import OmegaConf, errors

        try:
            return Tree(OmegaConf.to_container(source, resolve=True))
        except errors.OmegaConfBaseException as error:
            return Tree(
                problems=[ConfigProblem(f"cannot resolve the container: {str(error).splitlines()[0]}")]
            )
    return Tree(source)


@dataclass
class _Check:
    """One run over one tree. `sections` collects those that hold by themselves."""

    tree: Tree
    schema: ModuleType
    errors: list[ConfigProblem] = field(default_factory=list)
    warnings: list[ConfigProblem] = field(default_factory=list)
    sections: dict[str, Any] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)  # dotted paths that have a problem of their own

    def run(self) -> Checked:
        self.errors += self.tree.problems
        if self.tree.values is not None or not self.tree.problems:
            self._top(self.tree.values)
        config = None
        if not self.errors:
            config = self.schema.JobConfig(**self.sections)
        return Checked(config, _sorted(self.errors), _sorted(self.warnings))

    def _top(self, values: Any) -> None:
        if not isinstance(values, Mapping):
            self._error((), not_a_mapping("the configuration", values))
            return
        fields = self.schema.JobConfig.model_fields
        for name, value in values.items():
            if name in self.schema.FOREIGN:
                self._warn((name,), f"section '{name}' is not read: {self.schema.FOREIGN[name]}")
            elif name not in fields:
                self._error((name,), f"Unknown section '{name}'.{near(name, fields)}")
            else:
                self._section(name, value)
        self._relations()

    def _section(self, name: str, value: Any) -> None:
        if value is None:
            return  # "training:" with nothing below it: the defaults
        if not isinstance(value, Mapping):
            self.bad.add(name)
            self._error((name,), not_a_mapping(f"section '{name}'", value))
            return
        value = self._renamed(name, dict(value))
        if name == "model":
            self.sections[name] = value
            return
        model = self.schema.JobConfig.model_fields[name].annotation
        if model.model_config.get("extra") == "allow":
            self._strangers(name, value, model)
        try:
            self.sections[name] = model.model_validate(value)
        except self._invalid() as error:
            entries = error.errors(include_url=False)  # type: ignore[attr-defined]
            # Of a union's several complaints about one text, the list of valid words says most.
            for entry in sorted(
                entries, key=lambda e: e["type"] != "literal_error" or not isinstance(e["input"], str)
            ):
                self._entry(name, model, entry)

    def _invalid(self) -> type[Exception]:
        kind: type[Exception] = require(
            "pydantic", feature="A job configuration", extra="config"
        ).ValidationError
        return kind

    def _renamed(self, name: str, value: dict[Any, Any]) -> dict[Any, Any]:
        for (section, old), new in self.schema.ALIASES.items():
            if section == name and old in value and new not in value:
                value[new] = value.pop(old)
                if mark := self.tree.marks.get((name, old)):
                    self.tree.marks[(name, new)] = mark
        return value

    def _strangers(self, name: str, value: dict[Any, Any], model: Any) -> None:
        """Keys of a section that may hold the user's own: a typo is an error, anything else a warning."""
        for key in value:
            if key in model.model_fields:
                continue
            close = near(key, model.model_fields)
            if close:
                self._error((name, key), f"Unknown key '{key}' in section '{name}'.{close}")
            else:
                self._warn((name, key), f"'{key}' is kept for your script; allranks does not read it")

    def _entry(self, name: str, model: Any, entry: Mapping[str, Any]) -> None:
        path = (name, *written(model, entry["loc"]))
        dotted = ".".join(map(str, path))
        if dotted in self.bad:
            return  # the second branch of a union says the same thing again
        self.bad.add(dotted)
        self._error(path, sentence(model, path, entry))

    def _relations(self) -> None:
        for breach in find_breaches(self._get):
            path = tuple(breach.path.split("."))
            (self._warn if breach.warning else self._error)(path, breach.message)

    def _get(self, dotted: str) -> Any:
        """A value for relations; with a trailing "?" whether something was written, however wrong."""
        names = dotted.rstrip("?").split(".")
        if dotted.endswith("?"):
            value: Any = self.tree.values
            for part in names:
                value = value.get(part) if isinstance(value, Mapping) else None
            return value
        if any(".".join(names[: i + 1]) in self.bad for i in range(len(names))):
            return None
        section = self.sections.get(names[0])
        if section is None:
            section = self._salvaged(names[0])
        for part in names[1:]:
            section = getattr(section, part, None)
        return section

    def _salvaged(self, name: str) -> Any:
        """The section from those of its values that are right: others still take part in relations."""
        model = self.schema.JobConfig.model_fields[name].annotation
        raw = self.tree.values.get(name) if isinstance(self.tree.values, Mapping) else None
        good = {
            key: value
            for key, value in (raw.items() if isinstance(raw, Mapping) else ())
            if key in model.model_fields and not any(f"{b}.".startswith(f"{name}.{key}.") for b in self.bad)
        }
        try:
            return model.model_validate(good)
        except self._invalid():
            return model()

    def _error(self, path: KeyPath, message: str) -> None:
        self.errors.append(ConfigProblem(message, ".".join(map(str, path)), self.tree.mark(path)))

    def _warn(self, path: KeyPath, message: str) -> None:
        self.warnings.append(ConfigProblem(message, ".".join(map(str, path)), self.tree.mark(path)))


def _sorted(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    return sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
