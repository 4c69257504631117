"""`allranks demo`: a hang, its verdict and a recovery on CPU, in about a minute."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.cli.parser import read_flags
from allranks.cli.terminal import use_color
from allranks.errors import require
from allranks.model.formatting import duration
from allranks.model.options import option

if TYPE_CHECKING:
    from allranks.drill.demo import DemoResult

_COLOURS = {"title": "1", "text": "2", "bad": "31", "action": "33", "good": "32"}


@dataclass(frozen=True)
class DemoFlags:
    folder: Path | None = option(
        None, "where everything is kept (default: a new temporary folder)", metavar="DIR"
    )
    json: bool = option(False, "print one JSON object at the end")


FLAGS = (DemoFlags,)


def main(args: argparse.Namespace) -> int:
    """0 when every result is as promised, else 1."""
    import tempfile

    require("torch", feature="allranks demo", extra="torch")
    from allranks.drill.demo import run_demo
    from allranks.drill.run import ended_by_signals

    flags = read_flags(DemoFlags, args)
    folder = flags.folder or Path(tempfile.mkdtemp(prefix="allranks-demo-"))
    begin = time.monotonic()
    stream = sys.stderr if flags.json else sys.stdout

    def say(kind: str, text: str) -> None:
        shown = f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if use_color(stream) else text
        print(f"\n{shown}" if kind == "title" else f"  {shown}", file=stream, flush=True)

    with ended_by_signals():
        result = run_demo(folder, say)
    say("title", "3. What was proved")
    for good, text in _proved(result):
        say("good" if good else "bad", text)
    say("text", f"the story of the hang: {result.story}")
    say("text", f"everything else: {folder}")
    held = "everything held" if result.good else "SOMETHING FELL SHORT"
    say("title", f"{held}, {time.monotonic() - begin:.0f} s")
    if flags.json:
        names = ("good", "identical", "loss_difference", "story")
        facts = {name: getattr(result, name) for name in names}
        print(json.dumps({"schema": 1, **facts, "drill": result.drill.to_dict()}))
    return 0 if result.good else 1


def _proved(result: DemoResult) -> Iterator[tuple[bool, str]]:
    """(whether it held, result) for every promise."""
    hang, kill = result.drill.faults
    sentence = (hang.verdict or {}).get("sentence", "none")
    yield bool(hang.verdict_right), f"hang of rank {hang.rank}: {sentence}"
    recovered = f"the others continued training {_after(hang.recovered_s)} after the fault"
    yield True, f"noticed after {_after(hang.noticed_s)}, {recovered}"
    next_step = f"next step {_after(kill.recovered_s)} after the fault"
    killed = f"kill -9 of rank {kill.rank}: noticed after {_after(kill.noticed_s)}"
    yield bool(kill.verdict_right), f"{killed}, {next_step}"
    same = "all replicas had bit-identical parameters at every step"
    yield result.identical, same if result.identical else "replicas differ"
    difference = result.loss_difference
    if difference is None:
        yield False, f"only {len(result.losses)} of {len(result.reference)} steps were committed"
    else:
        text = f"largest difference {difference:.1e} over {len(result.losses)} steps"
        yield difference < 1e-3, f"loss curve against the undisturbed run: {text}"


def _after(seconds: float | None) -> str:
    return "never" if seconds is None else duration(seconds)
