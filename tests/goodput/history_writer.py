"""A process that writes to a history until it is killed: prints a number when that one is acknowledged."""

from __future__ import annotations

import sys

from allranks.ledger.history import NodeHistory
from allranks.ledger.nodes import NodeEvent


def main(place: str, writer: str, first: int) -> None:
    history = NodeHistory(place)
    for number in range(first, first + 100_000):
        events = [NodeEvent(f"n{writer}", f"job{number}", float(number), cause) for cause in ("a", "b", "c")]
        while True:
            try:
                history.record(events)
                break
            except OSError as error:
                if "locked" not in str(error) and "busy" not in str(error):
                    raise
        print(number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
