"""Who waits for whom, drawn: one box for each role and line, an arrow to what it waits for. Plain SVG; pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from allranks.model.stacks import JobLook, ProcessFinding, Where

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
