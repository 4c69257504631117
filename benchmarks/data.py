"""Token index and data: building against a plain loop, reading against a raw memmap, opening a huge index.

Ratios are of the same run on the same machine; building is compared by CPU time, so that a loaded machine
does not bend it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def write_corpus(path: Path, size: int) -> None:
    """JSON lines of words whose frequencies fall off as in real text."""
    chance = random.Random(1)
    words = ["".join(chance.choices("etaoinshrdlucmf", k=chance.randint(2, 9))) for _ in range(8000)]
    weights = [1.0 / (i + 3) for i in range(len(words))]
    pool = [json.dumps({"id": i, "text": " ".join(chance.choices(words, weights, k=chance.randint(50, 400)))}) + "\n" for i in range(400)]  # fmt: skip
    with path.open("w") as file:
        done = 0
        while done < size:
            done += file.write(chance.choice(pool))


def train_tokenizer(corpus: Path, output: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False)
    with corpus.open() as file:
        lines = [json.loads(next(file))["text"] for _ in range(300)]
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(output))


def plain_loop(corpus: Path, tokenizer_file: Path) -> tuple[float, float, int]:
    """(CPU seconds, wall seconds, tokens) of the loop that everybody writes: one document, one encode."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    cpu, wall, tokens = time.process_time(), time.perf_counter(), 0
    out = np.memmap(corpus.with_suffix(".plain"), dtype=np.uint16, mode="w+", shape=(corpus.stat().st_size,))
    with corpus.open() as file:
        for line in file:
            ids = tokenizer.encode(json.loads(line)["text"]).ids
            out[tokens : tokens + len(ids)] = ids
            tokens += len(ids)
    return time.process_time() - cpu, time.perf_counter() - wall, tokens


def ours(corpus: Path, tokenizer_file: Path, parallel: bool) -> tuple[float, float, int]:
    """The same for the index builder."""
    from allranks.elastic.index import BuildRequest, build_index

    os.environ["TOKENIZERS_PARALLELISM"] = "true" if parallel else "false"
    output = str(corpus.with_suffix(".index"))
    cpu, wall = time.process_time(), time.perf_counter()
    result = build_index(BuildRequest((str(corpus),), output, str(tokenizer_file), force=True))
    return time.process_time() - cpu, time.perf_counter() - wall, result.progress.tokens


def bench_build(folder: Path, size: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer.json"
    write_corpus(corpus, size)
    train_tokenizer(corpus, tokenizer, 4000)
    megabytes = corpus.stat().st_size / 1e6
    plain, one, many = [], [], []
    for _ in range(rounds):
        plain.append(plain_loop(corpus, tokenizer))
        one.append(ours(corpus, tokenizer, False))
        many.append(ours(corpus, tokenizer, True))
    assert len({tokens for _, _, tokens in plain + one + many}) == 1, "the loops disagree"
    best = {name: min(runs) for name, runs in (("plain", plain), ("one", one), ("many", many))}
    wall = {name: min(run[1] for run in runs) for name, runs in (("plain", plain), ("many", many))}
    ratios = {
        "build_mb_per_core_vs_plain_loop": best["plain"][0] / best["one"][0],
        "build_parallel_mb_per_core_vs_plain_loop": best["plain"][0] / best["many"][0],
    }
    numbers = {
        "build_mb_per_cpu_s": megabytes / best["one"][0],
        "build_parallel_mb_per_cpu_s": megabytes / best["many"][0],
        "plain_loop_mb_per_cpu_s": megabytes / best["plain"][0],
        "build_parallel_mb_per_wall_s": megabytes / wall["many"],
        "plain_loop_mb_per_wall_s": megabytes / wall["plain"],
        "corpus_mb": megabytes,
    }
    return ratios, numbers


def bench_read(
    index_path: Path, rounds: int, batch: int, length: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Shuffled batches as tensors: our loader against slices of a raw memmap, in random order."""
    import torch

    from allranks.elastic.data import ElasticDataLoader, ResumableDataset
    from allranks.elastic.index import TokenIndexFile

    torch.set_num_threads(1)
    index = TokenIndexFile(index_path)
    raw = np.memmap(index_path, dtype=np.uint16, mode="r", shape=(index.total_tokens,))
    count = (index.total_tokens - 1) // length
    steps = min(600, max(50, count // batch))
    order = np.random.default_rng(0).permutation(count)

    def read_raw() -> float:
        start = time.perf_counter()
        for step in range(steps):
            ids = order[np.arange(step * batch, (step + 1) * batch) % count]
            rows = np.stack([raw[i * length : i * length + length + 1] for i in ids]).astype(np.int64)
            torch.from_numpy(rows)
        return steps * batch * length / (time.perf_counter() - start)

    def read_ours() -> float:
        loader = ElasticDataLoader(ResumableDataset(index, length, seed=1), batch, rank=0, world_size=1)
        batches = iter(loader)
        start = time.perf_counter()
        for _ in range(steps):
            next(batches)
        return steps * batch * length / (time.perf_counter() - start)

    pairs = [(read_raw(), read_ours()) for _ in range(rounds)]
    ratios = {"read_tokens_vs_raw_memmap": statistics.median(b / a for a, b in pairs)}
    numbers = {
        "read_tokens_per_s": statistics.median(b for _, b in pairs),
        "raw_memmap_tokens_per_s": statistics.median(a for a, _ in pairs),
    }
    return ratios, numbers


def write_huge(path: Path, gigabytes: float) -> None:
    """A valid index of that size: a sparse file of zero tokens, with true checksums."""
    from allranks.elastic.index.file import BLOCK, MAGIC, TAIL, IndexHeader

    header = IndexHeader(2, int(gigabytes * (1 << 30)) // 2, 1, 1)
    blocks = -(-header.checks_offset // BLOCK)
    facts = {"sizes": vars(header), "files": [{"path": "huge"}], "tokenizer": {"name": "bytes"}}
    with path.open("w+b") as file:
        file.truncate(header.checks_offset)
        file.seek(header.starts_offset + 8)
        file.write(np.int64(header.total_tokens).tobytes())
        file.seek((blocks - 1) * BLOCK)
        tail = [zlib.crc32(file.read(header.checks_offset - file.tell()))]
        zero = zlib.crc32(b"\0" * BLOCK)
        file.write(np.array([zero] * (blocks - 1) + tail, dtype="<u4").tobytes())
        text = json.dumps(facts).encode()
        file.write(text + TAIL.pack(file.tell(), zlib.crc32(text), MAGIC))


OPEN = """
import resource, sys, time
from allranks.elastic.index import TokenIndexFile
import numpy
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
start = time.perf_counter()
index = TokenIndexFile(sys.argv[1])
index.find_position(index.total_tokens - 1)
took = time.perf_counter() - start
print(took * 1000, (resident() - before) / 1e6)
"""


def bench_open(folder: Path, gigabytes: float, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    huge, small = folder / "huge.index", folder / "small.index"
    write_huge(huge, gigabytes)
    write_huge(small, gigabytes / 100)
    took: dict[str, list[tuple[float, float]]] = {"huge": [], "small": []}
    for _ in range(rounds):
        for name, path in (("huge", huge), ("small", small)):
            out = subprocess.run([sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
            ms, mb = map(float, out.stdout.split())
            took[name].append((ms, mb))
    huge_ms, huge_mb = (statistics.median(one[i] for one in took["huge"]) for i in (0, 1))
    small_ms, small_mb = (statistics.median(one[i] for one in took["small"]) for i in (0, 1))
    return {"open_memory_10gb_vs_100mb": huge_mb / max(small_mb, 0.1)}, {
        "open_10gb_ms": huge_ms,
        "open_100mb_ms": small_ms,
        "open_10gb_resident_mb": huge_mb,
        "open_100mb_resident_mb": small_mb,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="within 60 s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # folders and processes are cleaned up on the way
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="allranks-bench-") as name:
        folder = Path(name)
        size, rounds = (6_000_000, 2) if args.quick else (40_000_000, 3)
        parts = [bench_build(folder, size, rounds)]
        gc.collect()
        parts.append(bench_read(folder / "corpus.index", 5 if args.quick else 9, 16, 1024))
        parts.append(bench_open(folder, 10.0, 3 if args.quick else 5))
    for some_ratios, some_numbers in parts:
        ratios.update(some_ratios)
        numbers.update(some_numbers)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    for what, value in {**ratios, **numbers}.items():
        print(f"{what:44} {value:,.3f}")
    if args.json:
        print(json.dumps({"name": "data", "ratios": ratios, "numbers": numbers, "machine": machine}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
