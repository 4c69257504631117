"""The token index: text in, a memory-mapped store of tokens out. No torch.

allranks index build data/*.jsonl -o train.index --tokenizer tokenizer.json
index = TokenIndexFile("train.index")
index.total_tokens, index.tokens[:10], index.find_position(12345)
"""

from __future__ import annotations

from allranks.elastic.index.build import BuildProgress, BuildRequest, IndexBuilder, build_index
from allranks.elastic.index.file import IndexHeader, TokenIndexFile

__all__ = ["BuildProgress", "BuildRequest", "IndexBuilder", "IndexHeader", "TokenIndexFile", "build_index"]
