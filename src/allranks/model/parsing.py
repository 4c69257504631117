"""Handles external text, JSON and file names: hides secrets, converts to types, finds ranks in names.

msgspec converts JSON to a given type. It caches information in the class before that is complete, so two threads that use a
class for the first time simultaneously crash the process (msgspec 0.22). A lock here prevents that.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import msgspec  # imported on first use, so that commands start faster

T = TypeVar("T")
_first_use = threading.Lock()
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

#: Excludes our own text_key and --text-key, which name a column.
_SECRET_NAME = r"(?:token|secret|passw(?:or)?d|passphrase|pwd|(?<!text[_-])key|credentials?|signature|\bsig)"
_SECRET_KEY = re.compile(rf"(?i){_SECRET_NAME}$")
_SECRET_WORD = re.compile(rf"(?i)((?:{_SECRET_NAME}|webhook)[\s\0]+)(?!-)[^\s\0]+")  # --api-key VALUE
_SECRET_TEXT = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?i)({_SECRET_NAME}=['\"]?)[^\s\0&'\"]+()",  # --api-key=VALUE, wandb.api_key=VALUE, ?X-Amz-Signature=VALUE
        rf"(?i)({_SECRET_NAME}['\"]?\s*[=:]\s*['\"])[^'\"\n\0]+()",  # api_key = "VALUE", 'token': 'VALUE'
        # scheme://user:VALUE@host, scheme://VALUE@host; up to the last @, because a password may contain one
        r"(://(?:[^\s\0/@:'\"<>]*:)?)[^\s\0/'\"<>]+(@)",
        r"(?i)(authorization:\s*(?:(?:bearer|basic|token)\s+)?)[^\s\0'\"]+()",
        # Slack (hooks.slack.com/), Discord (/api/webhooks/), Teams (x.webhook.office.com/)
        r"(?i)(://(?:hooks?\.|[^\s\0'\"/]+/(?:api/)?webhooks?|[^\s\0'\"/]*webhook)[^\s\0'\"/]*/)[^\s\0'\"]+()",
    )
)
_SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]")  # eos_token: "</s>" is not a secret


def without_secrets(text: str) -> str:
    """Replaces passwords and keys in a text or a command line (words separated by blanks or NUL) by ***."""

    def hide_value(found: re.Match[str]) -> str:
        name = re.split(r"[\s\0]", text[max(0, found.start() - 100) : found.end(1)].rstrip("\0 \t\n"))[-1]
        return f"{found[1]}***" if name.startswith("-") else found[0]

    shown = _SECRET_WORD.sub(hide_value, text)
    for pattern in _SECRET_TEXT:
        shown = pattern.sub(r"\1***\2", shown)
    return shown


def hide_secrets(value: object, name: str = "") -> object:
    """Replaces passwords and keys in plain data, detected by their text and by the `name` of their key."""
    if isinstance(value, Mapping):
        return {key: hide_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        if all(isinstance(one, str) for one in value):  # may be a command line
            value = without_secrets("\0".join(value)).split("\0") if value else value
        return [hide_secrets(one, name) for one in value]
    if not isinstance(value, str):
        return value
    if "webhook" in name and "://" in value:
        return only_host(value)
    if _SECRET_KEY.search(name) and value and not _SPECIAL_TOKEN.fullmatch(value):
        return "***"
    return without_secrets(value)


def role_of_command(title: str) -> str:
    """The role of a command: `reward` for `python serve.py reward 8000` (a plain word after the script), `reward server` for
    `python -u /job/reward_server.py --port 80`, else the name of the program."""
    if found := re.search(r"\.py ([a-z][a-z_]{2,30})(\s|$)", title):
        return found[1]
    words = title.split()
    for index, word in enumerate(words):
        if word == "-m" and index + 1 < len(words):
            return words[index + 1].rsplit(".", 1)[-1]
        if word.endswith(".py"):
            return word.rsplit("/", 1)[-1][:-3].replace("_", " ")
    return words[0].rsplit("/", 1)[-1] if words else ""


def only_host(url: str) -> str:
    """The part of a URL that is not secret: paths of webhooks are keys, and a password may stand before the host."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest)[0].rpartition('@')[2]}/…"


def printable(text: str, limit: int = 2000) -> str:
    """The text without control characters, truncated to `limit`."""
    text = text if len(text) <= limit else f"{text[:limit]} …"
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type; its errors are ValueErrors."""
    found = _decoders.get(kind)
    if found is None:
        import msgspec

        with _first_use:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Thread-safe `msgspec.json.decode(data, type=kind)`."""
    return json_decoder(kind).decode(data)


def to_json(value: object) -> str:
    """Thread-safe `msgspec.json.encode(value)`."""
    import msgspec

    json_decoder(type(value))
    return msgspec.json.encode(value).decode()


def convert(value: object, kind: type[T], *, strict: bool = True) -> T:
    """Thread-safe `msgspec.convert(value, kind)`."""
    import msgspec

    json_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)


_EXTENSIONS = re.compile(
    r"(\.(pickle|pkl|pk|json|txt|bin|dat|dump|log|bak|old|orig|tmp|copy|gz|zst|zstd|tgz|tar|box|trace))+$",
    re.I,
)
_BOX = re.compile(r"\.a(\d+)\.r(\d+)\.p(\d+)\.box")
_EXPLICIT = re.compile(r"(?<![A-Za-z])(local[_\-. ]?)?rank[_\-. =]*(\d+)", re.I)
_TRACE = re.compile(r"(?:trace|dump|fr|box|stacks?)[_\-. ]?(\d+)(?!\d)", re.I)
_SHORT = re.compile(r"(?<![A-Za-z0-9])r[_\-]?(\d+)(?![A-Za-z0-9])", re.I)
_NUMBER = re.compile(r"\d+")
_TIME = re.compile(r"(?<!\d)20\d\d-?[01]\d-?[0-3]\d[-_T ]?[0-2]\d[-:_.]?[0-5]\d[-:_.]?[0-5]\d(?!\d)")
_NO_RANK = re.compile(r"(?:pid|host|node|ip|local[_\-. ]?rank)[_\-. =]*$", re.I)
_ATTEMPT = re.compile(
    r"(?:attempt|restart|retry|try|gen|generation)[_\-. =]*(\d+)|(?<![A-Za-z0-9])a(\d+)(?=[._\-/]|$)", re.I
)
MAX_RANK = 999_999  # larger numbers are process ids, dates or times


def rank_by_prefix(name: str, prefix: str) -> int | None:
    """The number right after the prefix, which may be anywhere in the name."""
    match = re.search(re.escape(prefix) + r"(\d+)", name)
    return _plausible(match.group(1)) if match else None


def without_time(path: str) -> str:
    """The path without timestamps such as "20261118_004611" or "2026-11-18T00:46:11"."""
    return _TIME.sub("", path)


def rank_of_name(path: str) -> int | None:
    """The rank in a single path, or None."""
    parts = without_time(path).replace("\\", "/").split("/")
    name = parts[-1]
    box = _BOX.search(name)
    if box:
        return int(box.group(2))
    for part in (name, *reversed(parts[:-1][-3:])):
        found = _explicit(part)
        if found is not None:
            return found
    return _of_stem(name)


def _of_stem(name: str) -> int | None:
    """The rank in "trace_3" or "dump.r3"."""
    stem = _EXTENSIONS.sub("", name)
    for pattern in (_TRACE, _SHORT):
        matches = [_plausible(match.group(1)) for match in pattern.finditer(stem)]
        matches = [rank for rank in matches if rank is not None]
        if matches:
            return matches[-1]
    return None


def ranks_of_names(paths: Iterable[str]) -> dict[str, int]:
    """Ranks for a set of files: from single paths if possible, else from the differences between names.

    Names that differ only in numbers form a family. The number that differs in every name is the rank (if several do, the
    one with the smallest values). A single file has its last plausible number as rank.
    """
    found: dict[str, int] = {}
    families: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        rank = rank_of_name(path)
        if rank is not None:
            found[path] = rank
        else:
            name = without_time(path.rpartition("/")[2])
            stem = _EXTENSIONS.sub("", name)
            families[_NUMBER.sub("#", stem)].append(path)
    for skeleton, members in families.items():
        if "#" in skeleton:
            found.update(_family_ranks(skeleton, members))
    return found | _not_of_folder(found)


def _not_of_folder(found: dict[str, int]) -> dict[str, int]:
    """Better ranks for files that took the rank of their folder ("debug_rank_0/trace_1"), if their own names differ."""
    folders: dict[str, list[str]] = defaultdict(list)
    for path in found:
        folders[path.rpartition("/")[0]].append(path)
    better: dict[str, int] = {}
    for folder, paths in folders.items():
        if len(paths) > 1 and _explicit(folder) is not None:
            names = {path: path.rpartition("/")[2] for path in paths}
            own = {path: rank for path, name in names.items() if (rank := _of_stem(name)) is not None}
            if not any(map(_explicit, names.values())) and len(set(own.values())) == len(paths):
                better |= own
    return better


def _family_ranks(skeleton: str, members: list[str]) -> dict[str, int]:
    """Ranks of a family: the number that differs in every name, else node and GPU number combined."""
    rows = [_NUMBER.findall(_EXTENSIONS.sub("", without_time(path.rpartition("/")[2]))) for path in members]
    columns = {
        place: [int(digits) for digits in column]
        for place, column in enumerate(zip(*rows, strict=True))
        if all(_plausible(digits) is not None for digits in column)
    }
    before = skeleton.split("#")
    ranks = [c for place, c in columns.items() if not _NO_RANK.search(before[place])] or [*columns.values()]
    distinct = [column for column in ranks if len(set(column)) == len(members)]
    varying = [column for column in columns.values() if len(set(column)) > 1]
    if len(members) > 1 and distinct:  # larger numbers belong to hosts and processes
        return dict(zip(members, min(reversed(distinct), key=max), strict=True))
    if len(varying) == 2 and len({*zip(*varying, strict=True)}) == len(members):
        return _grid_ranks(members, *varying)
    return dict(zip(members, ranks[-1], strict=True)) if ranks else {}


def _grid_ranks(members: list[str], nodes: list[int], gpus: list[int]) -> dict[str, int]:
    """Ranks from node and GPU numbers, node by node; {} unless nodes are numbered consecutively from 0 or 1."""
    first, size = min(nodes), len(set(gpus))
    counted = first < 2 and set(nodes) == set(range(first, first + len(set(nodes))))
    if not counted or set(gpus) != set(range(size)) or len(members) != len(set(nodes)) * size:
        return {}
    return {path: (node - first) * size + gpu for path, node, gpu in zip(members, nodes, gpus, strict=True)}


def _explicit(part: str) -> int | None:
    """The number in "rank_3"; "local_rank_3" does not count."""
    matches = [(bool(m.group(1)), _plausible(m.group(2))) for m in _EXPLICIT.finditer(part)]
    ranks = [rank for local, rank in matches if not local and rank is not None]
    return ranks[-1] if ranks else None


#: The beginnings of stack captures of several tools, after up to four other lines; kinds as in `stacktraces.raw_files`.
_CAPTURES = (
    ("pyspy.json", re.compile(rb'\s*\[\s*\{\s*"pid":\s*\d+,\s*"thread_id"')),
    *(
        (kind, re.compile(rb"(?:(?!Fatal Python error)[^\n]{0,200}\n){0,4}?\s*(?:" + begin + rb")"))
        for kind, begin in (
            ("pyspy.txt", rb"Process \d+: [^\n]*(?:\s+Python v\d|\Z)"),
            ("pystack.txt", rb"Traceback for thread \d+ "),
            (
                "faulthandler.txt",
                rb"(?:Current thread|Thread) 0x[0-9a-f]+[^\n]{0,80} \(most recent call first\):",
            ),
            ("debug_server.txt", rb"=== Rank \d+: http[^\n]*/(?:dump_traceback|pyspy_dump)[^\n]* ===\r?\n"),
            ("gdb.txt", rb"\[New LWP \d+\]|\[Thread debugging using |Thread \d+ \(Thread 0x"),
        )
    ),
)


def kind_of_capture(head: bytes) -> str:
    """The tool that wrote a stack capture, from the first bytes of the file; "" for any other file."""
    return next((kind for kind, begin in _CAPTURES if begin.match(head)), "")


def attempt_of_name(path: str) -> int | None:
    """The attempt in a path (attempt_2/, restart1, job.a2.r0...), innermost first, or None."""
    for part in reversed(path.replace("\\", "/").split("/")):
        matches = list(_ATTEMPT.finditer(part))
        if matches:
            number = matches[-1].group(1) or matches[-1].group(2)
            return int(number) if len(number) < 7 else None
    return None


def _plausible(digits: str) -> int | None:
    """The number, if it can be a rank: at most 6 digits."""
    if len(digits) > 6 or int(digits) > MAX_RANK:
        return None
    return int(digits)
