"""The report as one HTML page that needs no network: verdict, table, foldable tree, flame graphs. Pure.

Titles, functions and paths come from other people's processes: everything is escaped, and nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from allranks.model.stacks import RankState, StacksReport
from allranks.stacks.rank_sets import compress
from allranks.stacks.tree import Node
from allranks.stacks.user_code import is_user_file, short_name

ROW = 20  # pixels of one level of a flame graph
MAX_BARS = 6000
OPEN_LEVELS = 60  # deeper branches start folded


def render_html(report: StacksReport, roots: Sequence[Node], title: str = "What every rank is doing") -> str:
    """The whole page."""
    culprits = frozenset(report.culprits)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">",
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *_verdict(report),
        *_table(report),
        "<h2>Tree of stacks</h2>",
        '<p class="soft">Outermost call first. A set of ranks stands where the paths part. '
        '<button data-fold="open">unfold all</button> <button data-fold="shut">fold all</button></p>',
        '<div class="tree scroll">',
        *(line for root in roots for line in _tree(root, culprits)),
        "</div>",
        "<h2>Flame graph</h2>",
        '<p class="soft">Width: in how many looks (ranks × snapshots) the frame was seen. Click to zoom.</p>',
        *(line for root in roots for line in _flame(root, culprits)),
        *_notes(report),
        f"<script>{_asset('page.js')}</script></body></html>",
    ]
    return "\n".join(parts)


def _asset(name: str) -> str:
    return resources.files("allranks.stacks").joinpath(name).read_text(encoding="utf-8")


def _verdict(report: StacksReport) -> Iterator[str]:
    word, look = {True: ("Hung", "hung"), False: ("Not hung", "moving"), None: ("Unclear", "")}[report.hung]
    yield f'<div class="verdict {look}" id="verdict"><b>{word}:</b> {escape(report.sentence)}'
    yield f"<br><small>{escape(report.reason)}</small></div>"
    for line in report.ras:
        yield f'<p class="soft">NCCL RAS: {escape(line)}</p>'


def _table(report: StacksReport) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[RankState]] = {}
    for state in report.ranks.values():
        groups.setdefault((state.cause, state.where, state.operation), []).append(state)
    ordered = sorted(groups.values(), key=lambda g: (g[0].rank not in report.culprits, g[0].rank))
    yield '<h2>Ranks</h2><div class="scroll"><table id="ranks"><thead><tr>'
    yield "<th>Ranks</th><th>Cause</th><th>Where</th><th>Evidence</th></tr></thead><tbody>"
    for states in ordered:
        first = states[0]
        bad = ' class="bad"' if first.rank in report.culprits else ""
        yield f"<tr{bad}>{_cells(compress(s.rank for s in states), first.cause, first.where, first.evidence)}</tr>"
        for child in first.children[:16]:
            yield f"<tr>{_cells(f'└ child {child.child}', child.cause, child.where, child.evidence)}</tr>"
    yield "</tbody></table></div>"


def _cells(*texts: str) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _role_name(role: str) -> str:
    return {"main": "main thread", "child": "main thread of child processes"}.get(role, role)


def _tree(root: Node, culprits: frozenset[int]) -> Iterator[str]:
    """Nested <details>, without recursion; chains without a fork stay in one block."""
    yield f"<details open><summary><b>{escape(_role_name(root.role))}</b> {_ranks(root, culprits)}</summary>"
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
            yield (
                '<div class="chain">' + "".join(f"<div>{_frame(node)}</div>" for node in chain[1:]) + "</div>"
            )
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
    yield f'<p class="soft">{escape(_role_name(root.role))}</p>'
    yield f'<div class="flame" style="height:{(deepest + 1) * ROW}px">'
    yield from bars
    yield "</div>"


def _bar(node: Node, x: float, width: float, depth: int, culprits: frozenset[int]) -> str:
    frame = node.frame
    text = (
        f"{short_name(frame.name)} ({frame.file.rsplit('/', 1)[-1]}:{frame.line})"
        if frame
        else _role_name(node.role)
    )
    look = (
        "bad"
        if culprits and set(node.ranks) <= culprits
        else ""
        if frame and is_user_file(frame.file)
        else "lib"
    )
    tip = f"{text} · ranks {compress(node.ranks)} · {node.looks} looks"
    return (
        f'<div class="{look}" title="{escape(tip)}" data-x="{x:.6f}" data-w="{width:.6f}" '
        f'style="left:{x * 100:.4f}%;width:{width * 100:.4f}%;top:{depth * ROW}px">{escape(text)}</div>'
    )


def _notes(report: StacksReport) -> Iterator[str]:
    if report.notes:
        yield "<h2>What could not be seen</h2><ul>"
        yield from (f"<li>{escape(note)}</li>" for note in report.notes[:200])
        yield "</ul>"
    yield "<footer>Written by allranks stacks. This file needs no network.</footer>"
