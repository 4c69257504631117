"""Every outage that docs/understand/storage.md lists, made for real, and what a start in it comes to.

`make(cell, …)` prepares the stores of one cell: the tier under test holds steps 2 and 3, another tier may hold step 1.
`start(setup, mode)` starts a job on them, twice, as a restart would, and says what it came to. Run as a program it does
that in two ranks of one process group, for setups given as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from allranks.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointTier,
    SnapshotServer,
    create_checkpoint_state,
)
from allranks.checkpoint.stores import KnownMount, StoreSpec, checkpoint_name, open_store
from allranks.checkpoint.stores.backends import Backend
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.checkpoint.stores.object_store import ObjectBlobs
from allranks.drill.ranks import Ranks
from allranks.elastic.topology import ElasticJob
from allranks.errors import AllranksError, CheckpointLoadError, CheckpointUnreachable, TopologyChangeError
from checkpoint.jobs import flip, make_job, make_state
from checkpoint.s3server import EMPTY_LIST, GUEST_KEY, GUEST_SECRET, PAGES, Proxy, S3Server, http_answer
from checkpoint.slow_disk import SlowFiles

TOKEN = "a secret of the job"
OLDER, STEPS = 1, (2, 3)


@dataclass
class Setup:
    """How a job is started. `nobody`: as a user without rights; `memory`: what happens to snapshots in memory."""

    config: dict[str, Any] = field(default_factory=dict)
    nobody: bool = False
    memory: str = ""
    trains: bool = False  # one step is made, and its save cannot succeed


def make(
    tier: str, outage: str, other: bool, folder: Path, s3: S3Server, stack: contextlib.ExitStack
) -> Setup:
    """Stores in which the outage has happened (or will, at the first read), and the job's settings for them."""
    # a busy machine is slow: only where the store stays away is waiting of no use
    away = ("down at start", "down in the middle", "not mounted", "a web page in its place", "an untrue list")
    wait_s = 0.3 if outage in away else 60.0
    setup = Setup(
        {
            "memory_snapshot_interval": 0,
            "checkpoint_interval": 1,
            "wait_for_stores_s": wait_s,
            "commit_timeout_s": 60.0,
        }
    )
    setup.trains = outage == "down while training"
    spec = _SPECS[tier](setup, folder, s3, stack)
    if spec is not None and outage != "empty":
        for step in STEPS:
            backend = Backend(spec)
            backend.save(make_state(step), checkpoint_name(step))
            backend.store.close()
    for step in {"newest damaged": STEPS[1:], "all damaged": STEPS}.get(outage, ()):
        _damage(spec, step, setup)
    if other:
        _add_older(tier, setup, folder, s3)
    _BREAKS.get((tier, outage), lambda *_: None)(setup, folder, s3, stack)
    return setup


def start(setup: Setup, mode: str) -> list[str]:
    """What each start comes to: "newest", "next older", "the other tier's", "step 1", or the kind of error."""
    with _as_nobody() if setup.nobody else contextlib.nullcontext():
        if mode == "replicas":
            with ThreadPoolExecutor(2) as pool:
                found = [f.result() for f in [pool.submit(_starts, setup, mode) for _ in range(2)]]
            return [outcome for outcomes in found for outcome in outcomes]
        return _starts(setup, mode)


def _starts(setup: Setup, mode: str) -> list[str]:
    if setup.memory:
        with CheckpointManager(
            CheckpointConfig(**{**setup.config, "memory_snapshot_interval": 1})
        ) as manager:
            _fill_memory(manager, setup.memory)
            return [_start(manager, mode, setup.trains) for _ in range(2)]
    found = []
    for _ in range(1 if setup.trains else 2):
        with CheckpointManager(CheckpointConfig(**setup.config)) as manager:
            found.append(_start(manager, mode, setup.trains))
    return found


def _start(manager: CheckpointManager, mode: str, trains: bool) -> str:
    model, optimizer = make_job()
    try:
        if mode == "elastic":
            step = ElasticJob(model, optimizer, checkpoint=manager).start(1, 0).step - 1
        else:
            state = manager.restore(model, optimizer)
            step = 0 if state is None else state.step
    except AllranksError as error:
        cause = error.__cause__ if isinstance(error, TopologyChangeError) else error
        assert error.hint, error
        kinds = {CheckpointUnreachable: "unreachable", CheckpointLoadError: "error"}
        return kinds.get(type(cause), f"{type(cause).__name__}: {cause}")
    if trains and step == STEPS[-1]:
        manager.step(4, model, optimizer)
        assert not manager.wait_for_pending_saves(60), "the save should have failed"
        failed = str(manager.saves.failures[-1])
        assert sys.executable not in failed, "the store must fail, not the start of the helper"
        return "training continues"
    return {0: "step 1", OLDER: "the other tier's", STEPS[0]: "next older", STEPS[1]: "newest"}[step]


def _nvme(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> StoreSpec:
    reachable = tempfile.mkdtemp(prefix="allranks-outage-")  # by nobody, too
    stack.callback(shutil.rmtree, reachable, ignore_errors=True)
    os.chmod(reachable, 0o755)
    (folder / "disk").symlink_to(reachable)
    setup.config["nvme_path"] = f"{reachable}/nvme"
    return StoreSpec(f"{reachable}/nvme")


def _s3(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> StoreSpec:
    prefix = "/".join(folder.parts[-2:])
    quick = {"timeout_s": "60", "max_retries": "0"}
    bucket = ObjectBlobs(StoreSpec("s3://outages", {**s3.options(), **quick}))
    bucket.put("made", [memoryview(b"x")], 1)  # SeaweedFS makes a bucket with its first object
    setup.config |= {"s3_bucket": "outages", "s3_prefix": prefix, "s3_options": {**s3.options(), **quick}}
    return StoreSpec(f"s3://outages/{prefix}", {**s3.options(), **quick})


def _peer(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> StoreSpec:
    server = SnapshotServer(TOKEN, bind="127.0.0.1:0", max_bytes=64 << 20)
    server.start()
    stack.callback(server.close)
    setup.config |= {"peers": (server.address,), "peer_token": TOKEN, "memory_snapshot_interval": 1}
    return StoreSpec(f"peer://{server.address}/job", {"token": TOKEN})


def _memory(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> None:
    setup.memory = "empty"


_SPECS: dict[str, Any] = {"MEMORY": _memory, "PEER": _peer, "NVME": _nvme, "S3": _s3}


def _add_older(tier: str, setup: Setup, folder: Path, s3: S3Server) -> None:
    """Another tier with an older checkpoint: the disk, or for the disk the object store."""
    if tier == "NVME":
        spec = _s3(setup, folder / "older", s3, contextlib.ExitStack())
    else:
        setup.config["nvme_path"] = str(folder / "older")
        spec = StoreSpec(str(folder / "older"))
    Backend(spec).save(make_state(OLDER), checkpoint_name(OLDER))


def _damage(spec: StoreSpec | None, step: int, setup: Setup) -> None:
    """One flipped bit among the tensors."""
    if spec is None:
        setup.memory = "newest damaged" if setup.memory == "empty" else "all damaged"
        return
    if "://" not in spec.url:
        flip(Path(spec.url) / checkpoint_name(step) / "rank-00000.safetensors", -20)
        return
    store = open_store(spec)
    assert isinstance(store, KeyedStore)
    for key, _ in store.blobs.keys(f"{checkpoint_name(step)}/"):
        if key.endswith("safetensors"):
            data = bytearray(store.blobs.get(key)[0])
            data[-20] ^= 1
            store.blobs.put(key, [memoryview(data)], len(data))
    store.close()


def _fill_memory(manager: CheckpointManager, what: str) -> None:
    model, optimizer = make_job()
    for step in STEPS if what != "empty" else ():
        manager.save_checkpoint(create_checkpoint_state(step, model, optimizer), CheckpointTier.MEMORY)
    for step in {"newest damaged": STEPS[1:], "all damaged": STEPS}.get(what, ()):
        snapshot = manager.memory_backend.find(step)
        assert snapshot is not None
        snapshot.check()  # waits for its checksums, which are made in a thread
        next(iter(snapshot.local_views().values()))[0].view(-1)[:1].add_(1)
        snapshot.release()


def _s3_options(**options: str) -> Any:
    return lambda setup, *_: setup.config["s3_options"].update(options)


def _s3_behind(judge: Any = lambda line: None, delay_s: float = 0.0, gone: bool = False) -> Any:
    def change(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> None:
        proxy = Proxy(s3.ports["s3"], judge)
        setup.config["s3_options"]["endpoint"] = proxy.endpoint
        _put_between(proxy, delay_s, gone, stack)

    return change


def _peer_behind(cut_on: bytes = b"", delay_s: float = 0.0, gone: bool = False) -> Any:
    def change(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> None:
        proxy = Proxy(int(setup.config["peers"][0].rsplit(":", 1)[1]), cut_on=cut_on)
        setup.config["peers"] = (proxy.address,)
        _put_between(proxy, delay_s, gone, stack)

    return change


def _put_between(proxy: Proxy, delay_s: float, gone: bool, stack: contextlib.ExitStack) -> None:
    proxy.delay_s = delay_s
    if gone:
        proxy.__exit__()
    else:
        stack.push(proxy)


def _no_folder(setup: Setup, folder: Path, *_: Any) -> None:
    (folder / "disk" / "nvme").rename(folder / "disk" / "unmounted")
    (folder / "disk" / "nvme").symlink_to(folder / "not-mounted")


def _not_mounted(setup: Setup, folder: Path, *_: Any) -> None:
    """The share is gone, and what it was mounted on is an empty folder; that it was mounted there is noted."""
    _no_folder(setup, folder)
    point = folder / "disk" / "nvme"
    point.unlink()
    point.mkdir()
    mount = KnownMount(Path(setup.config["nvme_path"]))
    mount.note.parent.mkdir(parents=True, exist_ok=True)
    mount.note.write_text(json.dumps({"mounted_at": setup.config["nvme_path"]}))


def _unreadable_data(setup: Setup, folder: Path, *_: Any) -> None:
    """Manifests can be read, data cannot: a link to itself, as root and as anybody else."""
    for step in STEPS:
        data = folder / "disk" / "nvme" / checkpoint_name(step) / "rank-00000.safetensors"
        data.unlink()
        data.symlink_to(data)


def _slow_files(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> None:
    """Anyone who opens a file of a checkpoint for the first time waits."""
    slow = SlowFiles([path for path in (folder / "disk" / "nvme").rglob("*") if path.is_file()])
    stack.callback(lambda: _assert_waited(slow.close()))


def _assert_waited(count: int) -> None:
    assert count, "no file was slow"


def _without_rights(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> None:
    (folder / "disk" / "nvme").chmod(0)
    stack.callback((folder / "disk" / "nvme").chmod, 0o755)
    setup.nobody = True


def _read_only(setup: Setup, folder: Path, s3: S3Server, stack: contextlib.ExitStack) -> None:
    """As a disk becomes after errors; for a user who is not root, a folder that cannot be written."""
    path = folder / "disk" / "nvme"
    if os.geteuid() == 0:
        subprocess.run(["mount", "--bind", path.resolve(), path.resolve()], check=True)
        stack.callback(lambda: subprocess.run(["umount", "-l", path.resolve()], check=True))
        subprocess.run(["mount", "-o", "remount,ro,bind", path.resolve()], check=True)
    else:
        path.chmod(0o555)
        stack.callback(path.chmod, 0o755)


_BREAKS: dict[tuple[str, str], Any] = {
    ("NVME", "down at start"): _no_folder,
    ("PEER", "down at start"): _peer_behind(gone=True),
    ("S3", "down at start"): _s3_behind(gone=True),
    ("NVME", "down in the middle"): _unreadable_data,
    ("PEER", "down in the middle"): _peer_behind(cut_on=b".safetensors"),
    ("S3", "down in the middle"): _s3_behind(lambda line: "cut" if ".safetensors" in line else None),
    ("PEER", "wrong key"): lambda setup, *_: setup.config.update(peer_token="another secret"),
    ("S3", "wrong key"): _s3_options(secret_access_key="wrong"),
    ("NVME", "no permission"): _without_rights,
    ("S3", "no permission"): _s3_options(access_key_id=GUEST_KEY, secret_access_key=GUEST_SECRET),
    ("S3", "keys ran out"): _s3_behind(
        lambda line: http_answer("400 Bad Request", "<Error><Code>ExpiredToken</Code></Error>")
    ),
    ("NVME", "not mounted"): _not_mounted,
    ("S3", "a web page in its place"): _s3_behind(lambda line: PAGES[1]),
    ("S3", "an untrue list"): _s3_behind(lambda line: EMPTY_LIST if "list-type=2" in line else None),
    ("NVME", "slow"): _slow_files,
    ("PEER", "slow"): _peer_behind(delay_s=0.02),
    ("S3", "slow"): _s3_behind(delay_s=0.02),
    ("NVME", "down while training"): _read_only,
    ("PEER", "down while training"): _peer_behind(cut_on=checkpoint_name(4).encode()),
    ("S3", "down while training"): _s3_behind(
        lambda line: "cut" if line.startswith(("PUT", "POST")) else None
    ),
}


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    """As a user who may not do what root may; a normal user stays what it is."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def _in_a_rank(rank: int, world_size: int, setups: dict[str, Any]) -> dict[str, list[str]]:
    return {name: start(Setup(**setup), "whole job") for name, setup in setups.items()}


def in_two_ranks(setups: dict[str, Setup]) -> list[dict[str, list[str]]]:
    """Both ranks' outcomes. In processes of their own, since obstore does not survive a fork."""
    program = [sys.executable, "-m", "checkpoint.outages"]
    text = json.dumps({name: asdict(setup) for name, setup in setups.items()})
    here = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        program,
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": here},
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with Ranks(_in_a_rank, 2, (json.load(sys.stdin),)) as ranks:
        print(json.dumps(ranks.values(timeout_s=780)))
