"""What disks do to checkpoints: full, read-only, flipped bits, cut files, readers and retention at once."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch

from allranks.checkpoint import (
    CheckpointConfig,
    CheckpointLoadConfig,
    CheckpointManager,
    CheckpointState,
    CheckpointTier,
    NVMeBackend,
    create_checkpoint_state,
)
from allranks.checkpoint.checksum import best_algorithm
from allranks.checkpoint.manifest import MANIFEST
from allranks.checkpoint.restore.into_state import load_legacy
from allranks.checkpoint.restore.opened_checkpoint import opened
from allranks.checkpoint.save.plan import find_pieces, local_tensors, make_plan
from allranks.checkpoint.save.snapshot import flatten_state
from allranks.checkpoint.save.writer import PartMissing, SaveJob, write_checkpoint
from allranks.checkpoint.stores import Attempt
from allranks.checkpoint.stores.file_store import FileStore
from allranks.checkpoint.stores.listing import Listed, decide, prune
from allranks.checkpoint.tensors import memory_of
from allranks.errors import CheckpointLoadError, CheckpointSaveError, CheckpointValidationError

from .jobs import contents, flip, make_job, make_state, same, same_state, train_step


def _big(step: int) -> CheckpointState:
    return CheckpointState(step=step, model_state_dict={"w": torch.randn(1 << 20)})  # 4 MB


@pytest.mark.needs_root
def test_a_full_disk_fails_in_the_known_words_and_leaves_nothing(small_disk: Path) -> None:
    """The error names tier, path and cause, and the hint the command that helps; the old one still loads."""
    backend = NVMeBackend(small_disk)
    backend.save(make_state(1), "good")
    with pytest.raises(
        CheckpointSaveError,
        match=r"\[NVME\] Failed to save checkpoint to '.*/small/big': No space left on device",
    ) as caught:
        backend.save(_big(2), "big")
    assert caught.value.tier == "NVME" and "allranks checkpoint prune" in caught.value.hint
    assert contents(small_disk) == ["good"]
    assert same_state(backend.load("good"), make_state(1))


@pytest.mark.needs_root
def test_a_disk_that_fills_up_while_writing_is_the_same(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check beforehand is a courtesy: the write itself fails as cleanly."""

    class Plenty:
        f_blocks, f_bavail, f_frsize = 1 << 40, 1 << 40, 4096

    monkeypatch.setattr("allranks.checkpoint.stores.file_store.os.statvfs", lambda _: Plenty)
    with pytest.raises(CheckpointSaveError, match="No space left on device"):
        NVMeBackend(small_disk).save(_big(2), "big")
    assert os.listdir(small_disk) == []


@pytest.mark.needs_root
@pytest.mark.parametrize("policy", ["warn", "fail"])
def test_a_failed_save_stops_training_only_if_the_policy_says_so(
    small_disk: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """warn: said, and wait returns False; fail: raised at the next call."""
    config = CheckpointConfig(nvme_path=small_disk, async_save_policy=policy)
    manager = CheckpointManager(config)
    with caplog.at_level(logging.WARNING):
        manager.save_checkpoint(_big(1), CheckpointTier.NVME)
        if policy == "warn":
            assert manager.wait_for_pending_saves(30) is False
            assert manager.wait_for_pending_saves(30) is True
        else:
            with pytest.raises(CheckpointSaveError, match="No space left on device"):
                manager.wait_for_pending_saves(30)
    manager.close()
    assert "[NVME] Failed to save checkpoint" in caplog.text and "allranks checkpoint prune" in caplog.text


@pytest.mark.needs_root
def test_a_retried_save_succeeds_once_there_is_room(small_disk: Path) -> None:
    """The helper keeps trying from the same snapshot; training continues meanwhile."""
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (2 << 20))
    config = CheckpointConfig(
        nvme_path=small_disk, async_save_policy="retry", async_save_retries=500, async_save_retry_delay=0.001
    )
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(make_state(1), CheckpointTier.NVME)
        filler.unlink()
        assert manager.wait_for_pending_saves(60)
        assert same_state(NVMeBackend(small_disk).load("checkpoint_step_00000001"), make_state(1))


@pytest.mark.needs_root
def test_a_read_only_folder_says_so(read_only_disk: Path) -> None:
    """The error carries the system's words and a hint to look at the mount."""
    with pytest.raises(CheckpointSaveError, match=r"\[NVME\].*Read-only file system") as caught:
        NVMeBackend(read_only_disk).save(make_state(1), "x")
    assert "writable" in caught.value.hint


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_flipped_bit_anywhere_is_noticed_and_the_older_one_is_loaded(tmp_path: Path) -> None:
    """Every file kind, at the start, in the middle and at the end: quarantined, never loaded, never deleted."""
    config = CheckpointConfig(nvme_path=tmp_path / "run", memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(make_state(1))
        manager.save_checkpoint(make_state(2, seed=2, width=40))
        manager.wait_for_pending_saves()
        newest = tmp_path / "run" / "checkpoint_step_00000002"
        backup = tmp_path / "backup"
        shutil.copytree(newest, backup)
        kinds = {path.suffix for path in _files(newest)} | {MANIFEST}
        flips = 0
        for file in _files(backup):
            size = file.stat().st_size
            for position in {0, 7, 8, 100, 4096, size // 2, size - 2, size - 1} & set(range(size)):
                shutil.rmtree(newest, ignore_errors=True)
                shutil.copytree(backup, newest)
                flip(newest / file.name, position, bit=position % 8)
                loaded = manager.load_checkpoint()
                assert loaded is not None and same_state(loaded, make_state(1)), (file.name, position)
                assert not newest.exists()
                flips += 1
        kept = list((tmp_path / "run" / "quarantine").iterdir())
    assert kinds == {".json", ".safetensors", MANIFEST} and flips >= 20
    assert len(kept) >= 1 and all((path / "QUARANTINED.txt").read_text() for path in kept)


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("how", ["cut", "emptied", "deleted"])
def test_a_checkpoint_with_a_cut_or_missing_file_does_not_count(tmp_path: Path, file: str, how: str) -> None:
    """The next older one is loaded instead, and the log says why."""
    backend = NVMeBackend(tmp_path)
    for step in (1, 2):
        backend.save(make_state(step, seed=step), f"step{step}")
    victim = tmp_path / "step2" / file
    if how == "deleted":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[: -20 if how == "cut" else 0])
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        loaded = manager.load_checkpoint()
    assert loaded is not None and same_state(loaded, make_state(1, seed=1))
    with pytest.raises(CheckpointLoadError):
        backend.load("step2")


def test_when_every_checkpoint_is_bad_the_error_names_them_all(tmp_path: Path) -> None:
    """No state is invented; nothing is deleted."""
    backend = NVMeBackend(tmp_path)
    for step in (1, 2):
        backend.save(make_state(step), f"step{step}")
        path = tmp_path / f"step{step}" / "rank-00000.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    with (
        CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager,
        pytest.raises(
            CheckpointLoadError, match=r"(?s)no checkpoint could be loaded: step 2 in NVME.*step 1 in NVME"
        ),
    ):
        manager.load_checkpoint()
    assert len(list((tmp_path / "quarantine").iterdir())) == 2


def _damage_last_tensor(folder: Path, step: int) -> None:
    """What is read last of a checkpoint; everything before it is right."""
    name = f"checkpoint_step_{step:08d}"
    with opened(FileStore(folder), name) as checkpoint:
        parts = [stored for _, stored in checkpoint.shards() if "state_dict" in stored.shard.name]
    flip(folder / name / "rank-00000.safetensors", max(parts, key=lambda stored: stored.start).start)


def test_a_restore_that_finds_nothing_good_says_what_the_model_holds(tmp_path: Path) -> None:
    """Tensors before the damaged one have been read into the model."""
    model, optimizer = make_job(seed=1)
    config = CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(create_checkpoint_state(3, model, optimizer))
        assert manager.wait_for_pending_saves()
        _damage_last_tensor(tmp_path, 3)
        train_step(model, optimizer, 4)
        with pytest.raises(CheckpointLoadError, match="THE MODEL HOLDS PARTS OF STEP 3"):
            manager.restore(model, optimizer)


def test_nothing_of_a_damaged_checkpoint_is_left_when_the_older_one_is_good(tmp_path: Path) -> None:
    """The newest is damaged at its end: model and optimizer hold the older one, bit for bit."""
    model, optimizer = make_job(seed=1)
    config = CheckpointConfig(nvme_path=tmp_path, memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        older = create_checkpoint_state(1, model, optimizer).cpu_copy()
        for step in (1, 2):
            manager.save_checkpoint(create_checkpoint_state(step, model, optimizer))
            train_step(model, optimizer, step)
        assert manager.wait_for_pending_saves()
        _damage_last_tensor(tmp_path, 2)
        state = manager.restore(model, optimizer)
    assert state is not None and state.step == 1
    assert same_state(create_checkpoint_state(1, model, optimizer), older)


def test_an_optimizer_that_does_not_fit_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    """Other parameter groups than the saved ones: torch would only complain after the model was overwritten."""
    model, optimizer = make_job(seed=1)
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        manager.save_checkpoint(create_checkpoint_state(3, model, optimizer))
        other, _ = make_job(seed=2)
        before = {name: value.clone() for name, value in other.state_dict().items()}
        fewer = torch.optim.AdamW([next(other.parameters())])
        with pytest.raises(CheckpointValidationError, match="parameters in its groups"):
            manager.restore(other, fewer)
    assert same(other.state_dict(), before)


def test_a_snapshot_whose_memory_was_overwritten_is_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte of the newest snapshot changes: the older one is taken, and the log says why."""
    config = CheckpointConfig(nvme_path=None, memory_snapshot_interval=1)
    with CheckpointManager(config) as manager:
        for step in (1, 2):
            manager.save_checkpoint(make_state(step, seed=step), CheckpointTier.MEMORY)
        assert manager.wait_for_pending_saves()
        snapshot = manager.memory_backend.find(2)
        assert snapshot is not None
        snapshot.settle()
        placed = snapshot.plan.owned[-1]
        snapshot.arena.view[placed.start] ^= 1
        snapshot.release()
        loaded = manager.load_checkpoint()
        assert loaded is not None and same_state(loaded, make_state(1, seed=1))
        assert manager.memory_backend.steps() == [1]
    assert "does not match its checksum" in caplog.text


def _write_to(
    disk: FileStore,
    state: CheckpointState,
    retries: int,
    rank: int = 0,
    ranks: tuple[int, ...] = (0,),
) -> None:
    flat = flatten_state(state, 0)
    plan = make_plan("", find_pieces(flat.tensors), None, True)
    image = bytearray(plan.arena_bytes)
    image[: len(plan.layout.header)] = plan.layout.header
    for source, placed in local_tensors(flat.tensors, plan):
        image[placed.start : placed.start + placed.piece.shard.bytes] = memory_of(source.contiguous())
    job = SaveJob(
        disk.spec, Attempt("x", "0123456789ab"), rank, ranks, len(ranks), state.step, 0, 0.0, best_algorithm(), flat.common, flat.own,
        retries=retries, retry_delay_s=0.0, commit_timeout_s=0.3,
    )  # fmt: skip
    write_checkpoint(job, plan.layout, memoryview(image), disk)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_is_full_to_the_last_byte_still_tells_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """There was no room for the note that says why, and the others waited ten minutes for a part that could not come."""

    class Full:
        f_blocks, f_bavail, f_frsize = 100, 0, 4096

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("allranks.checkpoint.stores.file_store.os.statvfs", lambda _: Full)
        _write_to(FileStore(tmp_path), make_state(1), 0, rank=failing, ranks=(0, 1))
    with pytest.raises(PartMissing, match=f"rank {failing} .*its store is full"):
        _write_to(FileStore(tmp_path), make_state(1), 0, rank=1 - failing, ranks=(0, 1))
    assert FileStore(tmp_path).names() == []


def test_failed_saves_do_not_fill_the_disk_until_one_succeeds(tmp_path: Path) -> None:
    """What was left behind by savers that are gone was removed after a commit only: never, on a full disk."""
    left = tmp_path / ".saving-checkpoint_step_00000005-dd36c39f4dfe"
    left.mkdir()
    (left / "rank-00001.safetensors").write_bytes(b"x" * 100)
    for path in (left / "rank-00001.safetensors", left):
        os.utime(path, (1, 1))
    with pytest.raises(PartMissing, match="no part from ranks"):
        _write_to(FileStore(tmp_path), make_state(9), 0, ranks=(0, 1))
    assert not left.exists()


def test_retention_keeps_the_newest_and_never_the_unreadable_or_the_last() -> None:
    """A pure decision with its reason."""
    bad = Listed("c", "c", 3, problem="damaged")
    found = [Listed("a", "a", 1), Listed("b", "b", 2), bad, Listed("d", "d", 4)]
    assert decide(found, 2).remove == ("a",)
    assert decide(found, 2).reason == "keeping the newest 2: steps 1 are surplus; damaged and not counted: c"
    assert decide(found, 1, spare="a").remove == ("b",)
    assert decide(found, 1).remove == ("a", "b")
    assert decide([Listed("a", "a", 1), bad], 1).remove == ()
    assert decide(found, 0).remove == ()


def test_what_is_being_read_is_not_removed(tmp_path: Path) -> None:
    """Retention leaves it, says so, and takes it next time."""
    backend = NVMeBackend(tmp_path)
    for step in (1, 2):
        backend.save(make_state(step), f"step{step}")
    with backend.store.reading("step1"):
        assert prune(FileStore(tmp_path), 1) == ([], ["step1"])
        with pytest.raises(BlockingIOError):
            backend.delete("step1")
    assert prune(FileStore(tmp_path), 1) == (["step1"], [])


def test_saving_a_step_again_replaces_it_in_one_instant(tmp_path: Path) -> None:
    """After a rollback the same step is trained again: the new one counts, and nothing else is left."""
    backend = NVMeBackend(tmp_path)
    backend.save(make_state(1, seed=1), "step1")
    backend.save(make_state(1, seed=2), "step1")
    assert same_state(backend.load("step1"), make_state(1, seed=2))
    assert contents(tmp_path) == ["step1"]


def test_what_dead_savers_left_behind_is_tidied_but_not_what_live_ones_write(tmp_path: Path) -> None:
    """Age and lock both must say that nobody is at work."""
    store, other = FileStore(tmp_path), FileStore(tmp_path)
    live, dead = Attempt("live", "t1"), Attempt("dead", "t2")
    for attempt in (live, dead):
        store.write(attempt, "file", [memoryview(b"x")], 1)
        folder = tmp_path / f".saving-{attempt.name}-{attempt.token}"
        os.utime(folder / "file", (1, 1))
        os.utime(folder, (1, 1))
    store.leave(dead)
    assert other.tidy() == [".saving-dead-t2"]
    store.abandon(live)
    assert os.listdir(tmp_path) == []


def test_a_killed_helper_is_replaced_and_the_save_is_finished(tmp_path: Path) -> None:
    """Its unfinished save is written by the next helper from the same memory; training notices nothing."""
    with CheckpointManager(CheckpointConfig(nvme_path=tmp_path)) as manager:
        manager.saves.helper.start()
        first = manager.saves.helper.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)  # it cannot have begun
        manager.save_checkpoint(make_state(1))
        os.kill(first, signal.SIGKILL)
        assert manager.wait_for_pending_saves(60)
        manager.save_checkpoint(make_state(2))
        assert manager.wait_for_pending_saves(60)
        assert manager.saves.helper.pid not in (None, first)
        assert manager.nvme_backend is not None
        assert manager.nvme_backend.list_checkpoints() == [
            "checkpoint_step_00000001",
            "checkpoint_step_00000002",
        ]


def test_buffers_are_reused_from_save_to_save(tmp_path: Path) -> None:
    """Ten saves allocate shared memory once."""
    model, optimizer = make_job()
    config = CheckpointConfig(nvme_path=tmp_path, checkpoint_interval=1, memory_snapshot_interval=0)
    with CheckpointManager(config) as manager:
        arenas = set()
        for step in range(1, 11):
            train_step(model, optimizer, step)
            manager.step(step, model, optimizer)
            manager.wait_for_pending_saves()
            arenas |= {arena.id for arena in manager.memory_backend.pool._free}
        assert len(arenas) == 1


def test_a_file_has_its_name_only_once_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank commits as soon as it sees every part: it must not see one that is still being written."""
    store, attempt = FileStore(tmp_path), Attempt("x", "t")
    seen = []
    real = os.fsync

    def fsync(fd: int) -> None:
        seen.append(store.staged(attempt, "rank-00001.json"))
        real(fd)

    monkeypatch.setattr("allranks.checkpoint.stores.file_store.os.fsync", fsync)
    store.write(attempt, "rank-00001.json", [memoryview(b"index")], 5)
    assert seen == [None] and store.staged(attempt, "rank-00001.json") == b"index"
    store.abandon(attempt)


@pytest.mark.parametrize("kind", ["packed", "overlapping"])
def test_a_pt_file_that_unpacks_to_more_than_it_holds_is_refused_before_torch_opens_it(
    kind: str, tmp_path: Path
) -> None:
    """300 KB took 600 MB before they were refused; many entries over the same bytes do it without compression."""
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if kind == "packed" else zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", bytes(100 << 10))
        if kind == "overlapping":
            file.filelist += file.filelist
    with pytest.raises(CheckpointLoadError, match=r"'archive/data\.pkl' unpacks to more than the file holds"):
        load_legacy(path, CheckpointLoadConfig())


def test_a_packed_pt_file_that_only_torch_takes_for_a_zip_file_is_refused(tmp_path: Path) -> None:
    """Its end names another length of the directory: Python's reader refuses that, torch's does not look at it."""
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02}q\x00." + bytes(100 << 10))
        file.writestr("archive/version", b"3\n")
    data = bytearray(path.read_bytes())
    data[-10] += 10
    path.write_bytes(data)
    assert torch.load(path) == {}  # it would unpack whatever is in there
    with pytest.raises(CheckpointLoadError, match="it is a damaged zip file"):
        load_legacy(path, CheckpointLoadConfig())


def test_a_pt_file_that_torch_saved_is_no_such_file(tmp_path: Path) -> None:
    """Large and empty tensors, shared memory: what torch stores is never larger than its file."""
    weight = torch.randn(300, 300)
    state = {"step": 1, "model_state_dict": {"a": weight, "b": weight.t(), "c": torch.empty(0)}}
    torch.save({**state, "optimizer_state_dict": {}}, tmp_path / "whole.pt")
    assert torch.equal(
        load_legacy(tmp_path / "whole.pt", CheckpointLoadConfig()).model_state_dict["b"], weight.t()
    )
