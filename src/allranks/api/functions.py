"""The functions behind `allranks.diagnose`, `allranks.stacks`, `allranks.jobs` and their like, and what they return: each result shows
itself in a notebook and turns into JSON and pandas.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from allranks.errors import InputError
from allranks.model.diagnosis import Diagnosis, Finding
from allranks.model.stacks import Capture, StacksReport
from allranks.model.trace import RankTrace

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import polars
    import pyarrow
    from matplotlib.axes import Axes

    from allranks.checkpoint.restore.opened_checkpoint import Opened
    from allranks.ledger.summary import JobAccount
    from allranks.model.cluster import JobView


INCIDENTS = "allranks-incidents"  # where `allranks run` leaves them
MAX_PAGE = 8 << 20  # characters; a larger page would make the notebook slow
_TIMES = ("created", "started", "completed")
_MAYBE = ("rank", "p2p_seq", "step", "peer", "root", "timeout_ms")  # columns where -1 stands for "not known"
_COLUMNS = ("seq", "p2p_seq", "step", "in_numel", "out_numel", "peer", "root", "timeout_ms")


@dataclass(frozen=True)
class RecordedCalls:
    """Every recorded call of every rank."""

    traces: Sequence[RankTrace]

    def __len__(self) -> int:
        return sum(len(trace.calls) for trace in self.traces)

    def __repr__(self) -> str:
        return f"<{len(self):,} calls of {len(self.traces):,} ranks; to_pandas() makes a table>"

    def columns(self) -> dict[str, np.ndarray]:
        """One numpy array per column, all of the same length."""
        import numpy as np

        parts = [_columns(trace) for trace in self.traces]
        if not parts:
            return {}
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame with one row per call; times are UTC."""
        import pandas

        frame = pandas.DataFrame(self.columns())
        for name in _TIMES:
            if name in frame:
                frame[name] = pandas.to_datetime(frame[name].where(frame[name] > 0), unit="ns", utc=True)
        for name in _MAYBE:
            if name in frame:
                frame[name] = frame[name].astype("Int64").mask(frame[name] < 0)
        return frame

    def to_arrow(self) -> pyarrow.Table:
        """An Arrow table with one row per call; times are UTC, what is not known is null."""
        import pyarrow

        columns = self.columns()
        found = {}
        for name, values in columns.items():
            kind = pyarrow.timestamp("ns", "UTC") if name in _TIMES else None
            absent = values <= 0 if name in _TIMES else values < 0 if name in _MAYBE else None
            found[name] = pyarrow.array(values, type=kind, mask=absent, from_pandas=True)
        return pyarrow.table(found)

    def to_polars(self) -> polars.DataFrame:
        """A polars DataFrame of the same rows."""
        import polars

        frame = polars.from_arrow(self.to_arrow())
        assert isinstance(frame, polars.DataFrame)
        return frame


def _columns(trace: RankTrace) -> dict[str, np.ndarray]:
    import numpy as np

    from allranks.model.stacks import is_user_file
    from allranks.report.text import state_name

    calls = trace.calls
    groups = np.array([g.desc if g.desc not in ("", "undefined") else g.name for g in trace.groups], object)
    places = [
        next((f for f in stack if is_user_file(f.file)), stack[0] if stack else None)
        for stack in trace.stacks
    ]
    where = np.array([f"{f.file}:{f.line}" if f else "" for f in places], object)
    kinds = np.array([state_name(code) for code in range(256)], object)
    took = np.where(calls["completed_ns"] > 0, calls["completed_ns"] - calls["created_ns"], -1) / 1e6
    rank = -1 if trace.header.rank is None else trace.header.rank
    found = {
        "rank": np.full(len(calls), rank, np.int64),
        "host": np.full(len(calls), trace.header.host, object),
        "group": groups[calls["group"]],
        "op": np.array(trace.names, object)[calls["op"]],
        "state": kinds[calls["state"]],
        "created": calls["created_ns"],
        "started": calls["started_ns"],
        "completed": calls["completed_ns"],
        "ms": np.where(took < 0, np.nan, took),
        "where": where[calls["stack"]],
    }
    return {**found, **{name: calls[name] for name in _COLUMNS}}


class PageResult:
    """What both answers can do: show themselves, and turn into JSON and a page."""

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The object of the command's `--json`."""
        raise NotImplementedError

    def _page(self) -> str:
        raise NotImplementedError

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def to_html(self, path: str | Path | None = None) -> str:
        """The page of `--html`, also written to `path`."""
        text = self._page()
        if path is not None:
            Path(path).write_text(text, encoding="utf-8", errors="replace")
        return text

    def __repr__(self) -> str:
        return f"<allranks {type(self).__name__.removesuffix('Result').lower()}: {self.sentence}>"

    def _repr_html_(self) -> str:
        page = self._page()
        return framed(page) if len(page) <= MAX_PAGE else f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True, repr=False)
class DiagnosisResult(PageResult):
    """The answer of `allranks.diagnose(…)`: `verdict` is None when nothing is wrong."""

    diagnosis: Diagnosis
    calls: RecordedCalls = field(repr=False)

    @property
    def status(self) -> str:
        """ "ok", "fault" or "unclear"."""
        return self.diagnosis.status

    @property
    def verdict(self) -> Finding | None:
        """The root cause: `cause`, `ranks`, `sentence`, `where`, `confidence`, `stacks`, `advice` …"""
        return self.diagnosis.verdict

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, root causes first."""
        return self.diagnosis.findings

    @property
    def sentence(self) -> str:
        from allranks.report.text import TextOptions, headline

        return headline(self.diagnosis, TextOptions())

    def to_dict(self) -> dict[str, Any]:
        """The object of `allranks diagnose --json`."""
        from allranks.report import as_json

        return as_json.to_object(self.diagnosis)

    def _page(self) -> str:
        from allranks.report import html

        return "".join(html.render(self.diagnosis, list(self.calls.traces), time.time()))

    def plot(self, ax: Axes | None = None, *, last_s: float = 30.0) -> Axes:
        """The calls of every rank over time as bars, those that never finished in red, with matplotlib."""
        import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.subplots(figsize=(10, 1.5 + 0.25 * len(self.calls.traces)))[1]
        columns = self.calls.columns()
        ends = max((int(columns[name].max(initial=0)) for name in _TIMES), default=0) if columns else 0
        for rank in sorted(set(columns["rank"].tolist())) if columns else ():
            mine = (columns["rank"] == rank) & (columns["created"] > ends - last_s * 1e9)
            begin, done = columns["created"][mine], columns["completed"][mine]
            for chosen, end, colour in (
                (done > 0, done, "tab:blue"),
                (done <= 0, begin * 0 + ends, "tab:red"),
            ):
                spans = zip((begin[chosen] - ends) / 1e9, (end[chosen] - begin[chosen]) / 1e9, strict=True)
                ax.broken_barh(list(spans), (rank - 0.4, 0.8), facecolors=colour)
        ax.set(xlabel="seconds before the end of the record", ylabel="rank", title=self.sentence)
        ax.invert_yaxis()
        return ax

    def __str__(self) -> str:
        from allranks.report.text import render

        return "\n".join(render(self.diagnosis))


@dataclass(frozen=True, repr=False)
class StacksResult(PageResult):
    """The answer of `allranks.stacks()`."""

    report: StacksReport
    capture: Capture = field(repr=False)

    @property
    def hung(self) -> bool | None:
        """None when no progress information allows telling."""
        return self.report.hung

    @property
    def sentence(self) -> str:
        return self.report.sentence

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that the others wait for."""
        return self.report.culprits

    def to_dict(self) -> dict[str, Any]:
        """The object of `allranks stacks --json`."""
        from allranks.stacktraces.text import grow_tree, report_json

        return report_json(self.report, grow_tree(self.capture))

    def _page(self) -> str:
        from allranks.stacktraces.html import render_html
        from allranks.stacktraces.text import grow_tree

        return render_html(self.report, grow_tree(self.capture), made_s=time.time())

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame with one row per rank."""
        import pandas

        rows = [{"rank": int(rank), **facts} for rank, facts in self.to_dict()["ranks"].items()]
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        from allranks.stacktraces.text import grow_tree, render_text

        return "\n".join(render_text(self.report, grow_tree(self.capture)))


class TensorFacts(TypedDict):
    """What a checkpoint says of one tensor."""

    dtype: str
    shape: list[int]
    bytes: int
    shards: int


@dataclass(frozen=True)
class CheckpointIndex:
    """What a checkpoint holds, without its tensors' bytes."""

    path: str
    step: int
    epoch: int
    world_size: int
    metrics: dict[str, object]
    tensors: dict[str, TensorFacts] = field(repr=False)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(entry["bytes"] for entry in self.tensors.values())

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    def to_pandas(self) -> pandas.DataFrame:
        """A DataFrame with one row per tensor."""
        import pandas

        return pandas.DataFrame([{"name": name, **entry} for name, entry in self.tensors.items()])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th>{head}</th>" for head in ("tensor", "type", "shape", "bytes", "shards"))
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(e['dtype']))}</td><td>{e['shape']}</td><td>{e['bytes']:,}</td><td>{e['shards']}</td></tr>"
            for name, e in list(self.tensors.items())[:200]
        )
        more = f"<p>and {len(self.tensors) - 200:,} more</p>" if len(self.tensors) > 200 else ""
        return (
            f"<p><b>{escape(self.path)}</b>: step {self.step:,}, {len(self.tensors):,} tensors, {self.bytes:,} bytes, "
            f"saved by {self.world_size} ranks</p><table><tr>{heads}</tr>{rows}</table>{more}"
        )


def framed(page: str) -> str:
    """A whole page inside a notebook's output, apart from it."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="width:100%;height:760px;border:1px solid #8884;'
        'border-radius:8px" title="allranks report"></iframe>'
    )


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
    from allranks.diagnosis.verdict import DiagnoseOptions
    from allranks.incidents.folder import one_incident
    from allranks.incidents.judge import judge_dumps
    from allranks.load import LoadOptions, load_paths

    roots = [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]
    roots = [str(one_incident(Path(root))) if Path(root).is_dir() else root for root in roots]
    wanted = None if ranks is None else frozenset(ranks)
    loaded = load_paths(roots, LoadOptions(attempt=attempt, ranks=wanted))
    incomplete, groups = allow_incomplete_ranks or wanted is not None, frozenset(pg_filters)
    how = DiagnoseOptions(pg_filters=groups, allow_incomplete_ranks=incomplete)
    part = attempt is not None or bool(groups) or incomplete
    found = judge_dumps(loaded, loaded.traces, roots, how, chosen=part)
    return DiagnosisResult(found, RecordedCalls(loaded.traces))


def stacks(
    folder: str | Path | None = None,
    *,
    pid: int | Iterable[int] = (),
    name: str = "",
    job: str = "",
    rounds: int = 2,
) -> StacksResult:
    """What every rank on this node is doing, or was when a `folder` of captures was made."""
    from allranks.stacktraces import CollectOptions, Selection, classify, collect, find_targets, read_capture
    from allranks.stacktraces.find import RANK_TITLES

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
                with opened(store, names[-1]) as found:
                    top, tensors = found.manifest, tensors_of(found)
                facts = (top.step, top.epoch, top.world_size, dict(top.metrics))
                return CheckpointIndex(found.path, *facts, tensors)
        finally:
            store.close()
    raise InputError(
        f"no checkpoint at {address}", hint="is the address right? `allranks checkpoint ls STORE` lists them"
    )


def tensors_of(checkpoint: Opened) -> dict[str, TensorFacts]:
    """Every tensor by its name, sorted."""
    found: dict[str, TensorFacts] = {}
    for _, stored in checkpoint.shards():
        shard = stored.shard
        entry = found.setdefault(
            shard.name,
            {"dtype": shard.view or shard.dtype, "shape": list(shard.shape), "bytes": 0, "shards": 0},
        )
        entry["bytes"] += shard.bytes
        entry["shards"] += 1
    return dict(sorted(found.items()))


def goodput(*jobs: str, since: float = 0.0) -> JobAccount:
    """Where the time of a job went, from its ledger: `allranks.goodput("my-job").goodput` is the share of useful time.

    `jobs`: the name of a job that was run here, folders of incidents, or ledger files. Of several jobs the last one counts.
    `since`: epoch seconds.
    """
    return job_accounts([str(job) for job in jobs], since)[-1]


def job_accounts(jobs: Sequence[str], since: float = 0.0) -> list[JobAccount]:
    """The account of every job that is meant, one for each name; without one those in ./allranks-incidents."""
    from allranks.ledger.file import read_jobs
    from allranks.ledger.summary import account

    paths = [path for job in jobs or [INCIDENTS] for path in _ledgers_of(job)]
    found = [account(ledgers, since) for ledgers in read_jobs(paths).values()]
    if not any(one.ranks for one in found):
        raise InputError(
            f"no row of a ledger can be read in {', '.join(map(str, paths[:3]))}",
            hint="A ledger is JOB.NODE.ledger beside the incidents of a job; a job writes its first rows after a few seconds.",
        )
    return found


def _ledgers_of(word: str) -> list[Path]:
    """The ledgers of a file, a folder of incidents, or a job by its name."""
    from allranks.incidents.job_overview import find_job, read_job
    from allranks.ledger.file import find_ledgers

    path = Path(word)
    if path.is_file():
        return [path]
    found = (find_ledgers(path) if path.is_dir() else []) or find_ledgers(Path(INCIDENTS), word)
    if found or word == INCIDENTS:
        return found
    try:
        folder = find_job(word)
    except InputError:
        if not path.is_dir():
            raise
        folder = path
    facts = read_job(folder)
    job, incidents = facts.get("job"), facts.get("incidents")
    if not isinstance(job, str) or not isinstance(incidents, str):
        hint = "`allranks run` writes one next to the incidents of a job. Give that folder."
        raise InputError(f"there is no ledger in {folder}", hint=hint)
    return find_ledgers(Path(incidents), job)


@dataclass(frozen=True)
class RecordedJob:
    """A job that was recorded on this node."""

    name: str
    folder: Path  # of its black boxes; `allranks.diagnose(job.folder)` judges them
    ranks: int  # of this node
    running: bool


def jobs() -> list[RecordedJob]:
    """The jobs that this user recorded on this node, the newest first."""
    from allranks.incidents.job_overview import recorded_jobs
    from allranks.watch.samples import read_samples

    found = []
    for folder in recorded_jobs():
        samples = read_samples(folder)
        found.append(RecordedJob(folder.name, folder, len(samples), any(s.alive for s in samples)))
    return found


def status(job: str | Path | None = None) -> JobView:
    """The ranks of a job, by its name or folder: step, call, who waits for whom. Without one: the newest that runs."""
    from allranks.incidents.job_overview import Overview, find_job

    return Overview(find_job(None if job is None else str(job))).look()
