"""torch's debug server (`torch.distributed.debug.start_debug_server`), of jobs that know nothing of allranks.

`fetch` takes the stacks and the recorded calls of all ranks from its pages, into a folder that `diagnose` and `stacks` read.
`VerdictHandler` adds a page with the verdict to it:

    start_debug_server(handlers=[*default_handlers(), VerdictHandler()])

Its pages are not protected: it belongs into networks that one trusts, and what it sends is read as any file from outside.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from allranks.errors import InputError

if TYPE_CHECKING:
    from allranks.api.functions import DiagnosisResult

PORT = 25999
MAX_PAGE_BYTES = 256 << 20
#: Rings to ask for: torch has one per backend, and does not list them.
BACKENDS = ("gloo", "nccl2", "nccl-lazy", "xccl", "ucc", "mpi")
_RANK = re.compile(r"<h2>Rank (\d{1,7}): [^<\n]*</h2>(.*?)(?=<h2>Rank \d+: |</section>)", re.DOTALL)
_TEXT = re.compile(r"<pre>(.*)</pre>", re.DOTALL)


def is_address(text: str) -> bool:
    """Whether a text is the address of a server and not of a file."""
    return bool(re.fullmatch(r"https?://[^/]+/?", text))


def fetch(address: str, folder: Path, timeout_s: float = 60.0) -> list[str]:
    """Writes the stacks of every rank, and its calls where torch recorded some; returns notes on what is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    stacks, notes = _page(address, "/stacks", timeout_s)
    if not stacks:
        raise InputError(
            f"{address}: no rank answered", hint="\n".join(notes) or "Is it torch's debug server?"
        )
    for rank, text in stacks.items():
        (folder / f"rank{rank}.faulthandler.txt").write_text(text, encoding="utf-8")
    rings = ["/fr_trace_nccl_json", *(f"/fr_trace_json?backend={name}" for name in BACKENDS)]
    best: dict[int, tuple[int, str]] = {}
    for path in rings:
        for rank, text in _page(address, path, timeout_s)[0].items():
            best[rank] = max(best.get(rank, (0, "")), (_calls_in(text), text))
    for rank, (calls, text) in best.items():
        if calls:
            (folder / f"rank_{rank}.json").write_text(text, encoding="utf-8")
    silent = sorted(rank for rank in stacks if not best.get(rank, (0, ""))[0])
    return notes + ([f"no recorded calls of ranks {silent}: stacks only"] if silent else [])


def _calls_in(text: str) -> int:
    try:
        entries = json.loads(text).get("entries")
    except (ValueError, AttributeError, RecursionError):
        return 0
    return len(entries) if isinstance(entries, list) else 0


def _page(address: str, path: str, timeout_s: float) -> tuple[dict[int, str], list[str]]:
    """(rank → what it answered, notes on those that did not) of a page that asks all ranks."""
    import urllib.request  # slow to import, rarely needed

    url = address.rstrip("/") + path
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            text = answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        return {}, [f"{url}: {getattr(error, 'reason', None) or error}"]
    found: dict[int, str] = {}
    notes = []
    for rank, body in _RANK.findall(text):
        inside = _TEXT.search(body)
        if inside and "Failed to fetch" not in body:
            found[int(rank)] = inside[1]
        else:
            notes.append(f"rank {rank} did not answer {path}")
    return found, notes


@dataclass
class VerdictHandler:
    """A page of the debug server with the verdict on its job, and a text in its periodic dumps. `port`: the server's."""

    port: int = PORT
    fetch_timeout: float = 60.0  # set by the server

    def routes(self) -> list[SimpleNamespace]:
        """The page."""
        page = lambda request: self.page().encode("utf-8", "replace")  # noqa: E731
        return [SimpleNamespace(path="/allranks", handler=page)]

    def nav_links(self) -> list[SimpleNamespace]:
        """What the server's menu shows."""
        return [SimpleNamespace(path="/allranks", label="allranks: verdict")]

    def templates(self) -> dict[str, str]:
        """None: the page is ours."""
        return {}

    def page(self) -> str:
        """The verdict as a whole page."""
        return str(self._judge().to_html())

    def dump(self) -> str | None:
        """The verdict as text; it is written where the server's `enabled_dumps` names it."""
        return str(self._judge())

    def dump_filename(self) -> str:
        """Its name in `enabled_dumps`."""
        return "allranks"

    def _judge(self) -> DiagnosisResult:
        import tempfile

        from allranks.api.functions import diagnose

        with tempfile.TemporaryDirectory(prefix="allranks-") as folder:
            fetch(f"http://localhost:{self.port}", Path(folder), self.fetch_timeout)
            return diagnose(folder)
