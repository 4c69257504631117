"""Runs twenty scripts of examples/hangs and writes docs/tasks/gallery.md: program, verdict with its picture, fix. Needs chromium.

python scripts/hangs_page.py [--check]      # --check: says which verdicts differ from the page, and writes nothing
"""

from __future__ import annotations

import argparse
import re
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "hangs"))

import gallery  # noqa: E402

from allranks.report import html  # noqa: E402

PAGE, PICTURES = ROOT / "docs" / "tasks" / "gallery.md", ROOT / "docs" / "images" / "hangs"
INTRO = """---
search:
  boost: 2
---
# Which hang is it?

Twenty common hangs: the lines that cause each, the verdict of `allranks diagnose`, and the fix. The programs are in `examples/hangs`
of the repository, with many others; `make gallery` runs them all.
"""


@dataclass(frozen=True)
class Entry:
    """`first` and `lines`: the excerpt of the program."""

    name: str
    title: str
    first: str
    lines: int
    fix: str


ENTRIES = (
    Entry("loader_worker_stuck", "A data loader that never delivers", "    def __getitem__", 3,
          "Give storage calls a timeout. `DataLoader(timeout=60)` turns the hang into an error."),
    Entry("killed", "A rank that was killed", "    if rank == 1", 3,
          "Look for the out-of-memory killer in the kernel's log. [Replicas](survive_kill.md) survive it."),
    Entry("uncaught_exception", "An exception on one rank", "    if rank == 2", 2,
          "Read the rank's last log lines. Skip bad samples in the data set, on every rank in the same way."),
    Entry("swallowed_exception", "An exception that is caught and ignored", "    try:", 4,
          "Do not continue after an error inside a step. Let the rank fail, or let all ranks vote."),
    Entry("nan_skip", "One rank skips a step", "    if loss != loss", 3,
          "Reduce the flag first, so that all ranks skip together."),
    Entry("early_stopping", "One rank stops early", "    if rank == 2", 2,
          "Decide on rank 0 and broadcast the decision."),
    Entry("fewer_batches", "One rank has fewer batches", "batches =", 5,
          "Use `drop_last=True` with a `DistributedSampler`, or DDP's `join()`."),
    Entry("barrier_on_rank_0", "A barrier on one rank", "    if rank == 0", 2,
          "Call `barrier()` outside of `if rank == 0`."),
    Entry("checkpoint_on_rank_0", "A checkpoint on one rank", "    if rank == 0", 2,
          "`dcp.save` is a collective: call it on every rank."),
    Entry("fsdp_eval_on_rank_0", "Evaluation of a sharded model on one rank", "    if rank == 0", 3,
          "The forward pass of FSDP gathers parameters: evaluate on all ranks."),
    Entry("full_state_on_rank_0", "The full state dict on one rank", "    if rank == 0", 2,
          "Ask for it on all ranks, and write it on one."),
    Entry("ddp_unused_layer", "A layer without gradients", "    short =", 2,
          "Set `find_unused_parameters=True`, or use every layer in every step."),
    Entry("different_operations", "Different operations", "    if rank == 2", 4,
          "The branch must not depend on the rank's own data."),
    Entry("all_gather_sizes", "Different sizes", "    part =", 3,
          "Pad to the largest size, which an `all_reduce` with `MAX` tells."),
    Entry("dtypes", "Different dtypes", "    dtype =", 2,
          "Use the same precision on all ranks, also in the first and the last step."),
    Entry("broadcast_roots", "Different roots", "    owner =", 2,
          "Compute the owner from what all ranks know."),
    Entry("inversion_of_two_groups", "Two groups in another order", "    other =", 3,
          "Call the groups in a fixed order, not in the order in which tensors become ready."),
    Entry("recv_recv", "Both sides receive first", "    if rank < 2", 3,
          "Let even ranks send first, or use `batch_isend_irecv`."),
    Entry("endless_loop", "A loop that never ends", "    while rank == 2", 3,
          "Limit retries. `allranks stacks` shows the line that runs."),
    Entry("absent_at_init", "A rank that never joins", "if os.environ", 3,
          "Prepare data before the job or after `init_process_group`, with a barrier that has its own timeout."),
)  # fmt: skip


def excerpt(entry: Entry) -> str:
    """Its lines as they are in the program, moved to the left."""
    code = (gallery.HERE / f"{entry.name}.py").read_text().splitlines()
    start = next(number for number, line in enumerate(code) if line.startswith(entry.first))
    chosen = code[start : start + entry.lines]
    indent = min(len(line) - len(line.lstrip()) for line in chosen if line.strip())
    return "\n".join(line[indent:].removesuffix("  # <- here") for line in chosen)


def section(entry: Entry, sentence: str) -> str:
    picture = f"![Timeline of the ranks](../images/hangs/{entry.name}.png)"
    program = f"```python\n{excerpt(entry)}\n```"
    return f"\n## {entry.title}\n{program}\n{picture}\n```text\n{sentence}\n```\n**Fix:** {entry.fix}\n"


def verdicts() -> dict[str, tuple[str, str]]:
    """(sentence, page) of each entry, from a real run."""
    gallery.preload()
    table, found = gallery.truth(), {}
    for entry in ENTRIES:
        with tempfile.TemporaryDirectory(prefix="allranks-gallery-") as folder:
            outcome = gallery.run_hang(table[entry.name], Path(folder, entry.name))
        if not all(gallery.is_right(outcome)) or outcome.diagnosis.verdict is None:
            raise SystemExit(f"{entry.name}: the verdict differs from the table of examples/hangs")
        page = "".join(html.render(outcome.diagnosis, list(outcome.traces)))
        found[entry.name] = plain(outcome.diagnosis.verdict.sentence), page
        print(f"{entry.name}: {found[entry.name][0]}", flush=True)
    return found


def plain(sentence: str) -> str:
    """Without what differs from run to run, and without what an error says at length."""
    sentence = re.sub(r"have waited (at most )?[\d.]+ (ms|s|min)", "wait", sentence)
    sentence = re.sub(r" for [\d.]+ s$", "", sentence).replace(f" ({socket.gethostname()})", "")
    return re.sub(r"( starting a new one)\..*?…;", r"\1 …;", sentence)


def pictures(pages: dict[str, str]) -> None:
    from playwright.sync_api import sync_playwright

    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport={"width": 900, "height": 900})
        for name, text in pages.items():
            Path(folder, "page.html").write_text(text)
            tab.goto(f"file://{folder}/page.html")
            fault = tab.get_by_role("button", name="Go to the fault")
            if fault.count():
                fault.click()
            tab.locator("#timeline-part canvas").first.screenshot(path=PICTURES / f"{name}.png")
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    found = verdicts()
    text = INTRO + "".join(section(entry, found[entry.name][0]) for entry in ENTRIES)
    if check:
        lines = set(PAGE.read_text().splitlines())
        differ = [line for line in text.splitlines() if line not in lines]
        print(*differ, sep="\n")
        return 1 if differ else 0
    PAGE.write_text(text)
    pictures({name: page for name, (_, page) in found.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
