"""The incident folder: evidence and story. A crash leaves the last complete version.

FOLDER/ID/incident.json   the story so far (model.incident), rewritten atomically
FOLDER/ID/boxes/          black boxes of every rank, copied before anything is killed
FOLDER/ID/stacks/         stack bundle
FOLDER/ID/diagnosis.json  as `allranks diagnose --json`
FOLDER/ID/evidence.json   stacks and last calls by rank, for the page of the job
FOLDER/ID/story.html      one page for people
"""

from __future__ import annotations

import json
import logging
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from allranks.blackbox.files import folder_bytes
from allranks.errors import InputError, why
from allranks.model.diagnosis import Action, Finding, Incident, Kind, Moment
from allranks.model.files import write_atomically
from allranks.model.parsing import printable
from allranks.report import as_json

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("allranks.agent")

T = TypeVar("T")

MAX_STORY_BYTES = 64 << 20
MAX_SHOWN = 10  # incidents that a hint lists
Story = dict[str, Any]  # an incident, or a part of it, as in its file (docs/reference/json.md)
MAX_REMEMBERED = 200  # incidents, processes and the like in the agent's memory
MAX_BYTES = 2 << 30  # of all incidents in one folder


class Changes(TypedDict, total=False):
    """Fields of an incident that may change while it is open (model/diagnosis.py)."""

    kind: Kind
    reason: str
    node: str
    ranks: tuple[int, ...]
    verdict: Finding | None
    stacks: Story
    action: Action
    missing: tuple[str, ...]
    closed: float | None
    durations_s: dict[str, float]


@dataclass
class IncidentFolder:
    """Writes one incident. `current` always equals the file."""

    path: Path
    current: Incident
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def update(self, *moments: Moment, **changes: Unpack[Changes]) -> Incident:
        """Adds moments, durations and other facts, and writes the file. May be called from any thread."""
        with self._lock:
            timeline = tuple(sorted((*self.current.timeline, *moments), key=lambda moment: moment.at))
            changes["durations_s"] = self.current.durations_s | changes.get("durations_s", {})
            self.current = replace(self.current, timeline=timeline, **changes)
            story = json.dumps(as_json.incident(self.current), indent=1)
            write_atomically(self.path / "incident.json", story)
            return self.current

    def discard(self) -> None:
        """Removes the folder: another node leads the incident."""
        shutil.rmtree(self.path, ignore_errors=True)


def keep_newest(remembered: dict[T, Any], limit: int = MAX_REMEMBERED) -> None:
    """Removes the oldest entries, since a job may run for weeks."""
    while len(remembered) > limit:
        del remembered[next(iter(remembered))]


def copy_boxes(boxes: list[Path], target: Path) -> list[str]:
    """Copies black boxes into a folder; returns a sentence for each one that could not be copied."""
    target.mkdir(parents=True, exist_ok=True)
    missing = []
    for box in boxes:
        try:
            shutil.copy2(box, target / box.name)
        except OSError as error:
            missing.append(f"black box {box.name}: {why(error)}")
    return missing


def new_id(now: float | None = None) -> str:
    """An id that sorts by time. Without the kind: a stall may become a hang."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))


def open_incident(
    folder: Path,
    *,
    kind: Kind,
    job: str,
    reason: str,
    node: str = "",
    ranks: tuple[int, ...] = (),
    step: int = -1,
) -> IncidentFolder:
    """Creates the folder of a new incident."""
    now = time.time()
    path = _make_folder(folder, new_id(now))
    incident = Incident(path.name, kind, job, now, reason, node, ranks, step, folder=str(path.absolute()))
    opened = IncidentFolder(path, incident)
    opened.update()
    for removed in remove_oldest(folder, path.name):
        log.warning("%s was removed: closed incidents take more than %d MiB", removed, MAX_BYTES >> 20)
    return opened


def _make_folder(folder: Path, stem: str) -> Path:
    """Creates a folder with a new name."""
    for number in range(1000):
        path = folder / (stem + (f"-{number}" if number else ""))
        try:
            path.mkdir(mode=0o700, parents=True)
            return path
        except FileExistsError:
            continue
    return Path(tempfile.mkdtemp(prefix=f"{stem}-", dir=folder))


def remove_oldest(folder: Path, keep: str, max_bytes: int = MAX_BYTES) -> list[Path]:
    """Removes closed incidents, the oldest first, until all together are within the limit; returns the removed folders."""
    stories = {path: story for path, story in _stories(folder) if not path.is_symlink()}
    sizes = {path: folder_bytes(path)[0] for path in stories}
    removed: list[Path] = []
    for path in [path for path in sizes if path.name != keep and stories[path].get("closed") is not None]:
        if sum(sizes.values()) <= max_bytes:
            break
        shutil.rmtree(path, ignore_errors=True)
        del sizes[path]
        removed.append(path)
    return removed


def read_incidents(folder: Path) -> list[Story]:
    """All incidents of a folder, oldest first; unreadable ones are skipped."""
    return [story for _, story in _stories(folder)]


def one_incident(path: Path) -> Path:
    """The incident in a folder of incidents that holds only one; any other path as it is. InputError for several incidents."""
    found = list(_stories(path))
    if len(found) < 2:
        return found[0][0] if found else path
    lines = [
        f"  {folder}: {printable(str(story.get('reason')))}" for folder, story in found[: -MAX_SHOWN - 1 : -1]
    ]
    lines += [f"  … and {len(found) - MAX_SHOWN} older ones"] if len(found) > MAX_SHOWN else []
    raise InputError(
        f"there are {len(found)} incidents in {path}", hint="\n".join(["Give one of them:", *lines])
    )


def _stories(folder: Path) -> Iterator[tuple[Path, Story]]:
    """Each incident's own folder and story. Other users may write to the folder, so unreadable files are skipped."""
    for path in sorted(folder.glob("*/incident.json")):
        try:
            if stat.S_ISREG(path.stat().st_mode) and path.stat().st_size <= MAX_STORY_BYTES:
                story = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(story, dict):
                    yield path.parent, story
        except (OSError, ValueError, RecursionError):
            continue
