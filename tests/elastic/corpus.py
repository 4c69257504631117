"""Text to index."""

from __future__ import annotations

import json
import random
from pathlib import Path


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
