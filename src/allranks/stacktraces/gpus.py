"""What the GPUs of watched processes do, from nvidia-smi: whether any data moves in their memory. Runs in `allranks watch`.

A kernel of NCCL that waits for another rank keeps its GPU "100 % busy" and moves no data, while the main thread may burn
CPU in the wait for it: neither CPU nor "busy" tells that from training. Work of a model moves data.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from allranks.stacktraces.procfs import open_files

LIMIT_S = 5.0
CARDS, DEVICE = Path("/proc/driver/nvidia/gpus"), "/dev/nvidia"


@dataclass(frozen=True)
class GpuUse:
    """One GPU over the last second or less, in percent of that time."""

    uuid: str
    busy: int  # a kernel ran
    traffic: int  # memory was read or written

    @property
    def waits(self) -> bool:
        """It idles, or one kernel runs all the time and moves nothing. Little work rounds to no traffic: not that."""
        return self.traffic == 0 and (self.busy == 0 or self.busy >= 99)


def ask(pids: Collection[int]) -> tuple[GpuUse, ...]:
    """The GPUs that these processes use; () without a driver, or when it cannot be told which ones they are."""
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = query_gpus("--query-compute-apps=pid,gpu_uuid")
    used = {row[1] for row in listed if row[0] in set(map(str, pids))} or _opened(pids)
    rows = query_gpus("--query-gpu=uuid,utilization.gpu,utilization.memory") if used else []
    return tuple(
        GpuUse(row[0], int(row[1]), int(row[2]))
        for row in rows
        if row[0] in used and row[1].isdigit() and row[2].isdigit()  # "[N/A]" where a card is divided
    )


def _opened(pids: Collection[int]) -> set[str]:
    """By the device files that the processes have open: inside a container nvidia-smi lists no process."""
    devices = {}
    for path in CARDS.glob("*/information"):
        lines = (line.partition(":") for line in path.read_text().splitlines())
        card = {name.strip(): value.strip() for name, _, value in lines}
        devices[f"{DEVICE}{card.get('Device Minor', '')}"] = card.get("GPU UUID", "")
    return {devices[path] for pid in pids for path in open_files(pid) or () if path in devices}


#: Bits of nvidia-smi's reasons, and what they mean for somebody who waits.
_SLOWED = {0x4: "power limit", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
_CLOCKS = "--query-gpu=uuid,index,clocks.sm,clocks.max.sm,temperature.gpu,clocks_throttle_reasons.active"


def query_clocks(pid: int) -> list[str]:
    """Clocks of the GPUs that a process uses, and why they are low; [] without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    used = {
        row[1] for row in query_gpus("--query-compute-apps=pid,gpu_uuid") if row[0] == str(pid)
    } or _opened([pid])
    return [describe_clocks(row[1:]) for row in query_gpus(_CLOCKS) if row[0] in used and len(row) == 6]


def describe_clocks(row: Sequence[str]) -> str:
    """ "GPU 3: 1200 of 1980 MHz, 84 °C, slowed down by heat"."""
    index, now, most, celsius, reasons = row
    bits = int(reasons, 16) if reasons.startswith("0x") else 0
    why = " and ".join(dict.fromkeys(word for bit, word in _SLOWED.items() if bits & bit))
    return f"GPU {index}: {now} of {most} MHz, {celsius} °C" + (f", slowed down by {why}" if why else "")


def all_wait(before: Collection[GpuUse], now: Collection[GpuUse]) -> bool:
    """Whether every GPU of the job only waits, in two answers."""
    same = {use.uuid for use in before} == {use.uuid for use in now}
    return bool(now) and same and all(use.waits for use in (*before, *now))


def ask_nvidia_smi(query: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    """One query of nvidia-smi; raises OSError or TimeoutExpired when it does not answer."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)


def csv_cells(text: str) -> list[list[str]]:
    """The cells of every row of an answer."""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]


def query_gpus(query: str, limit_s: float = LIMIT_S) -> list[list[str]]:
    """The rows of an answer; none without a driver, or when it does not answer."""
    try:
        return csv_cells(ask_nvidia_smi(query, limit_s).stdout)
    except (OSError, subprocess.TimeoutExpired):
        return []
