"""The token index: text in, a memory-mapped store of tokens out. No torch.

allranks index build data/*.jsonl -o train.index --tokenizer tokenizer.json
index = TokenIndexFile("train.index")
index.total_tokens, index.tokens[:10], index.find_position(12345)
"""

from __future__ import annotations

from allranks.elastic.index.build import BuildRequest, IndexBuilder, Progress, build_index
from allranks.elastic.index.file import TokenIndexFile
from allranks.elastic.index.layout import IndexHeader

__all__ = ["BuildRequest", "IndexBuilder", "IndexHeader", "Progress", "TokenIndexFile", "build_index"]
