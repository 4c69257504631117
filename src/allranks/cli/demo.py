"""`allranks demo`: the whole story on CPU, in about a minute."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from allranks.errors import require

_COLOURS = {"title": "1", "text": "2", "bad": "31", "action": "33", "good": "32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where everything is kept (default: a new temporary folder)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def main(args: argparse.Namespace) -> int:
    """0 when everything held, 1 when something fell short."""
    require("torch", feature="allranks demo", extra="torch")
    from allranks.drill.demo import DemoOptions, run_demo
    from allranks.drill.run import ended_by_signals

    folder = args.folder or Path(tempfile.mkdtemp(prefix="allranks-demo-"))
    begin = time.monotonic()
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def say(kind: str, text: str) -> None:
        shown = f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if colour else text
        indent = "" if kind == "title" else "  "
        print(
            f"{'' if kind != 'title' else chr(10)}{indent}{shown}",
            file=sys.stderr if args.json else sys.stdout,
            flush=True,
        )

    with ended_by_signals():
        result = run_demo(DemoOptions(folder), say)
    hang, kill = result.drill.faults
    say("title", "4. What was proved")
    verdict = (hang.verdict or {}).get("sentence", "none")
    say("good" if hang.verdict_right else "bad", f"hang of rank {hang.rank}: {verdict}")
    say(
        "text",
        f"noticed after {_s(hang.noticed_s)}, the others trained on {_s(hang.recovered_s)} after the fault",
    )
    say(
        "good" if kill.verdict_right else "bad",
        f"kill -9 of rank {kill.rank}: noticed after {_s(kill.noticed_s)}, next step {_s(kill.recovered_s)} after the fault",
    )
    say(
        "good" if result.identical else "bad",
        "all replicas held bit-identical parameters at every step" if result.identical else "replicas differ",
    )
    if result.loss_difference is not None:
        say(
            "good" if result.loss_difference < 1e-3 else "bad",
            f"loss curve against the undisturbed run: largest difference {result.loss_difference:.1e} over {len(result.losses)} steps",
        )
    else:
        say("bad", f"only {len(result.losses)} of {len(result.reference)} steps were committed")
    say("text", f"the story of the hang: {result.story}")
    say("text", f"everything else: {folder}")
    say(
        "title",
        f"{'everything held' if result.good else 'SOMETHING FELL SHORT'}, {time.monotonic() - begin:.0f} s",
    )
    if args.json:
        print(json.dumps({
            "schema": 1, "good": result.good, "drill": result.drill.to_dict(), "identical": result.identical,
            "loss_difference": result.loss_difference, "resharded": result.resharded, "story": result.story,
        }))  # fmt: skip
    return 0 if result.good else 1


def _s(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
