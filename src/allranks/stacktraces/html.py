"""The report as one HTML page that needs no network: verdict, table, foldable tree, flame graphs,
and who waits for whom as a drawing. Pure.

Titles, functions and paths come from other people's processes: everything is escaped, and nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from allranks import pages
from allranks.model.stack_advice import LOOK_FOR
from allranks.model.stacks import (
    JobLook,
    Process,
    ProcessFinding,
    RankState,
    StacksReport,
    ThreadLook,
    Where,
    is_user_file,
)
from allranks.pages import Row, StackCard, frame_lines, read_source
from allranks.stacktraces.text import Node, compress, role_name, same_states
from allranks.stacktraces.views import short_name

ROW = 20  # pixels of one level of a flame graph
MAX_BARS = 6000
OPEN_LEVELS = 60  # deeper branches start folded
THIN = 0.012  # share of the width below which a bar has no text


def render_html(report: StacksReport, roots: Sequence[Node], *, job: str = "", made_s: float = 0.0) -> str:
    """The whole page."""
    from markupsafe import Markup

    culprits = frozenset(report.culprits)
    levels = {True: ("Stuck", "bad"), False: ("Moving", "good"), None: ("Unclear", "warn")}
    status, level = levels[report.hung]
    hosts = list(dict.fromkeys(state.host for state in report.ranks.values() if state.host))
    host = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
    first = [report.ranks[rank] for rank in report.culprits[:4] if rank in report.ranks]
    return pages.render(
        "stacks.html",
        scripts=("stacks.js",),
        title=f"{status}: {report.sentence}"[:160],
        kind="Stacks",
        level=level,
        status=status,
        headline=pages.upper(report.sentence),
        reason=report.reason if report.reason not in report.sentence else "",
        about=pages.About(job, host, made_s=made_s, facts=(("Ranks", f"{len(report.ranks):,}"),)).rows(),
        advice=[
            f"at {s.where} (rank {s.rank}): {LOOK_FOR.get(s.cause, 'check this line')}"
            for s in first
            if s.where
        ],
        commands=[],
        guilty_title=f"The guilty rank{'s' if len(report.culprits) > 1 else ''}",
        guilty_stacks=[_card(state) for state in first if state.stack],
        ras=report.ras,
        ranks=list(_rows(report)),
        tree=Markup("\n".join(line for root in roots for line in _tree(root, culprits))),
        flames=Markup("\n".join(line for root in roots for line in _flame(root, culprits))),
        notes=report.notes[:200],
    )


def render_processes(look: JobLook, finding: ProcessFinding, made_s: float = 0.0) -> str:
    """The page of a job of several roles."""
    from markupsafe import Markup

    level = {"stuck": "bad", "moving": "good", "unclear": "warn"}[finding.state]
    guilty = {(one.node, one.pid, one.line) for one in finding.guilty}
    threads = [(p, t) for p in look.processes for t in p.threads]
    blamed = [(p, t) for p, t in threads if (p.node, p.pid, t.user.line if t.user else 0) in guilty]
    accused = {(node, pid) for node, pid, _ in guilty}
    nodes = ", ".join(dict.fromkeys(p.node for p in look.processes))
    return pages.render(
        "processes.html",
        title=f"{finding.state.capitalize()}: {finding.sentence}"[:160],
        kind="Stacks",
        level=level,
        status=finding.state.capitalize(),
        headline=pages.upper(finding.sentence),
        reason=finding.reason,
        about=pages.About(
            "", nodes, made_s=made_s, facts=(("Processes", f"{len(look.processes):,}"),)
        ).rows(),
        guilty_stacks=[_thread_card(p, t) for p, t in blamed[:8]],
        chain=[
            Row((one.role, ", ".join(map(str, one.pids)), one.waits_for, one.at)) for one in finding.chain
        ],
        picture=Markup(draw(look, finding)),
        processes=[_process_row(p, p.where in accused) for p in look.processes if not p.ours],
        notes=look.notes[:200],
    )


def _thread_card(process: Process, thread: ThreadLook) -> StackCard:
    lines = frame_lines((short_name(f.name), f.file, f.line) for f in thread.frames)
    title = f"{process.name}, process {process.pid}, {'task' if thread.task else 'thread'} {thread.name}"
    return StackCard(title, "live stack", "bad", lines, True, thread.wait.says, read_source(lines))


def _process_row(process: Process, guilty: bool) -> Row:
    return Row((process.name, str(process.pid), *process.does), "bad" if guilty else "")


def _spaced(cause: str) -> str:
    return cause.replace("_", " ")


def _card(state: RankState) -> StackCard:
    lines = frame_lines((short_name(f.name), f.file, f.line) for f in state.stack)
    thread = f", thread {state.thread}" if state.thread else ""
    pid = f", process {state.pid}" if state.pid else ""
    title = f"Rank {state.rank}{pid}{thread}"
    return StackCard(title, "live stack", "bad", lines, True, state.evidence, read_source(lines))


def _rows(report: StacksReport) -> Iterator[Row]:
    for states in same_states(report):
        first, ranks = states[0], compress(s.rank for s in states)
        level = "bad" if first.rank in report.culprits else ""
        yield Row((ranks, _spaced(first.cause), first.where, first.evidence), level)
        for child in first.children[:16]:
            yield Row((f"└ child {child.child}", _spaced(child.cause), child.where, child.evidence))


def _tree(root: Node, culprits: frozenset[int]) -> Iterator[str]:
    """Nested <details>, without recursion; chains without a fork stay in one block."""
    yield f"<details open><summary><b>{escape(role_name(root.role))}</b> {_ranks(root, culprits)}</summary>"
    todo: list[Node | str] = ["</details>", *reversed(root.children)]
    depth = 0
    while todo:
        one = todo.pop()
        if isinstance(one, str):
            depth -= 1
            yield one
            continue
        chain = [one]
        while len(chain[-1].children) == 1 and chain[-1].children[0].ranks == one.ranks:
            chain.append(chain[-1].children[0])
        depth += 1
        open_ = " open" if depth <= OPEN_LEVELS else ""
        yield f"<details{open_}><summary>{_ranks(one, culprits)} {_frame(one)}</summary>"
        if len(chain) > 1:
            inner = "".join(f"<div>{_frame(node)}</div>" for node in chain[1:])
            yield f'<div class="chain">{inner}</div>'
        todo.append("</details>")
        todo.extend(reversed(chain[-1].children))


def _ranks(node: Node, culprits: frozenset[int]) -> str:
    bad = " bad" if culprits and set(node.ranks) <= culprits else ""
    return f'<span class="ranks{bad}">{escape(compress(node.ranks))}</span>'


def _frame(node: Node) -> str:
    frame = node.frame
    if frame is None:
        return "?"
    look = "" if is_user_file(frame.file) else ' class="lib"'
    line = f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}"
    source = f" <code>{escape(frame.source)}</code>" if frame.source else ""
    return f'<span{look} title="{escape(frame.file)}">{escape(short_name(frame.name))} ({escape(line)})</span>{source}'


def _flame(root: Node, culprits: frozenset[int]) -> Iterator[str]:
    """One bar for each node: x and width are shares of all looks, y is the depth."""
    bars: list[str] = []
    deepest = 0
    todo: list[tuple[Node, float, int]] = [(root, 0.0, 0)]
    total = max(1, root.looks)
    while todo and len(bars) < MAX_BARS:
        node, x, depth = todo.pop()
        bars.append(_bar(node, x, node.looks / total, depth, culprits))
        deepest = max(deepest, depth)
        for child in node.children:
            todo.append((child, x, depth + 1))
            x += child.looks / total
    yield f"<h3>{escape(role_name(root.role)).capitalize()}</h3>"
    yield f'<div class="flame" style="height:{(deepest + 1) * ROW}px">'
    yield from bars
    yield "</div>"


def _bar(node: Node, x: float, width: float, depth: int, culprits: frozenset[int]) -> str:
    frame, text = node.frame, role_name(node.role)
    if frame:
        text = f"{short_name(frame.name)} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})"
    look = "" if frame and is_user_file(frame.file) else "lib"
    if culprits and set(node.ranks) <= culprits:
        look = "bad"
    tip = f"{text} · ranks {compress(node.ranks)} · {node.looks} samples"
    thin = " thin" if width < THIN else ""
    return (
        f'<div class="{look}{thin}" title="{escape(tip)}" data-x="{x:.6f}" data-w="{width:.6f}" '
        f'style="left:{x * 100:.4f}%;width:{width * 100:.4f}%;top:{depth * ROW}px">{escape(text)}</div>'
    )


WIDTH, HEIGHT, GAP_X, GAP_Y = 230, 46, 90, 16
MAX_BOXES, MAX_TEXT = 40, 34


def draw(look: JobLook, finding: ProcessFinding) -> str:
    """The picture; "" where nobody waits for another process."""
    processes = {p.where: p for p in look.processes}
    guilty = {(g.node, g.pid) for g in finding.guilty}
    held = {
        (g.node, g.pid): f"{g.file.rsplit('/', 1)[-1]}:{g.line} in {g.function}"
        for g in finding.guilty
        if g.file
    }
    edges = [(a, b) for a, b in finding.edges if a in processes and b in processes]
    levels = _levels(edges, guilty or {b for _, b in edges})
    boxes: dict[tuple[int, str, str, bool], list[Where]] = {}
    for where, level in levels.items():
        one = processes[where]
        line = held.get(where) or one.does[1] or one.ended
        boxes.setdefault((level, one.role, line, where in guilty), []).append(where)
    if len(levels) < 2 or len(boxes) > MAX_BOXES:
        return ""
    columns: dict[int, int] = {}
    places: dict[Where, tuple[int, int]] = {}
    shapes = []
    for (level, role, line, bad), members in boxes.items():
        row = columns[level] = columns.get(level, -1) + 1
        x, y = 10 + level * (WIDTH + GAP_X), 10 + row * (HEIGHT + GAP_Y)
        places |= dict.fromkeys(members, (x, y))
        name = processes[members[0]].name if len(members) == 1 else f"{role} ×{len(members)}"
        shapes.append(_box(x, y, name, line, bad))
    lines = dict.fromkeys((places[a], places[b]) for a, b in edges if a in places and b in places)
    width = 20 + (max(levels.values()) + 1) * (WIDTH + GAP_X) - GAP_X
    height = 20 + (max(columns.values()) + 1) * (HEIGHT + GAP_Y) - GAP_Y
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor"/></marker>'
    return (
        f'<svg id="waits" role="img" aria-label="who waits for whom" viewBox="0 0 {width} {height}" style="max-width:{width}px;width:100%">'
        f"<defs>{tip}</defs>{''.join(_arrow(*pair) for pair in lines if pair[0] != pair[1])}{''.join(shapes)}</svg>"
    )


def _levels(edges: Sequence[tuple[Where, Where]], first: set[Where]) -> dict[Where, int]:
    """How many waits each process is away from those that must move first."""
    levels = dict.fromkeys(sorted(first), 0)
    todo = [*levels]
    while todo:
        here = todo.pop(0)
        for a, b in edges:
            if b == here and a not in levels:
                levels[a] = levels[here] + 1
                todo.append(a)
    return levels


def _box(x: int, y: int, name: str, line: str, bad: bool) -> str:
    frame = "var(--bad, #b00)" if bad else "currentColor"
    texts = f'<text x="{x + 10}" y="{y + 19}" font-weight="600">{escape(name[:MAX_TEXT])}</text>'
    texts += f'<text x="{x + 10}" y="{y + 36}" opacity=".7">{escape(line[:MAX_TEXT])}</text>'
    return (
        f'<g font-size="13" fill="currentColor"><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="none" '
        f'stroke="{frame}" stroke-width="{2 if bad else 1}"/>{texts}</g>'
    )


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """From the one that waits to the one that it waits for; those of one column are joined by a bow at their right."""
    (x, y), (to_x, to_y) = start, end
    middle, to_middle = y + HEIGHT // 2, to_y + HEIGHT // 2
    if x == to_x:
        path = f"M{x + WIDTH} {middle} C{x + WIDTH + 60} {middle} {x + WIDTH + 60} {to_middle} {x + WIDTH} {to_middle}"
    else:
        left, right = (x, to_x + WIDTH) if x > to_x else (x + WIDTH, to_x)
        path = f"M{left} {middle} L{right} {to_middle}"
    return f'<path d="{path}" fill="none" stroke="currentColor" opacity=".6" marker-end="url(#tip)"/>'
