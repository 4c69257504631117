"""Where samples come from: sequences of a token index, or the items of any dataset. Runs in ranks and loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from allranks.elastic.data.order import Ids
from allranks.elastic.index.file import TokenIndexFile
from allranks.errors import DataLoadingError


@dataclass(frozen=True)
class TokenSamples:
    """An index cut into sequences; a sample has one token more than `seq_length`, for the targets."""

    index: TokenIndexFile
    seq_length: int

    def __len__(self) -> int:
        return max(0, (self.index.total_tokens - 1) // self.seq_length)

    @property
    def fingerprint(self) -> str:
        return self.index.fingerprint

    @property
    def name(self) -> str:
        return str(self.index.path)

    def read(self, ids: Ids, out: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Copies samples into the rows of `out`."""
        tokens, length = self.index.tokens, self.seq_length
        for row, start in enumerate((ids * length).tolist()):
            out[row] = tokens[start : start + length + 1]


@dataclass(frozen=True)
class ItemSamples:
    """Any dataset with `len` and `[]`: the order and the state are ours, the items are the user's."""

    items: Any

    def __len__(self) -> int:
        return len(self.items)

    @property
    def fingerprint(self) -> str:
        return f"{type(self.items).__qualname__}-{len(self):x}"

    @property
    def name(self) -> str:
        return type(self.items).__qualname__


def as_samples(
    one: Any, seq_length: int, data_files: Sequence[str] | None = None
) -> TokenSamples | ItemSamples:
    """From an index (or its path), or from anything with `len` and `[]`."""
    opened = _opened(one, data_files) if isinstance(one, (str, Path)) else one
    if not isinstance(opened, TokenIndexFile):
        if not len(opened):
            raise DataLoadingError("the dataset is empty", type(opened).__qualname__)
        return ItemSamples(opened)
    source = TokenSamples(opened, seq_length)
    if not len(source):
        raise DataLoadingError(
            f"the index has {opened.total_tokens} tokens, a sample needs {seq_length + 1}", str(opened.path)
        )
    return source


def _opened(path: str | Path, data_files: Sequence[str] | None) -> TokenIndexFile:
    """Opens an index; a missing one is told in terms of the data that it would be of."""
    if data_files and not Path(path).exists():
        files = " ".join(map(str, data_files))
        raise DataLoadingError(
            "Token index file not found",
            str(data_files[0]),
            hint=f"build it first: allranks index build {files} -o {path} --tokenizer tokenizer.json",
        )
    return TokenIndexFile(path)
