"""kill -9 at any moment of a save: the newest complete checkpoint always loads, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.channel.frames import HEAD, JsonReader, send_json
from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointState, NVMeBackend
from allranks.checkpoint.manifest import MANIFEST, decode_manifest
from allranks.checkpoint.save.helper import Helper
from allranks.checkpoint.stores.file_store import FileStore
from allranks.drill.ranks import Ranks
from allranks.drill.ranks import signal as mark

ROUNDS = 100


def _state(step: int) -> CheckpointState:
    """A state that can be told from every other by its step alone."""
    generator = torch.Generator().manual_seed(step)
    weights = {f"w{number}": torch.randn(4_000, generator=generator) for number in range(8)}
    return CheckpointState(step=step, timestamp=float(step), model_state_dict=weights)


def _save_for_ever(folder: Path, first: int, begun: int) -> None:
    """Child: saves step after step, keeping two, until it is killed; one byte at the beginning of each."""
    backend = NVMeBackend(folder)
    step = first
    while True:
        state = _state(step)
        os.write(begun, b"x")
        backend.save(state, f"checkpoint_step_{step:08d}")
        backend.cleanup_old_checkpoints(2)
        step += 1


def _killed_saver(folder: Path, first: int, saves: int, after_s: float) -> None:
    """Forks a saver and kills it a moment after it has begun its last save."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)  # when the test is killed, the next write fails and the saver ends
            torch.set_num_threads(1)
            _save_for_ever(folder, first, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    begun = 0
    while begun < saves:
        begun += len(os.read(read_end, saves - begun))
    time.sleep(after_s)  # the moment of the kill, not a way to synchronise
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(read_end)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the saver died on its own"


def test_a_saver_killed_a_hundred_times_always_leaves_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    """Each kill is at a random moment of a save; what is loaded is whole, newest, and never older than before."""
    dice = random.Random(20261115)
    newest, interrupted = 0, 0
    backend = NVMeBackend(tmp_path)
    for _ in range(ROUNDS):
        saves = dice.choice((1, 2))
        _killed_saver(tmp_path, newest + 1, saves, dice.uniform(0.0, 0.008))
        interrupted += any(path.name.startswith(".saving-") for path in tmp_path.iterdir())
        latest = backend.get_latest_checkpoint()
        if latest is None:
            assert newest == 0 and saves == 1
            continue
        loaded = backend.load(latest)
        expected = _state(loaded.step)
        assert all(torch.equal(loaded.model_state_dict[k], v) for k, v in expected.model_state_dict.items())
        assert loaded.step >= newest + saves - 1
        newest = loaded.step
    assert newest >= ROUNDS // 4 and interrupted, "the kills did not hit saves"


def _save_and_pause(rank: int, world_size: int, folder: str) -> None:
    manager = CheckpointManager(CheckpointConfig(nvme_path=folder))
    manager.saves.helper.start()
    assert manager.saves.helper.pid is not None
    Path(folder, "helper.pid").write_text(str(manager.saves.helper.pid))
    os.kill(manager.saves.helper.pid, signal.SIGSTOP)
    manager.save_checkpoint(_state(5))
    mark("handed over")
    signal.pause()


def _wait_until(what: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_the_save_of_a_killed_rank_is_finished_by_its_helper_which_then_ends(tmp_path: Path) -> None:
    """The bytes are in shared memory: the helper needs the rank no longer, and does not outlive its work."""
    with Ranks(_save_and_pause, 1, (str(tmp_path),), backend=None) as ranks:
        ranks.wait_for("handed over", timeout_s=60)
        helper = int((tmp_path / "helper.pid").read_text())
        ranks.kill(0)
        ranks.join(20)
        assert FileStore(tmp_path).names() == []  # the helper was stopped: nothing can be there yet
        os.kill(helper, signal.SIGCONT)
        _wait_until(lambda: FileStore(tmp_path).names() == ["checkpoint_step_00000005"])
        _wait_until(
            lambda: (
                not Path(f"/proc/{helper}").exists()
                or "Z" in Path(f"/proc/{helper}/stat").read_text().split()[2]
            )
        )
    loaded = NVMeBackend(tmp_path).load("checkpoint_step_00000005")
    assert torch.equal(loaded.model_state_dict["w7"], _state(5).model_state_dict["w7"])


class Cut(Exception):
    """Stands for the moment the power goes."""


def _calls_until(limit: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets `limit` system calls of the store pass, then fails every one."""
    done: list[str] = []

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            if len(done) >= limit:
                raise Cut(name)
            done.append(name)
            return real(*args, **options)

        monkeypatch.setattr(f"allranks.checkpoint.stores.file_store.os.{name}", call)

    for name in ("pwrite", "fsync", "open", "rename"):
        counted(name)
    return done


@pytest.mark.parametrize("exchange", [True, False], ids=["local", "NFS"])
def test_a_crash_after_any_system_call_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Every prefix of the calls of a save: the checkpoint of that name is whole, old or new, never between."""
    if not exchange:
        monkeypatch.setattr("allranks.checkpoint.stores.file_store._exchange", lambda one, other: False)
    outcomes = set()
    limit = 0
    while True:
        folder = tmp_path / str(limit)
        NVMeBackend(folder).save(_state(1), "same")
        with pytest.MonkeyPatch.context() as patch:
            _calls_until(limit, patch)
            try:
                NVMeBackend(folder).save(_state(2), "same")
                finished = True
            except Cut:
                finished = False
        loaded = NVMeBackend(folder).load("same")
        manifest = decode_manifest(FileStore(folder).read("same", MANIFEST), "same")
        assert loaded.step == manifest.step in (1, 2)
        assert torch.equal(loaded.model_state_dict["w0"], _state(loaded.step).model_state_dict["w0"])
        outcomes.add(loaded.step)
        if finished:
            break
        limit += 1
    assert outcomes == {1, 2} and limit > 10


def test_a_rank_that_died_with_replies_unread_is_heard_to_its_end() -> None:
    """The kernel reports a reset once: what the rank had sent still counts, and then comes the end."""
    rank, helper = socket.socketpair()
    with helper:
        send_json(helper, {"kind": "saved"})  # never read
        send_json(rank, {"kind": "drop", "id": 1})
        rank.close()
        inbox = JsonReader(helper)
        assert inbox.receive() == {"kind": "drop", "id": 1}
        assert inbox.receive() is None


def test_a_helper_whose_rank_talks_nonsense_ends_with_its_workers() -> None:
    """The error is raised, and no thread waits for saves that will never come."""
    rank, other = socket.socketpair()
    with rank, other:
        helper = Helper(other)
        waiting = helper.queue_of("file:///nowhere")
        rank.sendall(HEAD.pack(1 << 31, 0))
        with pytest.raises(ValueError, match="bytes"):
            helper.serve()
        assert waiting.empty()
        assert not any(worker.is_alive() for worker in helper.workers)
        if helper.parent is not None:
            os.close(helper.parent)
