"""One node for the tests of lost nodes: an agent with ranks that sleep. Ends when its standard input does.

    node_process.py NAME FOLDER MODE RANKS [LIGHTHOUSE]

Without a lighthouse it holds one. Prints the address of its lighthouse when that knows its ranks.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from allranks.incidents import pipeline
from allranks.incidents.loop import Watch
from allranks.incidents.peers import PeerAgents
from allranks.incidents.pipeline import WatchOptions
from allranks.launch.node_agent import NodeAgent
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.options import Options, ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.watch import nodes
from boxes import write_box

TOKEN = "secret"


def main() -> None:
    """Runs until standard input ends."""
    name, folder, mode, ranks = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
    nodes.AWAY_S, nodes.LOOK_S, nodes.TELL_S, pipeline.EXPLAIN_S = 0.5, 0.1, 0.1, 0.1
    held = Lighthouse(Options(), ServerOptions(token=TOKEN)) if len(sys.argv) < 6 else None
    address = held.start().address if held is not None else sys.argv[5]
    boxes = folder / name
    boxes.mkdir()
    sleepers = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in ranks
    ]
    for rank, process in zip(ranks, sleepers, strict=True):
        write_box(boxes, int(rank), 40 + int(rank), pid=process.pid, start_ns=time.time_ns())
    options = ClientOptions((address,), TOKEN, f"agent-{name}", name, role="observer", beacon=False)
    with Client(options) as client:
        watch = Watch(
            WatchOptions(boxes, folder / "incidents", "job", name, mode=mode, collect_stacks=False)  # type: ignore[arg-type]
        )
        agent = NodeAgent(watch, client, peers=PeerAgents(client, TOKEN), holds_lighthouse=held is not None)
        agent.start()
        while not (known := client.presence(options.replica)) or len(known.ranks) < len(ranks):
            time.sleep(0.02)
        print(address, flush=True)
        sys.stdin.read()
        agent.close()
    for process in sleepers:
        process.kill()
        process.communicate()
    if held is not None:
        held.close()


if __name__ == "__main__":
    main()
