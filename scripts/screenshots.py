"""Writes an index of the screenshots that `make docs` takes; exit code 1 when one of them is missing.

python scripts/screenshots.py site/screenshots
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

REPORTS, RANKS = ("diagnose", "stacks", "story"), (3, 64, 1024)
JOBS, STATES = (3, 64, 1024, 16384), ("healthy", "looking", "hung", "recovered")
WIDTHS, SCHEMES = (400, 1000, 1600), ("light", "dark")


def main(folder: Path) -> int:
    """0: all are there."""
    shown = [f"job-{ranks}-{state}" for ranks, state in itertools.product(JOBS, STATES)]
    shown += [f"{page}-{ranks}" for page, ranks in itertools.product(REPORTS, RANKS)]
    names = [
        f"{name}-{width}-{scheme}.png" for name, width, scheme in itertools.product(shown, WIDTHS, SCHEMES)
    ]
    missing = [name for name in names if not (folder / name).is_file()]
    for name in missing:
        print(f"{folder / name} is missing", file=sys.stderr)
    figures = "".join(
        f'<figure><a href="{name}"><img loading="lazy" width="300" src="{name}" alt="{name}"></a>'
        f"<figcaption>{name}</figcaption></figure>"
        for name in names
    )
    style = "body{font-family:sans-serif}figure{display:inline-block;vertical-align:top;margin:8px}"
    (folder / "index.html").write_text(
        f"<!doctype html><meta charset=utf-8><title>Screenshots</title><style>{style}</style>{figures}"
    )
    print(f"{len(names) - len(missing)} of {len(names)} screenshots in {folder}/index.html")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
