"""Text to index, and what an index of it must hold."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from allranks.elastic.index import BuildRequest, TokenIndexFile, build_index


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of random words, some empty, some with non-ASCII letters."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(1, 8))) for _ in range(300)] + [
        "für",
        "数据",
        "🎈",
    ]
    return [" ".join(chance.choices(words, k=chance.choice([0, 1, 5, 40]))) for _ in range(count)]


def write_jsonl(path: Path, documents: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(documents)))
    return path


def tokens_of(index: Path) -> list[list[int]]:
    """The tokens of every document of an index."""
    with TokenIndexFile(index) as opened:
        return [opened.document(i).tolist() for i in range(opened.num_documents)]


def plain_loop(tokenizer_file: Path, documents: list[str]) -> list[list[int]]:
    """The same from the loop that everybody writes."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return [tokenizer.encode(text).ids for text in documents]


def small_index(tmp_path: Path, count: int = 50) -> Path:
    """An index of bytes, built from data.jsonl beside it."""
    source = write_jsonl(tmp_path / "data.jsonl", texts(count))
    build_index(BuildRequest((str(source),), str(tmp_path / "data.index")))
    return tmp_path / "data.index"


def build_command(source: Path, output: Path, tokenizer: Path, *more: str) -> list[str]:
    """`allranks index build` as it is typed."""
    return [
        sys.executable, "-m", "allranks", "index", "build", str(source), "-o", str(output),
        "--tokenizer", str(tokenizer), "--json", *more,
    ]  # fmt: skip
