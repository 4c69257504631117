"""Writes a small corpus for the examples: sentences with some structure, so that a loss can fall."""

from __future__ import annotations

import json
import random
import sys


def main(path: str, documents: int = 3000) -> None:
    chance = random.Random(0)
    who, does, what = ["the rank", "a node", "the agent", "one replica"], ["waits for", "heals", "restarts", "follows"], ["its peers", "the store", "a checkpoint", "the lighthouse"]  # fmt: skip
    with open(path, "w") as file:
        for _ in range(documents):
            lines = [
                f"{chance.choice(who)} {chance.choice(does)} {chance.choice(what)}."
                for _ in range(chance.randint(2, 9))
            ]
            file.write(json.dumps({"text": " ".join(lines)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "corpus.jsonl")
