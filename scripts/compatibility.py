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
from string import ascii_lowercase
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "compatibility.json"
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
         "test_a_worker_that_is_killed_ten_times_comes_back_with_equal_bits"),
    ),
}  # fmt: skip

LAUNCHER_COLUMNS = ("runs to its end", "hang → right line", "hang, recorded → right line", "kill → continues")


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
LAUNCHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "`torchrun --max-restarts 30 …`": ("torch", launcher("torchrun", module="-m")),
    "`python -m torch.distributed.run --max-restarts 30 …`": ("torch", launcher("torch.distributed.run", module="-m")),
    "`accelerate launch --rdzv_backend c10d --max_restarts 30 …`": ("accelerate", launcher("accelerate", module="-m")),
    "`deepspeed …`": ("deepspeed", launcher("deepspeed", module="--module", restarts="it ends the job: use `allranks run`")),
    "`fabric run …`": ("lightning", launcher("fabric", module="", restarts="it ends the job: use `allranks run`")),
    "`python train.py`, Lightning's ddp": ("lightning", launcher("lightning", module="", restarts="it ends the job: use `allranks run`")),
    "`python train.py`, torch.multiprocessing.spawn": ("torch", launcher("spawn", module="", restarts="it ends the job: use `allranks run`")),
}  # fmt: skip

SHIPPED_COLUMNS = ("runs unmodified", "healthy verdict", "hang → right line")


def shipped(name: str) -> tuple[str, ...]:
    """The tests of a program of tests/integrations/test_shipped_programs.py."""
    return (f"test_it_runs_as_it_is_and_is_healthy[{name}]",) * 2 + (
        f"test_a_hang_is_named_at_its_line[{name}]",
    )


#: programs that packages bring along, or that are written around their trainers -> package and tests
SHIPPED: dict[str, tuple[str, tuple[str, ...]]] = {
    "`-m torchtitan.train`, llama3_debugmodel, FSDP2 (told to use the CPU; needs a torch newer than 2.13)": ("torchtitan", shipped("torchtitan")),
    "`-m trl.scripts.sft`": ("trl", shipped("trl_sft")),
    "`-m trl.scripts.sft --use_peft`": ("peft", shipped("trl_sft_lora")),
    "`-m trl.scripts.dpo`": ("trl", shipped("trl_dpo")),
    "torchtune's `full_finetune_distributed.py`": (
        "torchtune 0.6.1",
        ("it cannot be imported beside torch 2.13, with us or without: its newest release needs `torchao.dtypes.nf4tensor`, which torchao 0.18"
         " has no more, and torchao 0.12 needs a torch of its time", *("see left",) * 2),
    ),
    "`-m open_clip_train.main`": (
        "open_clip_torch 3.3.0",
        ("it needs a GPU for each rank: it calls `DistributedDataParallel(device_ids=[device])`, which torch refuses on the CPU, with us or"
         " without; the incident quotes that error", *("see left",) * 2),
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


def table(
    rows: Mapping[str, tuple[str, tuple[str, ...]]], columns: tuple[str, ...], results: Mapping[str, Result], places: list[str]
) -> str:  # fmt: skip
    """A table of programs or launchers."""
    lines = [f"| program | version | {' | '.join(columns)} | run |", "|---|---|---|" + "---|" * len(columns)]
    for row, (package, tests) in rows.items():
        cells = " | ".join(cell(one, results, places) for one in tests)
        ran = [results[one].machine for one in tests if one in results]
        when = min((one.get("when") or one["where"][-10:] for one in ran), default="")
        lines.append(f"| {row} | {versions(package, tests, results)} | {cells} | {when} |")
    return "\n".join(lines)


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
    """Versions × folders of tests: passed, failed, skipped."""
    parts = sorted({part for row in kept.values() for part in row})
    lines = [f"| | {' | '.join(parts)} |", "|---|" + "---|" * len(parts)]
    for pair, row in sorted(kept.items()):
        cells = [_counts(row[part]) if part in row else "not run" for part in parts]
        lines.append(f"| {pair} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _counts(ended: Mapping[str, int]) -> str:
    failed = f", **{ended['failed']} failed**" if ended.get("failed") else ""
    skipped = f", {ended['not run']} skipped" if ended.get("not run") else ""
    part = f" ({ended['files']} of {ended['of']} files)" if ended["files"] < ended["of"] else ""
    return f"{ended.get('passed', 0)}{failed}{skipped}{part}"


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
    places: list[str] = []
    programs = table(ROWS, COLUMNS, results, places)
    packages = table(SHIPPED, SHIPPED_COLUMNS, results, places)
    launchers = table(LAUNCHERS, LAUNCHER_COLUMNS, results, places)
    legend = "\n".join(f"- {letter}: {place}" for letter, place in zip(ascii_lowercase, places, strict=False))
    return PAGE.format(
        table=programs,
        shipped=packages,
        launchers=launchers,
        legend=legend,
        versions=version_table(kept["versions"]),
    )


PAGE = """# Compatibility: which programs were run, and through what

Written by `scripts/compatibility.py` from test results; do not edit. The programs are in `tests/integrations/programs`: they import
nothing of ours and run under `allranks run --standalone --nproc-per-node 2` on gloo and CPU.

{table}

## Programs that packages bring along
As they come from the registry, or a few lines around a package's own trainer; no test of ours is in their code.

{shipped}

## Launchers of other projects
Typed after `allranks watch --`, with the programs that they are for. A launcher's own restarts are not touched by us: the kills were run with
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which ranks of torchrun 2.13 meet addresses of the attempt before, with us and without (`allranks doctor`
says so, `allranks run` sets it). `accelerate launch` needs `--rdzv_backend c10d` as well to restart: its default, `static`, has one store for all
attempts, whatever that variable says (the tests add `--rdzv_conf store_type=file`: no port). Recorded: `-m allranks.record train.py` (deepspeed: `--module`) instead of `train.py`.

{launchers}

## How to read these tables
The letter is the machine that the test ran on; the last column is when the oldest result of the row was made (UTC):

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

## Versions
How the tests of each folder ended, by the commands of `scripts/test_all.sh` (`make test-all`; a test's last result counts, and a row that was run in part says so): number passed, failed, skipped (a program, a right or
a version that is missing there; the log names each). The three tests of record that failed with torch 2.11 give dumps of gloo to its `torchfrtrace`,
which reads those of nccl and xccl only; they are skipped by that name since.

{versions}

To make the page again: `pip install transformers accelerate lightning deepspeed megatron-core torchtitan 'ray[train]'`, then
`pytest tests/integrations --soak --junitxml=results.xml` and `python scripts/compatibility.py results.xml`; `make test-all` adds the
versions. Results are kept in `benchmarks/results/compatibility.json`.
"""


if __name__ == "__main__":
    main(sys.argv[1:])
