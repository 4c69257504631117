"""Writes docs/compatibility.md from the results of the tests that ran (pytest --junitxml).

pytest tests/integrations --soak --junitxml=results.xml
python scripts/compatibility.py results.xml…
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

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


@dataclass(frozen=True)
class Result:
    """How a test ended, and what its run said about its machine: "where", and the version of each package."""

    outcome: str  # passed, failed, or why it was skipped
    machine: Mapping[str, str]


def read_results(paths: list[Path]) -> dict[str, Result]:
    """test (module::name and name) -> its result; of several the last one that is not a skip."""
    found: dict[str, Result] = {}
    for path in paths:
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            machine = {
                one.get("name", ""): one.get("value", "") for one in suite.findall("properties/property")
            }
            machine["where"] = (
                f"{machine.get('where', 'machine not recorded')}, {suite.get('timestamp', '')[:10]}"
            )
            for case in suite.iter("testcase"):
                result = Result(outcome_of(case), machine)
                name, module = case.get("name", ""), case.get("classname", "").rpartition(".")[2]
                if name not in found or not result.outcome.startswith("not run"):
                    found[name] = found[f"{module}::{name}"] = result
    return found


def outcome_of(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    return "passed" if skipped is None else f"not run: {skipped.get('message', '')}"


def cell(wanted: str, results: Mapping[str, Result], places: list[str]) -> str:
    """One cell of the table; the letter after it says where the test ran."""
    if " " in wanted:
        return wanted
    if (result := results.get(wanted)) is None:
        return "not run"
    if (where := result.machine["where"]) not in places:
        places.append(where)
    mark = {"passed": "✓", "failed": "**✗**"}.get(result.outcome, result.outcome)
    return f"{mark} {ascii_lowercase[places.index(where)]}"


def versions(package: str, tests: tuple[str, ...], results: Mapping[str, Result]) -> str:
    """The package and its versions in the runs of these tests."""
    ran = [results[one].machine.get(package, "") for one in tests if one in results]
    return f"{package} {', '.join(sorted(set(filter(None, ran))))}".strip()


def main(paths: list[Path]) -> None:
    results = read_results(paths)
    places: list[str] = []
    lines = [f"| program | version | {' | '.join(COLUMNS)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for row, (package, tests) in ROWS.items():
        cells = " | ".join(cell(one, results, places) for one in tests)
        lines.append(f"| {row} | {versions(package, tests, results)} | {cells} |")
    legend = "\n".join(f"- {letter}: {place}" for letter, place in zip(ascii_lowercase, places, strict=False))
    page = Path(__file__).parents[1] / "docs" / "compatibility.md"
    page.write_text(PAGE.format(table="\n".join(lines), legend=legend))
    passed = sum(one.outcome == "passed" for name, one in results.items() if "::" not in name)
    print(f"wrote {page}: {passed} tests passed")


PAGE = """# Compatibility: which programs were run, and through what

Written by `scripts/compatibility.py` from test results; do not edit. The programs are in `tests/integrations/programs`: they import
nothing of ours and run under `allranks run --standalone --nproc-per-node 2` on gloo and CPU.

{table}

The letter is the machine that the test ran on:

{legend}

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
