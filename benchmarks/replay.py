"""How often the replay of a recorded hang hangs in the same way: same cause and same ranks.

    python benchmarks/replay.py [NAME ...] [--keep FOLDER]

The jobs are the recorded black boxes of examples/hangs (tests/diagnose/recorded). Each is written as a replay, which is run under
the recorder and judged. Healthy jobs are right when their replay ends without a fault.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tarfile
import tempfile
from pathlib import Path

from allranks.diagnosis import DiagnoseOptions, diagnose
from allranks.diagnosis.align import align
from allranks.diagnosis.replay import plan_replay
from allranks.diagnosis.replay_script import write_script
from allranks.drill.replay import run_replay
from allranks.load import load_paths
from allranks.model.diagnosis import RankNow

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "diagnose" / "recorded"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="jobs (default: all)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the replays there")
    args = parser.parse_args()
    importlib.import_module("torch.distributed")
    names = args.names or sorted(path.name.removesuffix(".tar.gz") for path in RECORDED.glob("*.tar.gz"))
    right = 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="allranks-replays-") as folder:
            text = _replay(name, args.keep or Path(folder))
        right += text.startswith("same")
        print(f"{name}: {text}", flush=True)
    print(f"{right} of {len(names)} replays have the cause and the ranks of the record")
    return 0


def _replay(name: str, folder: Path) -> str:
    archive = RECORDED / f"{name}.tar.gz"
    with tarfile.open(archive) as tar:
        facts = json.load(tar.extractfile(f"{name}.json"))  # type: ignore[arg-type]
    seen = [RankNow(rank, "gone", "", "its process is gone") for rank in facts["gone"]]
    traces, now_ns = load_paths([str(archive)]).traces, facts["now_ns"]
    options = DiagnoseOptions(now_ns=now_ns, ended=not now_ns)
    verdict = diagnose(traces, (), stacks=seen, options=options).verdict
    job = align(traces, now_ns=now_ns, ended=not now_ns)
    plan = plan_replay(job, verdict, gone=facts["gone"])
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{name}.py"
    script.write_text(write_script(plan, script.name))
    result = run_replay(plan, script)
    if result.same:
        return f"same: {result.sentence}"
    was = f"{verdict.cause} {verdict.ranks}" if verdict is not None else "nothing wrong"
    return f"OTHER: {result.cause} {result.ranks}, recorded {was}: {result.sentence}"


if __name__ == "__main__":
    sys.exit(main())
