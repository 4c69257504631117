"""Classes of elastic_harness that have no equivalent in allranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.checkpoint.stores.backends import MemorySnapshotBackend
from allranks.elastic.index import BuildRequest, HasEncode, build_index
from allranks.elastic.index.file import IndexHeader


class SharedMemorySnapshotBackend(MemorySnapshotBackend):
    """Keeps snapshots in this process. Snapshots that outlive it are kept by `allranks run`."""

    def __init__(self, max_snapshots: int = 2, name: str = "elastic_training_snapshot") -> None:
        super().__init__(max_snapshots)
        self.name = name


@dataclass
class S3Config:
    """Holds settings only: S3Backend takes them as arguments."""

    bucket: str
    prefix: str = ""
    region: str | None = None
    connect_timeout: float = 10.0
    read_timeout: float = 60.0
    max_retries: int = 3
    retry_mode: str = "adaptive"


class IndexBuilder:
    """`build_index` as an object; also writes the JSON file {files, total_tokens} of elastic_harness next to the index."""

    def __init__(self, tokenizer: HasEncode, entry_interval: int = 10_000, text_key: str = "text") -> None:
        self.tokenizer = tokenizer
        self.text_key = text_key
        self.entry_interval = entry_interval  # unused: every document is indexed

    def build(self, files: Sequence[str | Path], output: str | Path) -> IndexHeader:
        names = tuple(str(file) for file in files)
        request = BuildRequest(names, str(output), text_key=self.text_key, force=True)
        header = build_index(request, tokenizer=self.tokenizer).header
        beside = Path(output).with_suffix(".json")
        if not beside.exists() or beside.read_bytes()[:11] == b'{"allranks"':  # overwrites only its own file
            facts = {"allranks": 1, "files": list(names), "total_tokens": header.total_tokens}
            beside.write_text(json.dumps(facts))
        return header
