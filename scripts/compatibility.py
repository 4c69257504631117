"""Writes docs/compatibility.md from the results of the tests that ran (pytest --junitxml).

pytest tests/integrations --soak --junitxml=results.xml
python scripts/compatibility.py results.xml…
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COLUMNS = (
    "runs unmodified",
    "healthy verdict",
    "hang → right line",
    "kill → continues",
    "equal bits after 10 kills",
)
HEALTHY, TROUBLED = "test_runs_unmodified_and_healthy[{}]", "test_ten_kills_and_a_hang[{}]"


def program(name: str) -> tuple[str, ...]:
    """The tests of the five columns for a program of tests/integrations/programs."""
    return (HEALTHY.format(name),) * 2 + (TROUBLED.format(name),) * 3


#: row -> package, a test or an explanation (anything with a blank) for each column
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Hugging Face Trainer": ("transformers", program("hf_trainer")),
    "Hugging Face, replica mode": (
        "transformers",
        ("2 changed lines", "as above", "as above") + ("test_transformers::test_trainers_are_replicas_with_equal_bits_after_kills[10]",) * 2,
    ),
    "Lightning": ("lightning", program("lightning")),
    "Lightning, replica mode": (
        "lightning",
        ("2 changed lines", "as above", "as above") + ("test_lightning::test_trainers_are_replicas_with_equal_bits_after_kills[10]",) * 2,
    ),
    "Accelerate": ("accelerate", program("accelerate")),
    "FSDP2": ("torch", program("fsdp2")),
    "pipeline (1F1B)": ("torch", program("pipeline")),
    "ZeroRedundancyOptimizer": ("torch", program("zero")),
    "DeepSpeed, ZeRO 1": ("deepspeed", program("deepspeed")),
    "megatron-core, tensor parallel": ("megatron-core", program("megatron")),
    "torchtitan's manager": (
        "torchtitan",
        ("test_torchft_means_ours_after_use", "replica mode: see the loop below", "replica mode: see the loop below")
        + ("test_torchtitans_manager_has_equal_bits_after_kills[10]",) * 2,
    ),
    "a loop in torchft's words": (
        "torch",
        ("1 changed import", "measured for replica mode in [reliability](reliability.md)", "measured for replica mode in [reliability](reliability.md)")
        + ("test_a_loop_in_torchfts_words_has_equal_bits_after_kills[10]",) * 2,
    ),
    "Ray Train": (
        "ray",
        ("1 changed import", *("test_a_worker_that_hangs_is_named_with_its_line_and_replaced",) * 3,
         "Ray restarts all workers from the checkpoint that your function reports; bits depend on that function"),
    ),
}  # fmt: skip


def read_results(paths: list[Path]) -> dict[str, str]:
    """test (module::name and name) -> passed, failed, or why it was skipped."""
    found: dict[str, str] = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            outcome = "passed"
            if case.find("failure") is not None or case.find("error") is not None:
                outcome = "failed"
            elif (skipped := case.find("skipped")) is not None:
                outcome = f"not run: {skipped.get('message', '')}"
            name, module = case.get("name", ""), case.get("classname", "").rpartition(".")[2]
            found[name] = found[f"{module}::{name}"] = outcome
    return found


def cell(wanted: str, results: Mapping[str, str]) -> str:
    """One cell of the table."""
    if " " in wanted:
        return wanted
    outcome = results.get(wanted, "not run")
    return {"passed": "✓", "failed": "**✗**"}.get(outcome, outcome)


def installed(package: str) -> str:
    try:
        return f"{package} {version(package).partition('+')[0]}"
    except PackageNotFoundError:
        return package


def main(paths: list[Path]) -> None:
    results = read_results(paths)
    lines = [f"| program | version | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for row, (package, tests) in ROWS.items():
        lines.append(f"| {row} | {installed(package)} | {' | '.join(cell(one, results) for one in tests)} |")
    page = Path(__file__).parents[1] / "docs" / "compatibility.md"
    page.write_text(PAGE.format(table="\n".join(lines)))
    print(f"wrote {page}: {sum(one == 'passed' for one in results.values()) // 2} tests passed")


PAGE = """# Compatibility: which programs were run, and through what

Written by `scripts/compatibility.py` from test results; do not edit. The programs are in `tests/integrations/programs`: they import
nothing of ours and run under `allranks run --standalone --nproc-per-node 2` on gloo and CPU.

{table}

- **runs unmodified, healthy verdict**: the program ends well, no incident is opened, and `allranks diagnose` on its black boxes finds
  nothing wrong (exit code 0).
- **hang → right line**: rank 1 sleeps in the program's own code; the incident names rank 1 and that line.
- **kill → continues**: rank 1 is killed with SIGKILL ten times, and the program finishes by itself, from its own checkpoints or, in
  replica mode, from another replica.
- **equal bits after 10 kills**: the parameters of every rank are those of a run without faults; in replica mode those of
  both replicas are the same.
- **not run**: the test exists (`tests/integrations/test_programs.py`, about five minutes per program on two cores), and no result of it
  was given to the script. It says nothing for or against the program.

To make the page again: `pip install transformers accelerate lightning deepspeed megatron-core torchtitan 'ray[train]'`, then
`pytest tests/integrations --soak --junitxml=results.xml` and `python scripts/compatibility.py results.xml`.
"""


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
