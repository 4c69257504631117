"""Which processes of this machine are ranks, and which belong to them. The choice is pure; `find_targets` reads.

A rank is known, best first, by its black box, by its environment (RANK, LOCAL_RANK, SLURM_PROCID) or by its
title. A forked DataLoader worker has the same environment as its rank: a descendant is a child, not a rank.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from allranks.blackbox.files import hint_at_other_users, job_folder
from allranks.errors import InputError
from allranks.stacktraces.boxes import LiveBox, find_boxes, read_box
from allranks.stacktraces.procfs import ProcessEntry, mapped_files, scan

#: Titles that are ranks. The first group that matches wins; coordinates are read from the rest of the title.
RANK_TITLES = (
    r"^sglang::scheduler",
    r"^VLLM::(Worker|EngineCore)",
    r"^vllm::(worker|engine)",
    r"^VllmWorker",
    r"^ray::\w*Worker",  # other actors of Ray serve, watch or clean up
    r"^TensorRT-?LLM::|^trtllm::",
    r"\b(pretrain_gpt|pretrain_bert|pretrain_t5|pretrain_vlm|megatron[\w/.-]*/pretrain\w*)\.py",
)
_TOOL = r"(py-spy|cuda-gdb|allranks(\.[\w.]+\.(liveness_proxy|spares|spare_process))?)(\s|$)"
#: Titles and command lines that are never ranks: they only pass requests on.
NOT_RANKS = (
    r"^sglang::(router|http_server|tokenizer|detokenizer|data_parallel_controller|multi_tokenizer)",
    r"^VLLM::(APIServer|DPCoordinator|Router)",
    r"sglang_router|launch_router|vllm[-_]router|nginx|envoy",
    # Tools, known by the program that runs; the same word in a path or an argument says nothing.
    rf"^(\S*/)?(python[\d.]*\s+(-\w+\s+)*(\S*/)?)?{_TOOL}",
    # The same below a folder whose name has a blank.
    rf"^/.+/python[\d.]*\s+(-\w+\s+)*(/((?!\s-|\.py\s).)*/bin/)?{_TOOL}",
)
#: Launchers: of another user's processes only the command line can be read.
_LAUNCHER = re.compile(
    r"\b(torchrun|torch\.distributed\.\w+|accelerate launch|deepspeed|allranks (run|watch))\b"
)
MAX_TITLE = 2000  # of any user's process
#: When nothing else is found.
FALLBACK = r"python.*sglang"
_COORDINATE = re.compile(
    r"[_:\s-](TP|PP|DP|EP|CP|SP|ETP|ATTN_TP|ATTN_DP|MOE_EP|MOE_DP)[_-]?(\d+)", re.IGNORECASE
)


def is_rank_title(title: str, patterns: tuple[str, ...] = RANK_TITLES) -> bool:
    """Whether a process of this title is a rank."""
    return any(re.search(one, title) for one in patterns) and not is_frontend(title)


def is_frontend(title: str) -> bool:
    """Whether a process of this title only passes requests on, or is a tool."""
    return any(re.search(one, title[:MAX_TITLE]) for one in NOT_RANKS)


def coordinates(title: str) -> tuple[tuple[str, int], ...]:
    """(("tp", 1), ("pp", 0)) from a title; () when there are none."""
    words = title.split(" ")[0] if "::" in title else ""
    return tuple((name.lower(), int(number)) for name, number in _COORDINATE.findall(words))


def number_ranks(coords: list[tuple[tuple[str, int], ...]]) -> list[int]:
    """A rank number for each set of coordinates: by (dp, pp, tp) where that is unique, else in sorted order."""
    rows = [dict(one) for one in coords]
    width = {name: max((row.get(name, 0) for row in rows), default=0) + 1 for name in ("tp", "pp", "dp")}
    numbers = [
        (row.get("dp", 0) * width["pp"] + row.get("pp", 0)) * width["tp"] + row.get("tp", 0) for row in rows
    ]
    if len(set(numbers)) == len(numbers) and all(rows):
        return numbers
    order = sorted(range(len(rows)), key=lambda i: (numbers[i], sorted(rows[i].items()), i))
    return [order.index(index) for index in range(len(rows))]


MAX_CHILDREN = 64
UNNAMED = "process-"  # begins the name of a job that its launcher does not name
_RANK_VARIABLES = ("ALLRANKS_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_JOB_VARIABLES = ("ALLRANKS_JOB_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_STEP = re.compile(r"^slurmstepd: \[(\d+)[.\]]")  # the title of the process that srun's tasks are started by


@dataclass(frozen=True)
class Selection:
    """What the user asked for; nothing: every rank of this node."""

    pids: tuple[int, ...] = ()
    name: str = ""
    job: str = ""
    titles: tuple[str, ...] = RANK_TITLES
    box_folders: tuple[Path, ...] = ()
    container: str = ""  # the name of a container of docker, podman or enroot: only its processes


@dataclass(frozen=True)
class Target:
    """A process to look at. `child` is None for the rank itself."""

    pid: int
    rank: int
    child: int | None = None
    start_ticks: int = 0
    title: str = ""
    box: Path | None = None
    world_size: int | None = None
    job: str = ""
    python: bool = True
    parallel: tuple[tuple[str, int], ...] = ()
    reason: str = ""  # how it was recognised
    environ: Mapping[str, str] = field(default_factory=dict)


def find_targets(selection: Selection) -> list[Target]:
    """The ranks and their children on this machine; InputError when there is none."""
    entries = scan()
    if selection.container:
        # knows the debuggers, and they the targets
        from allranks.stacktraces.containers import container_pids

        inside = container_pids(selection.container, [entry.pid for entry in entries])
        entries = [entry for entry in entries if entry.pid in inside]
    asked = [e for e in entries if not selection.pids or e.pid in selection.pids]
    named = {(Path(e.environ["ALLRANKS_DIR"]), e.uid) for e in asked if "ALLRANKS_DIR" in e.environ}
    boxes = find_boxes(selection.box_folders, named, {0, *(e.uid for e in asked)})
    boxes += _mapped_boxes(entries, selection, {box.path for box in boxes})
    targets = choose(entries, boxes, selection, own_pid=os.getpid())
    if not targets:
        raise InputError(_nothing(selection), hint=_hint(selection, entries))
    return targets


def find_jobs(selection: Selection) -> dict[str, list[Target]]:
    """The targets of every job on this machine, by the job's name; "" when there is one job, or processes were chosen."""
    targets = find_targets(selection)
    ranks = [target for target in targets if target.child is None]
    parents = {entry.pid: entry.ppid for entry in scan([target.pid for target in ranks])}
    jobs = split_jobs(ranks, parents)
    if len(jobs) < 2 or selection.pids or selection.name or selection.job:
        return {"": targets}
    return {job: find_targets(replace(selection, pids=tuple(pids))) for job, pids in sorted(jobs.items())}


def split_jobs(ranks: Iterable[Target], parents: Mapping[int, int]) -> dict[str, list[int]]:
    """The pids of ranks, by their job; `parents` are pid -> parent."""
    jobs: dict[str, list[int]] = {}
    for target in ranks:
        jobs.setdefault(name_job(target, parents.get(target.pid, 0)), []).append(target.pid)
    return jobs


def name_job(target: Target, parent: int) -> str:
    """By what the launcher calls it; a launcher that gives no name is known by its process."""
    for name in (target.job, target.environ.get("ALLRANKS_JOB_ID"), target.environ.get("SLURM_JOB_ID")):
        if name and name not in ("none", "defaultjob"):
            return name
    return f"{UNNAMED}{parent}"


def targets_of(pids: Mapping[int, int], box_folders: tuple[Path, ...] = ()) -> list[Target]:
    """Targets for ranks that the caller knows: rank -> pid. Children and black boxes are found as usual."""
    ranks = {pid: rank for rank, pid in pids.items()}
    chosen = find_targets(Selection(pids=tuple(ranks), box_folders=box_folders))
    owner = {target.rank: ranks[target.pid] for target in chosen if target.child is None}
    return [replace(target, rank=owner[target.rank]) for target in chosen]


_HINT = (
    "ranks are recognised by their black box (allranks.record()), by RANK in their environment, or by titles such\n"
    "as sglang::scheduler_TP0 and VLLM::Worker; another user's environment can be read by root only.\n"
    "Name them otherwise: allranks stacks --pid P, or --name 'python.*train'"
)


def _hint(selection: Selection, entries: Iterable[ProcessEntry]) -> str:
    """How else to find them. Root needs no hint at processes of other users: root sees them."""
    if selection.job and os.path.isdir(job_folder(selection.job)):  # False, too, where it cannot be looked at
        return f"Its ranks have ended; what they recorded: allranks diagnose {shlex.quote(selection.job)}"
    if selection.pids:
        return "Processes of a container have other numbers outside of it. `allranks stacks` without --pid finds the ranks."
    launchers = [e.uid for e in entries if e.uid >= 0 and _LAUNCHER.search(e.title[:MAX_TITLE])]
    return f"{_HINT}\n{hint_at_other_users(launchers if os.getuid() else ())}".strip()


def _nothing(selection: Selection) -> str:
    host = socket.gethostname()
    if selection.pids:
        several = len(selection.pids) > 1
        named = ", ".join(map(str, selection.pids))
        return f"{'processes' if several else 'process'} {named} {'do' if several else 'does'} not exist on {host}"
    if selection.name:
        return f"no process on {host} matches {selection.name!r}"
    if selection.job:
        return f"no rank of job {selection.job!r} on {host}"
    return f"no rank found on {host}"


def _mapped_boxes(entries: Iterable[ProcessEntry], selection: Selection, known: set[Path]) -> list[LiveBox]:
    """Boxes of chosen processes that lie elsewhere (another mount namespace, an own folder)."""
    found = []
    for entry in entries:
        if entry.python and (entry.pid in selection.pids or _env_rank(entry) is not None):
            for path in mapped_files(entry.pid, ".box"):
                box = read_box(path, entry.uid) if path not in known else None
                if box is not None:
                    found.append(box)
    return found


def choose(
    entries: Sequence[ProcessEntry], boxes: Sequence[LiveBox], selection: Selection, own_pid: int = 0
) -> list[Target]:
    """The targets among all processes: pure. The looking process and its ancestors are never targets."""
    unnamed = _unnamed_ranks(entries)
    entries = [_with_rank(entry, unnamed.get(entry.pid)) for entry in entries]
    by_pid = {entry.pid: entry for entry in entries}
    excluded = _ancestors(own_pid, by_pid) | {own_pid}
    boxed = _match_boxes(entries, boxes)
    candidates = [e for e in entries if e.state not in "ZX" or e.pid in selection.pids]
    launchers = _launchers(entries, boxed, unnamed)
    chosen = _chosen(candidates, boxed, selection, excluded | launchers)
    if asked := launchers & set(selection.pids):  # what they have started is meant
        below = [e for e in family(asked, entries) if e.state not in "ZX"]
        ranks_below = _chosen(below, boxed, replace(selection, pids=()), excluded | launchers)
        chosen = [*(e for e in chosen if e.pid not in asked), *ranks_below] if ranks_below else chosen
    pids, kept = {entry.pid for entry in chosen}, {*selection.pids, *unnamed}
    roots = [e for e in chosen if e.pid in kept or _is_root(e, _ancestors(e.pid, by_pid) & pids, by_pid)]
    ranks = _numbers(roots, boxed)
    others = {own_pid, *(entry.pid for entry in roots)}
    targets = []
    for entry in sorted(roots, key=lambda e: ranks[e.pid]):
        targets.append(make_target(entry, ranks[entry.pid], None, boxed.get(entry.pid)))
        mine = family([entry.pid], entries, lambda e: e.pid not in others and e.state not in "ZX")
        for number, child in enumerate(mine[:MAX_CHILDREN]):
            targets.append(make_target(child, ranks[entry.pid], number))
    return targets


def _is_root(entry: ProcessEntry, above: set[int], by_pid: Mapping[int, ProcessEntry]) -> bool:
    """Whether it is a rank of its own although others of the chosen are above it: an engine starts its workers, and each
    has its title; what a worker forks has the same one."""
    titles = {by_pid[pid].title for pid in above}
    return not above or (is_rank_title(entry.title) and entry.title not in titles)


def _chosen(
    entries: Sequence[ProcessEntry], boxed: Mapping[int, LiveBox], selection: Selection, excluded: set[int]
) -> list[ProcessEntry]:
    if selection.pids:
        return [e for e in entries if e.pid in selection.pids]
    by_pid = {entry.pid: entry for entry in entries}
    allowed = [e for e in entries if e.pid not in excluded]
    if selection.job:
        allowed = [e for e in allowed if selection.job in _jobs(e, boxed.get(e.pid), by_pid)]
    named = [e for e in allowed if e.title]
    if selection.name:
        pattern = _compile(selection.name)
        return [e for e in named if pattern.search(e.title) or pattern.search(e.comm)]
    found = _without_idle_ray([e for e in named if e.pid in boxed or _looks_like_rank(e, selection)], boxed)
    return found or [e for e in named if is_rank_title(e.title, (FALLBACK,))]


def _without_idle_ray(found: list[ProcessEntry], boxed: Mapping[int, LiveBox]) -> list[ProcessEntry]:
    """Where workers of Ray have black boxes, its other actors do not train."""
    if not any(_of_ray(e) and e.pid in boxed for e in found):
        return found
    return [e for e in found if e.pid in boxed or not _of_ray(e)]


def _of_ray(entry: ProcessEntry) -> bool:
    return entry.title.startswith("ray::") or "/ray/" in entry.title


def _looks_like_rank(entry: ProcessEntry, selection: Selection) -> bool:
    """By its title, or by a rank in its environment."""
    if is_rank_title(entry.title, selection.titles):
        return True
    return entry.python and _env_rank(entry) is not None and not is_frontend(entry.title)


def _compile(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise InputError(f"{expression!r} is not a regular expression: {error}") from error


def _jobs(entry: ProcessEntry, box: LiveBox | None, by_pid: Mapping[int, ProcessEntry]) -> set[str]:
    """The names of its job. A process that sets its title wipes its environment: the cgroup and what started it tell, too."""
    names = {entry.slurm_job, box.job if box is not None else ""}
    for one in (entry, *(by_pid[pid] for pid in _ancestors(entry.pid, by_pid) if pid in by_pid)):
        found = {one.environ.get(name, "") for name in _JOB_VARIABLES}
        step = _STEP.match(one.title)
        names |= {*found, step[1]} if step else found
    return names - {""}


def _match_boxes(entries: Sequence[ProcessEntry], boxes: Sequence[LiveBox]) -> dict[int, LiveBox]:
    """pid on this side -> its box. A reused pid is recognised by its start; the newest box of a process wins.

    Anybody can write a box that names the process of another user: it would be taken for a rank, and stopped by debuggers.
    """
    by_inner: dict[tuple[int, int], ProcessEntry] = {}
    for entry in entries:
        by_inner[(entry.inner_pid or entry.pid, entry.start_ticks)] = entry
        by_inner[(entry.pid, entry.start_ticks)] = entry
    found: dict[int, LiveBox] = {}
    for box in sorted(boxes, key=lambda one: one.start_s):
        owner = by_inner.get((box.pid, box.start_ticks))
        if owner is not None and box.uid in (None, 0, owner.uid):
            found[owner.pid] = box
    return found


def _env_rank(entry: ProcessEntry) -> int | None:
    """The rank that the environment names. Slurm's number is its task's: of an engine's worker it names the launcher."""
    titled = is_rank_title(entry.title)
    values = (entry.environ.get(n, "") for n in (*_RANK_VARIABLES, *(() if titled else ("SLURM_PROCID",))))
    return next((int(value) for value in values if value.isdigit()), None)


def _is_task(entry: ProcessEntry) -> bool:
    """Whether only Slurm's number says that it is a rank: it may be a launcher."""
    return not any(entry.environ.get(name, "").isdigit() for name in (*_RANK_VARIABLES, "LOCAL_RANK"))


def _unnamed_ranks(entries: Sequence[ProcessEntry]) -> dict[int, int]:
    """pid -> rank for launchers that set no RANK: Lightning's ddp and torch.multiprocessing.spawn.

    In Lightning the process that was typed is rank 0; it starts the others with LOCAL_RANK, from 1. spawn starts its
    processes in the order of their ranks; a data loader's workers are known by their name.
    """
    by_pid = {entry.pid: entry for entry in entries}
    groups: dict[int, list[ProcessEntry]] = {}
    for entry in entries:
        parent = by_pid.get(entry.ppid)
        alone = parent is not None and _is_task(parent)
        spawned = entry.spawned and entry.comm != "pt_data_worker" and _is_task(entry)
        lightning = _local_rank(entry) > 0 and _env_rank(entry) is None
        if alone and (lightning or spawned):
            groups.setdefault(entry.ppid, []).append(entry)
    return {pid: rank for parent, group in groups.items() for pid, rank in _ranks_of(parent, group).items()}


def _ranks_of(parent: int, group: list[ProcessEntry]) -> dict[int, int]:
    """pid -> rank of what one process has started, and of itself in Lightning; {} when the numbers do not fit."""
    local = {_local_rank(entry): entry.pid for entry in group if _local_rank(entry) > 0}
    if not local:
        task = group[0].environ.get("SLURM_PROCID", "")
        first = len(group) * (int(task) if task.isdigit() else 0)
        return {one.pid: rank for rank, one in enumerate(sorted(group, key=lambda e: e.pid), first)}
    if sorted(local) != list(range(1, len(local) + 1)):
        return {}
    node = group[0].environ.get("NODE_RANK", "")
    first = (len(local) + 1) * (int(node) if node.isdigit() else 0)
    return {parent: first, **{pid: first + rank for rank, pid in local.items()}}


def _with_rank(entry: ProcessEntry, rank: int | None) -> ProcessEntry:
    if rank is None:
        return entry
    return replace(entry, environ={"LOCAL_RANK": str(rank), **entry.environ, "RANK": str(rank)})


def _local_rank(entry: ProcessEntry) -> int:
    value = entry.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdigit() else -1


def _launchers(
    entries: Sequence[ProcessEntry], boxed: Mapping[int, LiveBox], unnamed: Mapping[int, int]
) -> set[int]:
    """Processes above ranks: torchrun in a Kubernetes pod has a RANK of its own (the node's), under srun a PROCID.

    Ranks have LOCAL_RANK, a title, a black box, or were spawned; a process above one that has nothing of that only
    starts them.
    """
    by_pid = {entry.pid: entry for entry in entries}
    ranks = {entry.pid for entry in entries if "LOCAL_RANK" in entry.environ} | {*boxed, *unnamed}
    ranks |= {entry.pid for entry in entries if is_rank_title(entry.title)}
    return {pid for rank in ranks for pid in _ancestors(rank, by_pid)} - ranks


def _ancestors(pid: int, by_pid: Mapping[int, ProcessEntry]) -> set[int]:
    found: set[int] = set()
    entry = by_pid.get(pid)
    while entry is not None and entry.ppid not in found and entry.ppid > 0:
        found.add(entry.ppid)
        entry = by_pid.get(entry.ppid)
    return found


def find_others(entries: Sequence[ProcessEntry], targets: Sequence[Target]) -> list[str]:
    """What runs beside the ranks of a server: its launcher, router, detokenizer, each with its pid. Pure."""
    by_pid = {entry.pid: entry for entry in entries}
    ranks = {target.pid for target in targets if target.child is None and is_rank_title(target.title)}
    parents = {by_pid[pid].ppid for pid in ranks if pid in by_pid} - {0, 1} - ranks
    launchers = {pid for pid in parents if pid in by_pid and by_pid[pid].python}
    known = {target.pid for target in targets}
    beside = [e for e in family(launchers, entries) if e.pid not in known and e.state not in "ZX"]
    lines = [f"launcher {by_pid[pid].title[:60]} (pid {pid})" for pid in sorted(launchers - known)]
    named = [(e.title.split(" ")[0] if "::" in e.title else e.title[:60], e) for e in beside if e.python]
    return [*lines, *(f"{title or e.comm} (pid {e.pid})" for title, e in named)][:MAX_CHILDREN]


def family(
    roots: Iterable[int],
    entries: Iterable[ProcessEntry],
    wanted: Callable[[ProcessEntry], bool] = lambda entry: True,
) -> list[ProcessEntry]:
    """Children of processes and theirs, as far as they are wanted; by pid."""
    children: dict[int, list[ProcessEntry]] = {}
    for entry in entries:
        children.setdefault(entry.ppid, []).append(entry)
    found: dict[int, ProcessEntry] = {}
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), []):
            if child.pid not in found and wanted(child):
                found[child.pid] = child
                todo.append(child.pid)
    return [found[pid] for pid in sorted(found)]


def _numbers(roots: Sequence[ProcessEntry], boxed: Mapping[int, LiveBox]) -> dict[int, int]:
    """A rank number for each process, unique on this node."""
    numbers: dict[int, int] = {}
    used: set[int] = set()
    unnamed: list[ProcessEntry] = []
    for entry in roots:
        box = boxed.get(entry.pid)
        rank = box.rank if box is not None and box.rank >= 0 else _env_rank(entry)
        if rank is None or rank in used:
            unnamed.append(entry)
        else:
            numbers[entry.pid] = rank
            used.add(rank)
    titled = [entry for entry in unnamed if coordinates(entry.title)]
    for entry, rank in zip(titled, number_ranks([coordinates(e.title) for e in titled]), strict=True):
        if rank not in used:
            numbers[entry.pid] = rank
            used.add(rank)
    free = (rank for rank in range(len(roots) + len(used) + 1) if rank not in used)
    for entry in unnamed:
        if entry.pid not in numbers:
            numbers[entry.pid] = next(free)
    return numbers


def make_target(entry: ProcessEntry, rank: int, child: int | None, box: LiveBox | None = None) -> Target:
    """The target for a process that is known to be a rank, or the child of one."""
    world = entry.environ.get("WORLD_SIZE", "")
    reason = "black box" if box else "RANK" if _env_rank(entry) is not None else "title"
    return Target(
        pid=entry.pid,
        rank=rank,
        child=child,
        start_ticks=entry.start_ticks,
        title=entry.title or f"[{entry.comm}]",
        box=box.path if box else None,
        world_size=box.world_size if box and box.world_size > 0 else int(world) if world.isdigit() else None,
        job=box.job if box else entry.environ.get("TORCHELASTIC_RUN_ID", ""),
        python=entry.python,
        parallel=coordinates(entry.title) if child is None else (),
        reason=reason if child is None else "child",
        environ=entry.environ,
    )
