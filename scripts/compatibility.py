"""Keeps the results of tests (pytest --junitxml) in benchmarks/results/compatibility.json and writes docs/compatibility.md from there.

pytest tests/integrations --soak --junitxml=results.xml
python scripts/compatibility.py results.xml…
python scripts/compatibility.py --versions FOLDER…     of scripts/test_all.sh: python-3.12.1_torch-2.15.0….xml
python scripts/compatibility.py                        only writes the page
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "compatibility.json"
HEALTHY, TROUBLED = "test_runs_unmodified_and_healthy[{}]", "test_ten_kills_and_a_hang[{}]"


def program(name: str) -> tuple[str, ...]:
    """The tests of the five columns for a program of tests/integrations/programs."""
    return (HEALTHY.format(name),) * 2 + (TROUBLED.format(name),) * 3


#: row -> package, a test or an explanation (anything with a blank) for each of: runs, is healthy, hang, kills, equal bits
Rows = dict[str, tuple[str, tuple[str, ...]]]
ROWS: Rows = {
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
        ("test_torchft_means_ours_after_use", "see [drills](performance.md)", "see [drills](performance.md)")
        + ("test_torchtitans_manager_has_equal_bits_after_kills[10]",) * 2,
    ),
    "a loop in torchft's words": (
        "torch",
        ("1 changed import", "see [drills](performance.md)", "see [drills](performance.md)")
        + ("test_a_loop_in_torchfts_words_has_equal_bits_after_kills[10]",) * 2,
    ),
    "Ray Train": (
        "ray",
        ("1 changed import", *("test_a_worker_that_hangs_is_named_with_its_line_and_replaced",) * 3,
         "test_a_worker_that_is_killed_ten_times_comes_back_with_equal_bits"),
    ),
}  # fmt: skip


def launcher(name: str, *, module: str, restarts: str = "") -> tuple[str, ...]:
    """The tests of a launcher of tests/integrations/test_launchers.py; what it cannot do is said instead."""
    hang = f"test_a_hang_is_named_with_its_line[{name}-"
    return (
        f"test_runs_to_its_end[{name}]",
        f"{hang}as_it_is]",
        f"{hang}recorded]" if module else "takes no module: `allranks.record()` in the script",
        restarts or f"test_a_launcher_that_restarts_continues_after_ten_kills[{name}]",
    )


#: what is typed after `allranks watch --` -> package and tests
LAUNCHERS: Rows = {
    "`torchrun --max-restarts 30 …`": ("torch", launcher("torchrun", module="-m")),
    "`python -m torch.distributed.run --max-restarts 30 …`": ("torch", launcher("torch.distributed.run", module="-m")),
    "`accelerate launch --rdzv_backend c10d --max_restarts 30 …`": ("accelerate", launcher("accelerate", module="-m")),
    "`deepspeed …`": ("deepspeed", launcher("deepspeed", module="--module", restarts="no: use `allranks run`")),
    "`fabric run …`": ("lightning", launcher("fabric", module="", restarts="no: use `allranks run`")),
    "`python train.py`, Lightning's ddp": ("lightning", launcher("lightning", module="", restarts="no: use `allranks run`")),
    "`python train.py`, torch.multiprocessing.spawn": ("torch", launcher("spawn", module="", restarts="no: use `allranks run`")),
}  # fmt: skip


def shipped(name: str) -> tuple[str, ...]:
    """The tests of a program of tests/integrations/test_shipped_programs.py."""
    return (f"test_it_runs_as_it_is_and_is_healthy[{name}]",) * 2 + (
        f"test_a_hang_is_named_at_its_line[{name}]",
    )


#: programs that packages bring along, or that are written around their trainers -> package and tests
SHIPPED: Rows = {
    "`-m torchtitan.train`, llama3_debugmodel, FSDP2": ("torchtitan", shipped("torchtitan")),
    "`-m trl.scripts.sft`": ("trl", shipped("trl_sft")),
    "`-m trl.scripts.sft --use_peft`": ("peft", shipped("trl_sft_lora")),
    "`-m trl.scripts.dpo`": ("trl", shipped("trl_dpo")),
    "torchtune's `full_finetune_distributed.py`": (
        "torchtune 0.6.1",
        ("cannot be imported beside torch 2.13", *("see left",) * 2),
    ),
    "`-m open_clip_train.main`": (
        "open_clip_torch 3.3.0",
        ("needs a GPU for each rank", *("see left",) * 2),
    ),
    "SentenceTransformerTrainer": ("sentence-transformers", shipped("sentence_transformers")),
    "diffusers' UNet with Accelerate": ("diffusers", shipped("diffusers")),
    "fairscale's OSS and ShardedDataParallel": ("fairscale", shipped("fairscale")),
    "PyTorch-Ignite's Engine and idist": ("pytorch-ignite", shipped("ignite")),
    "hydra.main with a working folder of its own": ("hydra-core", shipped("hydra")),
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
            machine["when"] = suite.get("timestamp", "")[:16].replace("T", " ")
            machine["where"] = f"{machine.get('where', 'machine not recorded')}, {machine['when'][:10]}"
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


def cell(wanted: str, results: Mapping[str, Result]) -> str:
    """One cell of the table: how the test ended, or the explanation that stands in its place."""
    if " " in wanted:
        return wanted
    result = results.get(wanted)
    return {"passed": "✓", "failed": "**✗**"}.get(result.outcome if result else "", "–")


def versions(package: str, tests: tuple[str, ...], results: Mapping[str, Result]) -> str:
    """The package and its versions in the runs of these tests."""
    ran = [results[one].machine.get(package, "") for one in tests if one in results]
    return f"{package} {', '.join(sorted(set(filter(None, ran))))}".strip()


def table(rows: Rows, shown: tuple[int, ...], results: Mapping[str, Result]) -> list[str]:
    """Lines of the table; `shown` chooses the tests of the columns "runs", "hang" and "kills" (-1: there is none)."""
    lines = []
    for row, (package, tests) in rows.items():
        cells = " | ".join(cell(tests[one], results) if one >= 0 else "–" for one in shown)
        ran = [results[one].machine for one in tests if one in results]
        when = min((one.get("when") or one["where"][-10:] for one in ran), default="")[:10]
        lines.append(f"| {row} | {versions(package, tests, results)} | {cells} | {when} |")
    return lines


VERSIONS = re.compile(r"python-([\d.]+)_torch-([\d.]+)")


def count_versions(folders: list[Path]) -> dict[str, dict[str, dict[str, int]]]:
    """Pair of versions -> folder of tests -> how its tests ended, from the files of scripts/test_all.sh; a test's last result counts."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for path in sorted(path for folder in folders for path in folder.glob("python-*_torch-*.xml")):
        named = VERSIONS.match(path.name)
        assert named, f"{path}: its name should begin with python-X_torch-Y"
        row = found.setdefault(f"Python {named[1]}, torch {named[2].rstrip('.')}", {})
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            test = f"{case.get('classname')}.{case.get('name')}"
            row.setdefault(test.split(".")[1], {})[test] = outcome_of(case).partition(":")[0]
    return {pair: {part: _sum(part, tests) for part, tests in row.items()} for pair, row in found.items()}


def _sum(part: str, tests: Mapping[str, str]) -> dict[str, int]:
    """How many ended how, in how many files of the folder, and how many files it has."""
    files = {test.split(".")[2] for test in tests}
    whole = len(list((ROOT / "tests" / part).glob("test_*.py")))
    return {**Counter(tests.values()), "files": len(files), "of": whole}


def version_table(kept: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """Versions: passed, failed, skipped."""
    lines = ["| versions | folders of tests | passed | failed | skipped |", "|---|---|---:|---:|---:|"]
    for pair, row in sorted(kept.items()):
        counts = [sum(part.get(end, 0) for part in row.values()) for end in ("passed", "failed", "not run")]
        lines.append(f"| {pair} | {len(row)} | {' | '.join(f'{count:,}' for count in counts)} |")
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """Adds what was given to the kept results, and writes the page."""
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {"tests": {}, "versions": {}}
    if words[:1] == ["--versions"]:
        for pair, row in count_versions([Path(word) for word in words[1:]]).items():
            kept["versions"].setdefault(pair, {}).update(row)
    else:
        wanted = {test for rows in (ROWS, SHIPPED, LAUNCHERS) for _, tests in rows.values() for test in tests}
        found = read_results([Path(word) for word in words])
        kept["tests"].update({name: asdict(one) for name, one in found.items() if name in wanted})
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    (ROOT / "docs" / "compatibility.md").write_text(page(kept))


def page(kept: Mapping[str, Any]) -> str:
    """docs/compatibility.md."""
    results = {name: Result(**one) for name, one in kept["tests"].items()}
    lines = [*table(ROWS, (0, 2, 3), results), *table(SHIPPED, (0, 2, -1), results)]
    launchers = table(LAUNCHERS, (0, 1, 3), results)
    return PAGE.format(
        table="\n".join(lines), launchers="\n".join(launchers), versions=version_table(kept["versions"])
    )


PAGE = """---
search:
  boost: 1.5
---
# Compatibility: which torch versions and programs

<!-- Written by scripts/compatibility.py from test results; do not edit. -->

| | supported | tested |
|---|---|---|
| torch | 2.11 or newer in the ranks; reading dumps needs none | 2.11, 2.13 and 2.15 |
| Python | 3.10 to 3.13 | 3.10, 3.11, 3.12, 3.13 |
| system | Linux | x86-64 and ARM; macOS and Windows: see [Start](index.md#which-systems-and-versions) |
| devices | CPU (gloo), NVIDIA GPUs (NCCL) | two CPU cores; one H200 ([results](performance.md)) |

## Programs
The tests run these unmodified under `allranks run`, on CPU with gloo. ✓: the test passed; –: there is no such test, or no result of it.

| program | version | runs unmodified | hang → right line | continues after 10 kills, equal bits | date |
|---|---|---|---|---|---|
{table}

"2 changed lines" and "1 changed import" are replica mode and the integrations: see [training libraries](tasks/libraries.md).

## Launchers of other projects
Each was started as `allranks watch -- LAUNCHER`.

| launcher | version | runs to its end | hang → right line | continues after 10 kills | date |
|---|---|---|---|---|---|
{launchers}

## Where allranks stands between a program and torch
Each test makes the place fail. Those of the recorder's hooks and of its ends compare every bit of the results with a run without allranks.

| place | if it fails | tests |
|---|---|---|
| methods of process groups and works; calls that make and destroy groups; DDP's functions | the method stays torch's, or recording ends with one warning | `tests/record/test_failing_hooks.py` |
| the groups that C++ gets | C++ gets torch's own group | `tests/record/test_failing_hooks.py` |
| private names of torch that are missing, take other arguments or raise | the log names what is lost | `tests/record/test_failing_hooks.py`, `tests/record/test_versions.py` |
| a backend or group class of another library | it is left alone, and recorded as far as that is possible | `tests/record/test_any_backend.py` |
| the black box: its folder, its space, its descriptors | recording is off, with one warning | `tests/record/test_never_breaks.py`, `tests/record/test_odd_machines.py` |
| a black box that another process cuts short | its records are lost; the rank continues | `tests/record/test_survives.py` |
| progress marks and phases; the hook of exceptions; handlers of exits, forks and garbage collections | the program continues, with its own exit code and its own traceback | `tests/record/test_failing_ends.py` |
| the import hooks of `allranks run` and of `ALLRANKS_RECORD=auto` | the program starts without them | `tests/record/test_auto.py` |
| the start of a script by `allranks run` | it runs as Python itself runs it | `tests/record/test_like_python.py` |
| the files with the output of ranks | their beginnings are given back, or the output goes to the terminal only | `tests/supervise/test_log_room.py` |
| the hook for torchcomms | it is off, with one warning | `tests/record/test_comm_hook.py` |
| the methods of torchrun's agent that `allranks run` replaces | the job runs as under torchrun, with one warning | `tests/launch/test_torchrun_patches.py` |
| the process group and the DDP of a `Manager` | the step fails and is made again | `tests/manager/test_failures.py` |

## Test results by version
{versions}

Skipped tests need a program, a right or a version that the machine lacks. The failures with torch 2.11 come from torch's own `torchfrtrace`, which
refuses dumps of gloo there.

## Known limits
- One node with several GPUs and several nodes with GPUs are not part of the tests. NCCL is tested with several ranks on one GPU.
- torchtitan 0.3.0 needs torch 2.15 for its own trainer on CPU.

Make the page again: `pytest tests/integrations --soak --junitxml=results.xml`, then `python scripts/compatibility.py results.xml`; `make test-all` adds
the versions. Results: `benchmarks/results/compatibility.json`.
"""


if __name__ == "__main__":
    main(sys.argv[1:])
