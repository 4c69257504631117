"""Publishes an incident: its page, the lighthouse, webhooks, a copy in an object store. Runs in the agent.

A webhook gets one JSON POST: `slack:URL` (or a hooks.slack.com address) in Slack's shape, anything else the whole
incident; `tensorboard:`, `wandb:` and `otlp:` addresses go to those tools (sinks.py). The folder on disk stays the original: what fails here is logged.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from allranks.errors import InputError
from allranks.incidents.folder import IncidentFolder, write_atomically
from allranks.incidents.sinks import SINKS
from allranks.load import LoadOptions, load_paths
from allranks.model.incident import Incident
from allranks.model.trace import RankTrace
from allranks.report import as_json
from allranks.report.story import chosen_ranks, headline, rank_evidence, render_story

log = logging.getLogger("allranks.agent")

MAX_FILE_BYTES = 256 << 20
CLOSE_S = 30.0
EVIDENCE = "evidence.json"  # stacks and last calls of the ranks, for the page of the job


@dataclass
class IncidentPublisher:
    """A receiver that fails stops neither the others nor the loop."""

    webhooks: tuple[str, ...] = ()
    on_incident: Callable[[Incident], None] = lambda incident: None
    upload: Callable[[Path], None] = lambda folder: None  # `IncidentUploader.keep`

    def publish(self, opened: IncidentFolder) -> None:
        """To everybody."""
        receivers: tuple[Callable[[], object], ...] = (
            lambda: self.write_page(opened),
            lambda: self.on_incident(opened.current),
            lambda: send(self.webhooks, opened.current, headline(opened.current)),
            lambda: self.upload(opened.path),
        )
        for notify in receivers:
            try:
                notify()
            except Exception:  # callbacks of others
                log.exception("%s could not be published everywhere", opened.current.id)

    def log(self, opened: IncidentFolder) -> None:
        """The verdict in the log: one whole line, with the page that has the rest."""
        story = opened.path.absolute() / "story.html"
        log.error("%s: %s; story: %s", opened.current.id, headline(opened.current).rstrip("."), story)

    def write_page(self, opened: IncidentFolder) -> None:
        """Only the page in the incident's folder."""
        report = opened.path / "diagnosis.txt"
        lines = tuple(report.read_text().splitlines()) if report.exists() else ()
        evidence = rank_evidence(opened.current, _traces(opened))
        body = {"incident": opened.current.id, "ranks": [one.to_dict() for one in evidence]}
        write_atomically(opened.path / EVIDENCE, json.dumps(body))
        write_atomically(opened.path / "story.html", render_story(opened.current, lines, evidence))


def payload(address: str, incident: Incident, sentence: str) -> tuple[str, dict[str, object]]:
    """Where to send, and what."""
    if address.startswith("slack:") or "//hooks.slack.com/" in address:
        lines = [f"*{incident.job}*: {sentence}"]
        if incident.action is not None:
            lines.append(f"{incident.action.kind.replace('_', ' ')}: {incident.action.reason}")
        lines.append(f"evidence: `{incident.folder}`")
        return address.removeprefix("slack:"), {"text": "\n".join(lines)}
    return address, {"sentence": sentence, "incident": as_json.incident(incident)}


def send(
    addresses: tuple[str, ...],
    incident: Incident,
    sentence: str,
    *,
    timeout_s: float = 5.0,
    attempts: int = 3,
    done: Callable[[str, bool], None] = lambda address, ok: None,
) -> threading.Thread | None:
    """Posts to every address in one thread; failures are logged and never reach the caller."""
    if not addresses:
        return None

    def work() -> None:
        for address in addresses:
            scheme, _, rest = address.partition(":")
            if scheme in SINKS:
                done(address, _write(scheme, rest, incident, sentence))
            else:
                where, body = payload(address, incident, sentence)
                done(address, _post(where, body, timeout_s=timeout_s, attempts=attempts))

    thread = threading.Thread(target=work, name="allranks-webhook", daemon=True)
    thread.start()
    return thread


def _write(scheme: str, target: str, incident: Incident, sentence: str) -> bool:
    try:
        SINKS[scheme][0](target, incident, sentence)
        return True
    except Exception:  # whatever the other tool raises
        log.exception("%s:%s did not take incident %s", scheme, target, incident.id)
        return False


def _post(url: str, body: dict[str, object], *, timeout_s: float, attempts: int) -> bool:
    data = json.dumps(body).encode()
    for attempt in range(1, attempts + 1):
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=timeout_s):
                return True
        except (OSError, ValueError) as error:
            log.warning("webhook %s failed (%d of %d): %s", url.split("?")[0], attempt, attempts, error)
            if isinstance(error, ValueError):
                return False
            time.sleep(min(2.0, 0.2 * attempt))
    return False


class UploadTarget(Protocol):
    """Where the bytes go (checkpoint/stores/object_store.py); `put` raises OSError."""

    def put(self, key: str, pieces: Iterable[memoryview], length: int) -> None: ...


@dataclass
class IncidentUploader:
    """`keep` may be called again for the same folder: only what has changed is copied."""

    blobs: UploadTarget
    _wanted: queue.SimpleQueue[Path | None] = field(default_factory=queue.SimpleQueue)
    _copied: dict[Path, tuple[int, int]] = field(default_factory=dict)  # file -> (size, mtime)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._run, name="allranks-upload", daemon=True)
        self._thread.start()

    def keep(self, folder: Path) -> None:
        """Soon; returns at once."""
        self._wanted.put(folder)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Copies what was asked for, within the time."""
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("not all incidents reached the object store within %g s", timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (folder := self._wanted.get()) is not None:
            begin = time.monotonic()
            try:
                copied = self._copy(folder)
            except Exception as error:  # of any store; the original is on disk
                log.warning("%s could not be copied to the object store: %s", folder.name, error)
                continue
            if copied:
                took = time.monotonic() - begin
                log.info("%s: %d files copied to the object store in %.1f s", folder.name, copied, took)

    def _copy(self, folder: Path) -> int:
        copied = 0
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
            stat = path.stat()
            version = (stat.st_size, stat.st_mtime_ns)
            if self._copied.get(path) == version or stat.st_size > MAX_FILE_BYTES:
                continue
            data = path.read_bytes()
            self.blobs.put(
                f"{folder.name}/{path.relative_to(folder).as_posix()}", [memoryview(data)], len(data)
            )
            self._copied[path] = version
            copied += 1
        return copied


def _traces(opened: IncidentFolder) -> list[RankTrace]:
    """The black boxes of the ranks whose last calls are shown; few, for this is written before a rank is restarted."""
    boxes, ranks = opened.path / "boxes", chosen_ranks(opened.current)
    if not ranks or not boxes.is_dir():
        return []
    try:
        return load_paths([str(boxes)], LoadOptions(ranks=ranks, allow_nothing=True)).traces
    except (InputError, OSError) as error:
        log.warning("%s: no last calls: %s", opened.current.id, error)
        return []
