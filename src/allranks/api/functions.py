"""The functions behind `allranks.diagnose`, `allranks.stacks` and `allranks.load_checkpoint_index`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.api.results import CheckpointIndex, DiagnosisResult, RecordedCalls, StacksResult
from allranks.errors import InputError

if TYPE_CHECKING:  # numpy comes with them
    from allranks.checkpoint.restore.opened_checkpoint import Opened
    from allranks.load import LoadOptions, LoadResult
    from allranks.model.diagnosis import Diagnosis
    from allranks.model.trace import RankTrace


def diagnose(
    paths: str | Path | Iterable[str | Path],
    *,
    ranks: Iterable[int] | None = None,
    attempt: int | None = None,
    pg_filters: Iterable[str] = (),
    allow_incomplete_ranks: bool = False,
) -> DiagnosisResult:
    """Why the job hangs, from dumps of any origin: what `allranks diagnose PATH…` prints, as an object.

    `paths` are folders, files or URLs; the other arguments are the command's flags.
    """
    from allranks.load import LoadOptions

    roots = [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]
    wanted = None if ranks is None else frozenset(ranks)
    loaded = load_dumps(roots, LoadOptions(attempt=attempt, ranks=wanted))
    chosen = {
        "pg_filters": frozenset(pg_filters),
        "allow_incomplete_ranks": allow_incomplete_ranks or wanted is not None,
    }
    return DiagnosisResult(judge_dumps(loaded, loaded.traces, roots, **chosen), RecordedCalls(loaded.traces))


def load_dumps(roots: list[str], options: LoadOptions) -> LoadResult:
    """The dumps; a rank that was asked for and is not among them is a mistake."""
    from allranks.diagnose.phrasing import ranks_text
    from allranks.load import load_paths

    loaded = load_paths(roots, options)
    absent = (options.ranks or frozenset()) - {trace.header.rank for trace in loaded.traces}
    if absent:
        there = [note.rank for note in loaded.files if note.rank is not None]
        raise InputError(f"no dump of {ranks_text(absent)}", hint=f"There are dumps of {ranks_text(there)}.")
    return loaded


def judge_dumps(loaded: LoadResult, traces: list[RankTrace], roots: list[str], **options: Any) -> Diagnosis:
    """The diagnosis of loaded dumps together with everything that lies beside them; `options` are DiagnoseOptions."""
    from allranks.api.extra_evidence import (
        find_evidence,
        is_post_mortem,
        judge_stacks,
        taken_ns,
        with_evidence,
    )
    from allranks.diagnose.verdict import DiagnoseOptions
    from allranks.diagnose.verdict import diagnose as judge

    boxes = any(trace.kind.startswith("black box") for trace in traces)
    ended = boxes and is_post_mortem(traces)
    now_ns = taken_ns(traces, roots) if boxes and not ended else 0
    evidence = find_evidence(loaded, traces, roots)
    how = DiagnoseOptions(now_ns=now_ns, ended=ended, **options)
    result = judge(traces, evidence.files, stacks=evidence.seen, options=how)
    names = {name for group in result.groups for name in (group.label, group.name, group.desc)}
    if traces and (absent := how.pg_filters - names):
        known = sorted({group.desc or group.name for trace in traces for group in trace.groups})
        raise InputError(f"no group {min(absent)!r} in these dumps", hint=f"Groups: {', '.join(known[:20])}.")
    if not traces and result.verdict is None and evidence.captures:
        result = judge_stacks(result, evidence.captures)
    return with_evidence(result, evidence)


def stacks(
    folder: str | Path | None = None,
    *,
    pid: int | Iterable[int] = (),
    name: str = "",
    job: str = "",
    rounds: int = 2,
) -> StacksResult:
    """What every rank on this node is doing, or was when a `folder` of captures was made."""
    from allranks.stacks import CollectOptions, Selection, classify, collect, find_targets, read_capture
    from allranks.stacks.find import RANK_TITLES

    if folder is not None:
        capture = read_capture(folder)
    else:
        pids = (pid,) if isinstance(pid, int) else tuple(pid)
        targets = find_targets(Selection(pids, name, job, RANK_TITLES))
        capture = collect(targets, CollectOptions(rounds=rounds, interval_s=1.0), lambda text: None)
    return StacksResult(classify(capture), capture)


def load_checkpoint_index(address: str | Path, **options: str) -> CheckpointIndex:
    """What a checkpoint holds: a folder or URL of a store (its newest one) or of one checkpoint. Reads no tensors."""
    from allranks.checkpoint.restore.opened_checkpoint import opened
    from allranks.checkpoint.stores import StoreSpec, open_store, split_address
    from allranks.checkpoint.stores.listing import has_manifest, list_checkpoints

    whole = str(address) if "://" in str(address) else str(Path(address).absolute())
    head, tail = split_address(whole)
    for home, name in ((head, tail), (whole, "")):
        if not home or ("://" not in home and not Path(home).is_dir()):
            continue
        store = open_store(StoreSpec(home, options))
        try:
            names = [tail] if name and has_manifest(store, name) else []
            names = names or ([] if name else [listed.name for listed in list_checkpoints(store)])
            if names:
                with opened(store, names[-1]) as checkpoint:
                    return _index(checkpoint)
        finally:
            store.close()
    raise InputError(
        f"no checkpoint at {address}", hint="is the address right? `allranks checkpoint ls STORE` lists them"
    )


def _index(checkpoint: Opened) -> CheckpointIndex:
    manifest, tensors = checkpoint.manifest, tensors_of(checkpoint)
    return CheckpointIndex(
        checkpoint.path, manifest.step, manifest.epoch, manifest.world_size, dict(manifest.metrics), tensors
    )


def tensors_of(checkpoint: Opened) -> dict[str, dict[str, Any]]:
    """name -> dtype, shape, bytes and shards of every tensor, sorted."""
    found: dict[str, dict[str, Any]] = {}
    for _, stored in checkpoint.shards():
        shard = stored.shard
        entry = found.setdefault(
            shard.name,
            {"dtype": shard.view or shard.dtype, "shape": list(shard.shape), "bytes": 0, "shards": 0},
        )
        entry["bytes"] += shard.bytes
        entry["shards"] += 1
    return dict(sorted(found.items()))
