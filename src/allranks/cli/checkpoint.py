"""`allranks checkpoint`: list, show, verify, copy, prune, export and import checkpoints, by path or URL."""

from __future__ import annotations

import argparse
import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from allranks.checkpoint.stores import Store, StoreSpec, open_store, reason_of, split_address
from allranks.cli.parser import Actions, run_action
from allranks.cli.terminal import ProgressBar, answer
from allranks.errors import InputError, require
from allranks.model.formatting import byte_size, count
from allranks.model.options import argument, check_options, option

if TYPE_CHECKING:
    from allranks.checkpoint.stores.listing import Listed

ADDRESS = "a folder, or a URL: s3://BUCKET/PREFIX, gs://…, az://…, peer://HOST:PORT/JOB"
ONE = "one checkpoint (STORE/NAME), or a store: then its newest"


@dataclass(frozen=True)
class _Flags:
    """Options of every action."""

    options: tuple[str, ...] = option(
        (),
        "of the store: endpoint, region, access_key_id, secret_access_key, token (peer)",
        flags="--option",
        metavar="KEY=VALUE",
    )
    json: bool = option(False, "one JSON object on stdout")


@dataclass(frozen=True)
class _OfStore(_Flags):
    store: str = argument("", ADDRESS, required=True)


@dataclass(frozen=True)
class _ShowFlags(_Flags):
    checkpoint: str = argument("", ONE, required=True)
    tensors: bool = option(False, "list every tensor with shape, type and shards")


@dataclass(frozen=True)
class _VerifyFlags(_Flags):
    checkpoint: str = argument("", "one checkpoint (STORE/NAME), or a store: then all of it", required=True)
    quarantine: bool = option(False, "move damaged ones out of the way")


@dataclass(frozen=True)
class _CopyFlags(_Flags):
    checkpoint: str = argument("", ONE, required=True)
    target: str = argument("", "STORE, or STORE/checkpoint_step_N to rename it", required=True)
    force: bool = option(False, "replace one of that name")
    target_option: tuple[str, ...] = option((), "as --option, for the target", metavar="KEY=VALUE")


@dataclass(frozen=True)
class _PruneFlags(_OfStore):
    keep: int = option(
        1,
        "how many to keep, at least 1: the last good one is always kept",
        flags="--keep --keep-last",
        required=True,
        at_least=1,
    )
    dry_run: bool = option(False, "only report what would be removed")
    no_verify: bool = option(False, "do not verify the newest first; a damaged one then counts as kept")

    def __post_init__(self) -> None:
        check_options(self, "--")


@dataclass(frozen=True)
class _ExportFlags(_Flags):
    checkpoint: str = argument("", ONE, required=True)
    file: str = argument("", "where to; the suffix decides the kind", required=True)
    force: bool = option(False, "overwrite the file")


@dataclass(frozen=True)
class _ImportFlags(_Flags):
    file: str = argument("", "the file or folder", required=True)
    store: str = argument("", ADDRESS, required=True)
    force: bool = option(False, "replace a checkpoint of that step")
    step: int | None = option(None, "the step to give it (default: the one in the file, or 0)")
    trusted_source: bool = option(False, "unpickle freely: RUNS CODE the file may hold")


def main(args: argparse.Namespace) -> int:
    """Runs one action; 1 when something is damaged."""
    try:
        return run_action(ACTIONS, args)
    except OSError as error:
        where = error.filename or getattr(args, "store", None) or getattr(args, "checkpoint", "")
        hint = "Is the address right, and reachable?"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "`df -h` shows the free space."
        raise InputError(f"cannot {args.action} {where}: {reason_of(error)}", hint=hint) from error


def _ls(args: _OfStore) -> int:
    from allranks.checkpoint.stores.listing import list_checkpoints

    with _store(args.store, args.options) as store:
        found, quarantined = list_checkpoints(store), store.quarantined()
    bad = [{"path": path, "reason": reason} for path, reason in quarantined]
    facts = {"store": args.store, "checkpoints": [asdict(one) for one in found], "quarantined": bad}
    lines = [
        *_table(args.store, found),
        *(f"in quarantine: {path}: {reason}" for path, reason in quarantined),
    ]
    return _answer(args, facts, lines)


def _table(address: str, found: list[Listed]) -> Iterator[str]:
    from allranks.checkpoint.manifest import IS_NEWER

    heading = f"{'STEP':>10} {'SIZE':>9} {'RANKS':>5} {'SAVED':<19} NAME"
    yield heading if found else f"no checkpoints in {address}"
    for one in found:
        if one.problem:
            state = "newer version" if IS_NEWER in one.problem else "damaged"
            yield f"{'-':>10} {'-':>9} {'-':>5} {state:<19} {one.name}: {one.problem}"
        else:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.timestamp))
            yield f"{one.step:>10} {byte_size(one.bytes):>9} {one.world_size:>5} {when:<19} {one.name}"


def _show(args: _ShowFlags) -> int:
    from allranks.api.functions import tensors_of
    from allranks.checkpoint.restore.opened_checkpoint import opened

    with _checkpoint(args.checkpoint, args.options) as (store, name), opened(store, name) as checkpoint:
        manifest, path = checkpoint.manifest, checkpoint.path
        tensors = tensors_of(checkpoint)
    total = sum(int(entry["bytes"]) for entry in tensors.values())
    algorithm = checkpoint.indexes[0].algorithm if checkpoint.indexes else ""
    names = ("step", "epoch", "world_size", "timestamp")
    facts = {"path": path, **{name: getattr(manifest, name) for name in names}}
    facts |= {"metrics": dict(manifest.metrics), "ranks": list(manifest.ranks), "bytes": total}
    facts |= {"checksum": algorithm, "tensor_count": len(tensors), "tensors": tensors}
    lines = [
        path,
        f"step {manifest.step}, epoch {manifest.epoch}, saved by {count(manifest.world_size, 'rank')}",
    ]
    lines += [f"{len(tensors)} tensors, {byte_size(total)}, checksums {algorithm}"]
    lines += [f"  {key} = {value}" for key, value in manifest.metrics.items()]
    for name, entry in tensors.items() if args.tensors else ():
        shards = f", {entry['shards']} shards" if entry["shards"] != 1 else ""
        lines.append(f"  {name}  {entry['dtype']} {entry['shape']} {byte_size(int(entry['bytes']))}{shards}")
    return _answer(args, facts, lines)


def _verify(args: _VerifyFlags) -> int:
    from allranks.checkpoint.restore.opened_checkpoint import verify_checkpoint

    results, moved = [], {}
    with _store_and_names(args.checkpoint, args.options) as (store, names):
        for name in names:
            with _bar(f"verify {name}", _bytes_of(store, name), args.json) as progress:
                result = verify_checkpoint(store, name, progress)
            results.append(result)
            if result.problems and args.quarantine and not result.newer:
                moved[result.path] = store.quarantine(name, "; ".join(result.problems))
    if not results:  # a mistyped address is not "ok"
        raise InputError(f"no checkpoints in '{args.checkpoint}'", hint="is the address right?")
    good = not any(result.problems for result in results)
    entries = [{**asdict(result), "quarantined": moved.get(result.path, "")} for result in results]
    lines = []
    for result in results:
        if result.problems:
            state = "NEWER  " if result.newer else "DAMAGED"
            lines += [f"{state} {result.path}", *(f"  {problem}" for problem in result.problems)]
            lines += [f"  moved to {moved[result.path]}"] if result.path in moved else []
        else:
            lines.append(f"ok      {result.path}: {result.tensors} tensors, {byte_size(result.bytes)}")
    _answer(args, {"ok": good, "checkpoints": entries}, lines)
    return 0 if good else 1


def _copy(args: _CopyFlags) -> int:
    from allranks.checkpoint.restore.opened_checkpoint import copy_checkpoint
    from allranks.checkpoint.stores.listing import has_manifest

    with _checkpoint(args.checkpoint, args.options) as (source, name):
        base, new_name = args.target, name
        head, tail = split_address(args.target)
        if tail.startswith("checkpoint_step_"):
            base, new_name = head, tail
        options = args.target_option or args.options
        with _store(base, options, must_exist=False) as target:
            if not args.force and has_manifest(target, new_name):
                raise InputError(f"'{target.path_of(new_name)}' already exists", hint="--force replaces it")
            with _bar(f"copy {name}", _bytes_of(source, name), args.json) as progress:
                manifest = copy_checkpoint(source, name, target, new_name, progress)
            path = target.path_of(new_name)
    facts = {"path": path, "step": manifest.step, "bytes": manifest.data_bytes}
    return _answer(args, facts, f"Wrote {path} (step {manifest.step}, {byte_size(manifest.data_bytes)})")


def _prune(args: _PruneFlags) -> int:
    from allranks.checkpoint.restore.opened_checkpoint import verify_checkpoint
    from allranks.checkpoint.stores.listing import decide, list_verified, remove

    with _store(args.store, args.options) as store:

        def good(name: str) -> bool:
            if args.no_verify:
                return True
            with _bar(f"verify {name}", _bytes_of(store, name), args.json) as progress:
                return not verify_checkpoint(store, name, progress).problems

        decision = decide(list_verified(store, good), args.keep)
        removed, left = ([], []) if args.dry_run else remove(store, decision)
    lines = [decision.reason]
    lines += [f"would remove {name}" for name in (decision.remove if args.dry_run else ())]
    lines += [f"removed {name}" for name in removed]
    lines += [f"left {name}: it is being read" for name in left]
    would = {"reason": decision.reason, "would_remove": list(decision.remove)}
    return _answer(args, {**would, "removed": removed, "being_read": left}, lines)


def _set_aside(args: _OfStore) -> int:
    with _store(args.store, args.options) as store:
        moved = store.set_aside()
    lines = [f"moved to {where}" for where in moved] or f"no checkpoints in {args.store}"
    return _answer(args, {"moved_to": moved}, lines)


def _export(args: _ExportFlags) -> int:
    require("torch", feature="allranks checkpoint export", extra="torch")
    from allranks.checkpoint.convert import export_checkpoint

    with (
        _checkpoint(args.checkpoint, args.options) as (store, name),
        _bar(f"export {name}", _bytes_of(store, name), args.json) as progress,
    ):
        names = export_checkpoint(
            store.path_of(name), args.file, _options(args.options), args.force, progress
        )
    size = Path(args.file).stat().st_size
    facts = {"file": args.file, "tensors": len(names), "bytes": size}
    what = "the whole state" if args.file.endswith(".pt") else f"{count(len(names), 'tensor')} of the model"
    return _answer(args, facts, f"Wrote {args.file} ({what}, {byte_size(size)})")


def _import(args: _ImportFlags) -> int:
    require("torch", feature="allranks checkpoint import", extra="torch")
    from allranks.checkpoint.config import CheckpointLoadConfig
    from allranks.checkpoint.convert import import_checkpoint

    trust = CheckpointLoadConfig(trusted_source=args.trusted_source)
    path = import_checkpoint(
        args.file, args.store, step=args.step, config=trust, options=_options(args.options), force=args.force
    )
    return _answer(args, {"path": path}, f"Wrote {path}")


def _answer(args: _Flags, facts: Mapping[str, object], lines: str | Iterable[str]) -> int:
    answer(args.json, facts, lines)
    return 0


def _options(given: tuple[str, ...]) -> dict[str, str]:
    wrong = [word for word in given if "=" not in word]
    if wrong:
        raise InputError(f"--option takes KEY=VALUE, not '{wrong[0]}'")
    return dict(word.split("=", 1) for word in given)


@contextmanager
def _store(address: str, options: tuple[str, ...], must_exist: bool = True) -> Iterator[Store]:
    store = open_store(StoreSpec(address, _options(options)))
    folder = address.removeprefix("file://")
    if must_exist and "://" not in folder and not Path(folder).is_dir():
        raise _not_a_store(Path(folder))
    try:
        yield store
    finally:
        store.close()


def _not_a_store(path: Path) -> InputError:
    if not path.exists():
        return InputError(
            f"no such folder: '{path}'", hint=f"`ls {path.absolute().parent}` shows what is there."
        )
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        return InputError(
            f"'{path}' is a file of torch.save, not a store: it has no checksums",
            hint=f"make a checkpoint of it: allranks checkpoint import '{path}' STORE",
        )
    return InputError(f"'{path}' is a file, not a store of checkpoints", hint="name the folder it is in")


@contextmanager
def _checkpoint(address: str, options: tuple[str, ...]) -> Iterator[tuple[Store, str]]:
    """The store and name of one checkpoint; of a store, its newest."""
    with _store_and_names(address, options) as (store, names):
        if not names:
            raise InputError(f"no checkpoints in '{address}'")
        yield store, names[-1]


@contextmanager
def _store_and_names(address: str, options: tuple[str, ...]) -> Iterator[tuple[Store, list[str]]]:
    """Either one checkpoint of a store, or all of a store, oldest step first."""
    from allranks.checkpoint.stores.listing import has_manifest, list_checkpoints

    head, tail = split_address(address if "://" in address else str(Path(address).absolute()))
    if tail and ("://" in head or Path(head).is_dir()):
        with _store(head, options) as store:
            # with this name and without a manifest it is a damaged checkpoint, not an empty store
            if tail.startswith("checkpoint_step_") or has_manifest(store, tail):
                yield store, [tail]
                return
    with _store(address, options) as store:
        yield store, [listed.name for listed in list_checkpoints(store)]


def _bytes_of(store: Store, name: str) -> int:
    from allranks.checkpoint.restore.opened_checkpoint import opened, shard_bytes
    from allranks.errors import CheckpointError

    try:
        with opened(store, name) as checkpoint:
            return shard_bytes(checkpoint)
    except CheckpointError:
        return 0


@contextmanager
def _bar(title: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar; the yielded function takes the bytes since its last call."""
    bar, done = ProgressBar(title, quiet=quiet), 0

    def progress(more: int) -> None:
        nonlocal done
        done += more
        bar.show(done, total, f"{byte_size(int(bar.per_second(done)))}/s")

    try:
        yield progress
    finally:
        bar.clear()


ACTIONS: Actions = {
    "ls": ("list the checkpoints of a store", _OfStore, _ls),
    "show": ("show what a checkpoint holds", _ShowFlags, _show),
    "verify": ("read every byte and compare every checksum; exit 1 if damaged", _VerifyFlags, _verify),
    "copy": ("copy a checkpoint to another store, verified on the way", _CopyFlags, _copy),
    "prune": ("remove old checkpoints; never the last good one, nor one being read", _PruneFlags, _prune),
    "set-aside": ("move all checkpoints aside, so that a job starts from scratch", _OfStore, _set_aside),
    "export": ("write one file: .safetensors (the model) or .pt (everything)", _ExportFlags, _export),
    "import": (
        "make a checkpoint of a .pt, a .safetensors or a folder of Hugging Face's Trainer",
        _ImportFlags,
        _import,
    ),
}
