"""Tells an incident to everybody who should know: its page, the lighthouse, webhooks, a copy. Runs in the agent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from allranks.incidents.folder import IncidentFolder, write_atomically
from allranks.incidents.webhook import send
from allranks.model.incident import Incident
from allranks.report.story import headline, render_story

log = logging.getLogger("allranks.agent")


@dataclass
class IncidentPublisher:
    """None of those who are told may stop the loop or each other."""

    webhooks: tuple[str, ...] = ()
    on_incident: Callable[[Incident], None] = lambda incident: None
    keep: Callable[[Path], None] = lambda folder: None  # a copy elsewhere (incidents/upload.py)

    def publish(self, opened: IncidentFolder) -> None:
        """To everybody."""
        tellers: tuple[Callable[[], object], ...] = (
            lambda: self.write_page(opened),
            lambda: self.on_incident(opened.current),
            lambda: send(self.webhooks, opened.current, headline(opened.current)),
            lambda: self.keep(opened.path),
        )
        for tell in tellers:
            try:
                tell()
            except Exception:
                log.exception("%s could not be told everywhere", opened.current.id)

    def say(self, opened: IncidentFolder) -> None:
        """The verdict in the log: one whole line, with the page that has the rest."""
        story = opened.path.absolute() / "story.html"
        log.error("%s: %s; story: %s", opened.current.id, headline(opened.current).rstrip("."), story)

    def write_page(self, opened: IncidentFolder) -> None:
        """Only the page in the incident's folder."""
        report = opened.path / "diagnosis.txt"
        lines = tuple(report.read_text().splitlines()) if report.exists() else ()
        write_atomically(opened.path / "story.html", render_story(opened.current, lines))
