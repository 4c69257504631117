"""What pydantic found, in our words: the documented messages are made here. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from allranks.elastic.config.yaml_tree import KeyPath, missing_space


def sentence(model: Any, path: KeyPath, entry: Mapping[str, Any]) -> str:
    """pydantic's finding in our words; the documented messages are made here."""
    kind, value, context = entry["type"], entry["input"], entry.get("ctx", {})
    owner, info = _field(model, path[1:])
    name = _label(info, path)
    if kind == "extra_forbidden":
        return f"Unknown key '{path[-1]}' in section '{'.'.join(map(str, path[:-1]))}'.{near(path[-1], owner.model_fields)}"
    if kind == "literal_error":
        options = _options(info)
        return f"Unknown {name} {value!r}. Valid options: {options}{near(value, options)}"
    if kind == "greater_than" and context.get("gt") == 0:
        return f"{name} ({value}) must be positive"
    if kind == "greater_than":
        return f"{name} ({value}) must be greater than {context['gt']:g}"
    if kind == "greater_than_equal":
        return f"{name} must be >= {context['ge']:g} (got {value})"
    if kind == "less_than_equal":
        return f"{name} must be <= {context['le']:g} (got {value})"
    if kind == "finite_number":
        return f"{name} ({value}) must be a finite number"
    if kind == "missing":
        return f"{name} is required"
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        return not_a_mapping(f"'{name}'", value)
    if kind.startswith(("int_", "float_", "bool_", "string_", "list_")):
        wanted = _WANTED[kind.split("_")[0]]
        if kind == "string_pattern_mismatch":
            return f"{name} must start with http:// or https:// or slack:https:// (got {value!r})"
        if value is None:
            return f"{name} is empty: give it a value, or leave the line out ('#' starts a comment)"
        return f"{name} must be {wanted}, not {_shown(value)}"
    return f"{name}: {entry['msg']} (got {_shown(value)})"


def _label(info: Any, path: KeyPath) -> str:
    """The word for a field: its title, else its key (of a list's item, the list's)."""
    key = next((str(part) for part in reversed(path) if not isinstance(part, int)), "value")
    return (info.title if info is not None else None) or key


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text (put it in quotes)",
    "list": "a list",
}


def written(model: Any, loc: KeyPath) -> KeyPath:
    """A location without the branches of unions that pydantic adds to it."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(part, int):
            path.append(part)
        elif model is not None:
            path.append(part)
            info = model.model_fields.get(part)
            model = _model_in(info.annotation) if info is not None else None
    return tuple(path)


def _field(model: Any, path: KeyPath) -> tuple[Any, Any]:
    """The model that owns the last part of a path, and that field (None for an unknown key)."""
    info = None
    for i, part in enumerate(path):
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        inner = _model_in(info.annotation) if info is not None else None
        if inner is not None and i + 1 < len(path):
            model = inner
    return model, info


def _model_in(annotation: Any) -> Any:
    """The section class inside an annotation such as list[Webhook], or None."""
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if hasattr(kind, "model_fields"):
            return kind
    return None


def _options(info: Any) -> list[str]:
    found: list[str] = []
    stack = [info.annotation]
    while stack:
        kind = stack.pop(0)
        for argument in getattr(kind, "__args__", ()):
            if isinstance(argument, str):
                found.append(argument)
            else:
                stack.append(argument)
    return found


def near(word: object, options: Iterable[str]) -> str:
    """ " Did you mean 'x'?", or nothing when no option is near."""
    close = difflib.get_close_matches(str(word), [str(option) for option in options], n=1, cutoff=0.7)
    return f" Did you mean '{close[0]}'?" if close else ""


def not_a_mapping(what: str, value: object) -> str:
    fix = missing_space(value) if isinstance(value, str) else None
    if fix:
        return f"{what} holds no keys; {fix}"
    return f"{what} must hold 'key: value' lines, not {_shown(value)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
