"""Sealed manifests and indexes that say what cannot be: the older checkpoint is restored, nothing is raised raw."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, NVMeBackend
from allranks.checkpoint import manifest as format
from allranks.cli import main
from allranks.drill.ranks import Ranks
from allranks.errors import CheckpointError

from .jobs import make_job, make_state

Change = Callable[[Any], Any]


def _rewrite(folder: Path, manifest: Change, index: Change) -> None:
    """Changes both files of a checkpoint and seals them again, as a program with a fault would."""
    rank = folder / "rank-00000.json"
    said = format._unseal(rank.read_bytes(), "")
    index(said)
    rank.write_bytes(format._seal(json.dumps(said)))
    head = format._unseal((folder / format.MANIFEST).read_bytes(), "")
    head["parts"][0]["index_bytes"] = rank.stat().st_size
    head["parts"][0]["index_sha256"] = hashlib.sha256(rank.read_bytes()).hexdigest()
    manifest(head)
    (folder / format.MANIFEST).write_bytes(format._seal(json.dumps(head)))


def _row(column: str, value: Any) -> Change:
    return lambda index: _set(index["shards"][0], column, value)


def _set(row: list[Any], column: str, value: Any) -> None:
    """A column of a shard, or of where it is stored."""
    if column in format.Shard._fields:
        row[0][format.Shard._fields.index(column)] = value
    else:
        row[format.StoredShard._fields.index(column)] = value


MANIFESTS: list[Change] = [
    lambda m: m.update(step="3"),
    lambda m: m.update(step=True),
    lambda m: m.update(step=-3),
    lambda m: m.update(parts=None),
    lambda m: m.update(parts=[1]),
    lambda m: m.update(schema="1"),
    lambda m: m.update(timestamp="now"),
    lambda m: m.update(metrics=[]),
    lambda m: m.update(unknown=1),
    lambda m: m["parts"][0].update(index=None),
    lambda m: m["parts"][0].update(index_bytes="9"),
    lambda m: m["parts"][0].update(index="../../../../etc/passwd"),
    lambda m: m["parts"][0].update(more=[1]),
]
INDEXES: list[Change] = [
    _row("name", None), _row("dtype", "../x"), _row("dtype", None), _row("dtype", []), _row("shape", [10**12, 10**6]),
    _row("shape", ["a"]), _row("shape", [-1]), _row("shape", None), _row("bytes", 10**15), _row("bytes", -5),
    _row("bytes", "x"), _row("file", "../../../../../../etc/passwd"), _row("file", "/etc/passwd"), _row("file", None),
    _row("start", -1), _row("start", 10**18), _row("start", 10**30), _row("start", "1"), _row("checksum", None),
    _row("view", "save"), _row("view", "no_such_type"), _row("offsets", [1]),
    lambda i: i["files"][0].update(file="../../../../etc/passwd"),
    lambda i: i["files"][0].update(header_bytes=1 << 50),
    lambda i: i.update(common=[1, 2]),
    lambda i: i.update(algorithm=None),
    lambda i: i.update(algorithm="rot13"),
    lambda i: i.update(files=None),
    lambda i: i["shards"].append([1, 2]),
    lambda i: [_set(row, "start", 1 << 40) for row in i["shards"]],
]  # fmt: skip
#: What a hostile or broken saver may put in place of the state that is not tensors.
SKELETONS: list[Any] = [
    {"model_state_dict": 5}, {"$dict": 3}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"model_state_dict": {"a": {"$evil": 1}}},
    {"model_state_dict": {"a": {"$tensor": []}}}, {"model_state_dict": {"a": {"$tensor": {}}}}, {"$tensor": 5},
    {"model_state_dict": {"a": {"$dtype": "save"}}}, {"model_state_dict": {"a": {"$size": "x"}}}, {"$bytes": "?"},
    {"model_state_dict": {"a": {"$device": "nowhere:9"}}}, {"model_state_dict": {"a": {"$numpy": ["O", "1"]}}},
]  # fmt: skip
OPTIMIZERS: list[Any] = [
    {"param_groups": 7}, {"param_groups": [7]}, {"param_groups": [{}]}, {"param_groups": [{"params": 1}]}, {"state": 7},
    {"state": {"$dict": [[1]]}}, {"state": {"$dict": [7]}}, 7,
]  # fmt: skip
HOSTILE: list[Change] = [
    lambda i: _huge(i["shards"][0], [1 << 40]),
    lambda i: _huge(i["shards"][0], [1 << 40], [4]),
    lambda i: _huge(i["shards"][0], [1 << 45], view="float8_e4m3fn"),
    *(lambda i, common=common: i.update(common=common) for common in SKELETONS),
    *(lambda i, saved=saved: i["common"].update(optimizer_state_dict=saved) for saved in OPTIMIZERS),
    *(lambda i, own=own: i.update(own=own) for own in ({"rng_states": {"$dict": 1}}, {"a": {"$evil": 1}})),
]


def _huge(row: list[Any], shape: list[int], sizes: Any = None, view: str = "") -> None:
    """Sizes that fit together and into no memory."""
    sizes = sizes or shape
    row[0] = [row[0][0], "U8", shape, [0], sizes, 4 if view else sizes[0], view]


@pytest.mark.parametrize(
    ("manifest", "index"),
    [*((m, lambda i: None) for m in MANIFESTS), *((lambda m: None, i) for i in INDEXES)],
    ids=[*(f"manifest{n}" for n in range(len(MANIFESTS))), *(f"index{n}" for n in range(len(INDEXES)))],
)
def test_a_sealed_checkpoint_that_says_nonsense_makes_way_for_the_older_one(
    tmp_path: Path, manifest: Change, index: Change
) -> None:
    """And the commands say what is wrong with it."""
    for step in (2, 3):
        NVMeBackend(tmp_path).save(make_state(step), f"checkpoint_step_{step:08d}")
    _rewrite(tmp_path / "checkpoint_step_00000003", manifest, index)
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    model, optimizer = make_job()
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0)) as manager:
        state = manager.restore(model, optimizer)
    assert state is not None and state.step == 2


@pytest.mark.parametrize("index", HOSTILE, ids=range(len(HOSTILE)))
def test_a_sealed_state_that_cannot_be_is_a_clear_error_or_makes_way_for_the_older_one(
    tmp_path: Path, index: Change
) -> None:
    """Whatever it says, no memory is taken for it, and no other kind of exception comes out."""
    for step in (2, 3):
        NVMeBackend(tmp_path).save(make_state(step), f"checkpoint_step_{step:08d}")
    _rewrite(tmp_path / "checkpoint_step_00000003", lambda m: None, index)
    assert main(["checkpoint", "show", str(tmp_path)]) in (0, 2)
    with contextlib.suppress(CheckpointError):
        NVMeBackend(tmp_path).load("checkpoint_step_00000003")
    model, optimizer = make_job()
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0)) as manager:
        try:
            state = manager.restore(model, optimizer)
        except CheckpointError as error:
            assert error.hint
        else:
            assert state is not None and state.step == 2


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100 << 30)


def _look(rank: int, world: int, folder: Path, bad: Path) -> tuple[list[int], str]:
    """(exit codes and the step that is restored, what was printed) of a process with little memory left."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        codes = [main(["checkpoint", "verify", str(bad)]), main(["checkpoint", "ls", str(folder)])]
    config = CheckpointConfig(nvme_path=folder, memory_snapshot_interval=0, wait_for_stores_s=0.0)
    with CheckpointManager(config) as manager:
        state = manager.load_checkpoint()
    return [*codes, -1 if state is None else state.step], out.getvalue()


@pytest.mark.parametrize("file", [format.MANIFEST, "rank-00000.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("make", [_pipe, _endless, _sparse])
def test_a_file_that_is_not_a_regular_one_is_damage(
    tmp_path: Path, file: str, make: Callable[[Path], None]
) -> None:
    """A pipe would be waited for without end, /dev/zero and 100 GB of nothing would take all memory."""
    backend = NVMeBackend(tmp_path)
    for step in (1, 2):
        backend.save(make_state(step), f"checkpoint_step_{step:08d}")
    bad = tmp_path / "checkpoint_step_00000002"
    make(bad / file)
    with Ranks(_look, 1, (tmp_path, bad), backend=None) as ranks:
        [(found, printed)] = ranks.values(60)
    assert found == [1, 0, 1]
    assert file in printed and ("damaged" in printed or file != format.MANIFEST)
