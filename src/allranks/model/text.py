"""Text from outside, before it is printed, logged, shown or taken for data. Pure."""

from __future__ import annotations


def printable(text: str, limit: int = 2000) -> str:
    """Without control characters, which would steer a terminal, and not longer than `limit`."""
    text = text if len(text) <= limit else f"{text[:limit]} …"
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


MAX_YAML_VALUES = 100_000


def read_yaml(text: str) -> object:
    """Plain data; ValueError for what is no YAML, is nested too deep, or unfolds without end (aliases of aliases)."""
    import yaml

    try:
        value: object = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if _unfolded(value, {}) > MAX_YAML_VALUES:
        raise ValueError(f"its aliases unfold to more than {MAX_YAML_VALUES:,} values")
    return value


def _unfolded(value: object, known: dict[int, int]) -> int:
    """How many values it is when every alias is written out."""
    if not isinstance(value, (dict, list, tuple)):
        return 1
    if id(value) not in known:
        known[id(value)] = MAX_YAML_VALUES + 1  # for one that holds itself
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_unfolded(each, known) for each in inside)
    return known[id(value)]
