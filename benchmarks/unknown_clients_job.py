"""Unknown clients at the ports of a running job, and two replicas killed meanwhile: what it costs, and whether training continues.

    ALLRANKS_TOKEN=benchmark allranks run --job crowd --replicas 3 --bind 127.0.0.1:29555 -m tests.soak.train_replicas FOLDER &
    python benchmarks/unknown_clients_job.py 127.0.0.1:29555 PID_OF_RUN FOLDER

The unknown clients of unknown_clients.py at the lighthouse, and 200 silent ones at every rank, for 50 s.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from allranks.channel.web_client import get
from allranks.lighthouse.connection import raise_open_files
from unknown_clients import Watch, crowd, dial, peak_mb

SILENT, SECONDS = 200, 50.0


def commits(folder: Path) -> list[dict[str, Any]]:
    """All so far, by time."""
    lines = [line for path in folder.glob("replica-*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return sorted(
        (row for row in map(json.loads, lines) if row["kind"] == "commit"), key=lambda row: row["at"]
    )


def kill(folder: Path, replica: str) -> None:
    """The process that has committed last."""
    os.kill([row for row in commits(folder) if row["replica"] == replica][-1]["pid"], signal.SIGKILL)


def main(address: str, pid: int, folder: Path) -> None:
    """Prints one line of JSON."""
    raise_open_files()
    began, members = time.time(), get(address, "/api/status", 5.0).object()["quorum"]["members"]
    silent = [dial(member["address"]) for member in members for _ in range(SILENT)]
    with crowd(address):
        threading.Timer(5, kill, (folder, "replica-1")).start()
        threading.Timer(25, kill, (folder, "replica-2")).start()
        watch = Watch(address, SECONDS)
        watch.run()
    times = [row["at"] for row in commits(folder) if row["at"] > began]
    gap = max(later - one for one, later in itertools.pairwise(times))
    waits = {f"member_p{share:g}_ms": watch.percentile(share / 100) for share in (50, 99, 100)}
    last = [row["size"] for row in commits(folder)[-3:]]
    more = {"commits": len(times), "longest_gap_s": round(gap, 2), "members_at_the_end": last}
    print(json.dumps({"peak_mb": peak_mb(pid), **waits, **more, "load": os.getloadavg()[0]}))
    for sock in silent:
        sock.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
