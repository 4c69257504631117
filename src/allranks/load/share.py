"""Reads one source after the other, archives included. What comes out is settled in `loading.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from allranks.load.reading import Reader
from allranks.load.result import LoadOptions, Raw, Unreadable
from allranks.load.sources import Source, is_tar, read_all, tar_members, unwrap


@dataclass
class Share:
    """Some of the files, and what became of them. Runs in the loading process or in a child of it."""

    options: LoadOptions
    reader: Reader
    raws: list[tuple[Source, Raw]] = field(default_factory=list)
    failed: list[tuple[Source, Unreadable]] = field(default_factory=list)

    def read(self, source: Source) -> None:
        """Reads one source, looking into archives."""
        try:
            members = self._members(source)
            if members is not None:
                for member in members:
                    self.read_member(member)
                return
        except Unreadable as error:
            self.failed.append((source, error))
            return
        self.read_member(source)

    def read_member(self, source: Source) -> None:
        """Reads one source that is not an archive."""
        try:
            self.raws.append((source, self.reader.read(source)))
        except Unreadable as error:
            self.failed.append((source, error))

    def _members(self, source: Source) -> list[Source] | None:
        """The members of a tar file, compressed or not; None when the source is none."""
        name = source.path.lower()
        if source.problem or not (".tar" in name or name.endswith((".tgz", ".tzst"))):
            return None
        try:
            limit = self.options.max_box_bytes
            data, problem = unwrap(read_all(source, limit), limit)
        except OSError as error:
            raise Unreadable(f"cannot be read: {error.strerror or error}") from error
        if not is_tar(data):
            return None
        members = list(tar_members(source, data, self.options.max_file_bytes))
        if problem:
            self.failed.append((source, Unreadable(problem, kind="tar archive")))
        return members
