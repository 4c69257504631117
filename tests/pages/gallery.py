"""The pages of reports, of small and large jobs, and a browser that looks at them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from allranks.diagnosis import diagnose
from allranks.model.diagnosis import Action, Incident, Moment, RankNow
from allranks.model.stacks import RankState, StackFrame, StacksReport
from allranks.model.trace import CALL, Frame, Group, RankTrace, Shapes, State, TraceHeader
from allranks.report import html
from allranks.report.story import RankEvidence, chosen_ranks, rank_evidence, render_story
from allranks.stacktraces.html import render_html
from allranks.stacktraces.text import Node

CHROMIUM = "/usr/bin/chromium"
WIDTHS, SCHEMES = (400, 1000, 1600), ("light", "dark")
HERE = str(Path(__file__))


def make_traces(ranks: int, calls: int, stuck: int = 1, name: str = "all_reduce") -> list[RankTrace]:
    """A job in which one rank lacks in the last collective."""
    rows = np.zeros(calls, CALL)
    rows["begin"] = rows["end"] = np.arange(1, calls + 1)
    rows["created_ns"] = rows["started_ns"] = 1_700_000_000_000_000_000 + np.arange(calls) * 3_000_000
    rows["completed_ns"] = rows["created_ns"] + 1_000_000
    rows["seq"] = np.arange(1, calls + 1)
    rows["group"] = rows["op"] = rows["shapes"] = rows["stack"] = 1
    rows["peer"] = rows["root"] = -1
    rows["step"] = -1
    rows["state"] = State.COMPLETED
    shapes = (Shapes(), Shapes(((4,),), ((4,),), ("Float",), ("Float",)))
    stacks = ((), (Frame(name, "/lib/torch/c10d.py", 1), Frame("train", "/home/me/train.py", 44)))
    groups = (Group(""), Group("0", "default_pg", tuple(range(ranks)), "nccl"))
    found = []
    for rank in range(ranks):
        mine = rows.copy()
        mine["state"][-1], mine["completed_ns"][-1] = State.STARTED, 0
        if rank == stuck:
            mine = mine[:-1]
        header = TraceHeader(
            rank=rank,
            world_size=ranks,
            host=f"node{rank // 8}",
            job="llama-pretrain-42",
            versions=(("torch", "2.13.0"),),
        )
        found.append(RankTrace(header, mine, groups, ("", name), shapes, stacks))
    return found


def gallery(folder: Path, sizes: tuple[int, ...] = (3, 64, 1024)) -> list[Path]:
    """Every kind of report for jobs of these sizes."""
    found = []
    for ranks in sizes:
        pages = {"diagnose": diagnose_page(ranks), "stacks": stacks_page(ranks), "story": story_page(ranks)}
        for name, text in pages.items():
            found.append(folder / f"{name}-{ranks}.html")
            found[-1].write_text(text)
    return found


def _live(rank: int) -> RankNow:
    stack = (
        Frame("_worker_wait", "/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 1140),
        Frame("load_batch", HERE, 40),
    )
    return RankNow(
        rank,
        "dataloader_wait",
        "gallery.py:40 in load_batch",
        "its DataLoader worker 3 sleeps in prepare_augmented_example_with_padding",
        stack,
    )


def diagnose_page(ranks: int) -> str:
    """A rank that waits for its data while all others wait for it."""
    traces, stuck = make_traces(ranks, 60, ranks // 2), ranks // 2
    result = diagnose(traces, stacks=[_live(stuck)])
    long = "/mnt/shared-storage/experiments/2026-03-01/llama-pretrain-42/attempt-0/flight_recorder_dumps_of_all_ranks/trace_17.pickle"
    notes = tuple(replace(note, path=long) for note in result.files)
    return "".join(html.render(replace(result, files=notes), traces, 1.7e9))


def stacks_page(ranks: int) -> str:
    """One rank elsewhere, the others in a collective."""
    wait = StackFrame(
        "all_reduce", "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3020
    )
    own, load = (
        StackFrame("train_one_epoch_with_gradient_accumulation", "/home/me/train.py", 44),
        StackFrame("load_batch", HERE, 40),
    )
    states = {
        rank: RankState(
            rank,
            "collective_wait",
            "train.py:44 in train",
            "waits in all_reduce",
            operation="all_reduce",
            stack=(wait, own),
            host=f"node{rank // 8}",
        )
        for rank in range(ranks)
    }
    states[1] = RankState(
        1,
        "sleep",
        "gallery.py:40 in load_batch",
        "the main thread has slept in clock_nanosleep for 31 s",
        stack=(load, own),
        host="node0",
        pid=4711,
    )
    report = StacksReport(
        True,
        (1,),
        "rank 1 sleeps at gallery.py:40 in load_batch; the others wait for it",
        states,
        "no step for 31 s",
        ("rank 0: py-spy could not read the process",),
    )
    every, others = set(range(ranks)), set(range(ranks)) - {1}
    waits, loads = (Node(frame, "main", len(seen), seen) for frame, seen in ((wait, others), (load, {1})))
    trains = Node(own, "main", ranks, every, inside={wait: waits, load: loads})
    tree = Node(None, "main", ranks, every, inside={own: trains})
    return render_html(report, [tree], job="llama-pretrain-42", made_s=1.7e9)


def hang_incident(ranks: int) -> tuple[Incident, list[RankEvidence]]:
    """A hang that was recovered from, and what its ranks were doing."""
    traces, stuck = make_traces(ranks, 60, 1), 1
    verdict = diagnose(traces, stacks=[_live(stuck)]).verdict
    seen = {
        str(rank): {
            "cause": "collective_wait",
            "where": f"train.py:{44 + rank % 3} in train",
            "evidence": "waits in all_reduce",
            "stack": [
                f"torch/distributed/distributed_c10d.py:{3000 + rank % 3} in all_reduce",
                "train.py:44 in train",
            ],
        }
        for rank in range(ranks)
    }
    seen[str(stuck)] = {
        "cause": "dataloader_wait",
        "where": "gallery.py:40 in load_batch",
        "evidence": "its worker sleeps",
        "stack": ["gallery.py:40 in load_batch", "train.py:41 in train"],
    }
    begin = 1.7e9
    moments = (
        Moment("last good step", begin, "step 1,650"),
        Moment("overdue", begin + 5.4),
        Moment("noticed", begin + 5.9, "no step for 5.4 s"),
        Moment("evidence", begin + 7.2),
        Moment("action", begin + 7.4, "evict"),
        Moment("recovered", begin + 9.8),
    )
    incident = Incident(
        id="20260301-030000",
        kind="hang",
        job="llama-pretrain-42",
        opened=begin + 5.9,
        reason="no step for 5.4 s",
        node="node0",
        ranks=(stuck,),
        step=1650,
        verdict=verdict,
        stacks={"ranks": seen},
        action=Action(
            "evict",
            "rank 1 is stuck before the collective",
            (1,),
            0,
            done=True,
            result="replica-0 was evicted; elsewhere start with `allranks run --first-replica 4`, --no-lighthouse or allranks run --replicas 4",
        ),
        timeline=moments,
        closed=begin + 9.8,
        durations_s={"noticed": 5.9, "evidence": 1.3, "recovered": 2.4},
        folder="/var/tmp/allranks/llama-pretrain-42/incidents/20260301-030000",
    )
    chosen = chosen_ranks(incident)
    return incident, rank_evidence(incident, [trace for trace in traces if trace.header.rank in chosen])


def story_page(ranks: int) -> str:
    """The page of that incident, with everything opened."""
    incident, evidence = hang_incident(ranks)
    lines = ("rank 1 never entered all_reduce #60", "evidence", "  - ranks 0, 2 entered it")
    return render_story(incident, lines, evidence, make_traces(min(ranks, 8), 60, 1)).replace(
        "<details ", "<details open "
    )


@contextmanager
def running_browser(keep_child: set[int]) -> Iterator[Any]:
    """One browser for a file of tests; `keep_child` tells the leak check of its processes."""
    from playwright.sync_api import sync_playwright

    before = set(threading.enumerate())
    with sync_playwright() as play:
        running = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        for thread in set(threading.enumerate()) - before:
            thread.allranks_session = True  # type: ignore[attr-defined]
        tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
        keep_child.update(int(pid) for task in tasks for pid in (task / "children").read_text().split())
        yield running
        running.close()


class Visit:
    """A page with everything that went wrong on it."""

    def __init__(self, browser: Any, address: str, scheme: str = "light", width: int = 1300) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda message: self.errors.append(message.text) if message.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def flaws_everywhere(self, name: str) -> list[str]:
        """At every width, light and dark; where $ALLRANKS_SCREENSHOTS names a folder, with pictures (`make docs`)."""
        found, folder = [], os.environ.get("ALLRANKS_SCREENSHOTS")
        for width in WIDTHS:
            for scheme in SCHEMES:
                found += [f"{name} at {flaw}" for flaw in self.flaws(width, scheme)]
                if folder:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                    picture = self.page.screenshot(full_page=True, clip=self._top())
                    Path(folder, f"{name}-{width}-{scheme}.png").write_bytes(picture)
        return found

    def _top(self) -> dict[str, float]:
        """The upper part of the page: the whole of a short one, four screens of a long one."""
        tall = float(self.page.evaluate("document.documentElement.scrollHeight"))
        wide = float(self.page.evaluate("innerWidth"))
        return {"x": 0, "y": 0, "width": wide, "height": min(tall, 3600.0)}

    def flaws(self, width: int, scheme: str) -> list[str]:
        """What a designer would send back at this width and in these colours."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
        )
        found: list[str] = self.page.evaluate(LOOK)
        return [f"{width} px, {scheme}: {flaw}" for flaw in found]


#: Overflow, words that are cut, text too faint to read, labels over labels.
LOOK = r"""() => {
  const flaws = [], root = document.scrollingElement;
  if (root.scrollWidth > innerWidth) flaws.push(`overflow: ${root.scrollWidth} px`);
  const parse = (text) => { const n = text.match(/[\d.]+/g).map(Number); return [n[0], n[1], n[2], n.length > 3 ? n[3] : 1]; };
  const light = ([r, g, b]) => { const f = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }; return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const ground = (node) => { for (let n = node; n; n = n.parentElement) { const c = parse(getComputedStyle(n).backgroundColor); if (c[3] > 0.99) return c; } return matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1]; };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const holder = node.parentElement;
    if (!node.data.trim() || holder.closest("script, style, option, .thin") || !holder.checkVisibility({ contentVisibilityAuto: true, visibilityProperty: true })) continue;
    const style = getComputedStyle(holder), range = document.createRange();
    const a = light(parse(style.color)), b = light(ground(holder)), ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) flaws.push(`contrast ${ratio.toFixed(2)}: ${node.data.trim().slice(0, 40)}`);
    for (const word of node.data.matchAll(/(?<![\w-])--?[a-z][\w-]*|[\p{L}]{2,}/gu)) {
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].filter((r) => r.width > 0).map((r) => Math.round(r.top)));
      if (tops.size > 1) flaws.push(`cut word: ${word[0]}`);
    }
  }
  const canvas = document.querySelector("canvas[data-ticks]");
  if (canvas) {
    const ticks = JSON.parse(canvas.dataset.ticks), labels = JSON.parse(canvas.dataset.labels).sort((x, y) => x - y);
    if (new Set(ticks.map((t) => t[1])).size !== ticks.length) flaws.push(`ticks repeat: ${ticks.map((t) => t[1])}`);
    const pen = canvas.getContext("2d"), words = light(parse(canvas.dataset.words));
    for (const box of document.querySelectorAll("#legend i")) {
      const bar = light(parse(getComputedStyle(box).backgroundColor)), ratio = (Math.max(words, bar) + 0.05) / (Math.min(words, bar) + 0.05);
      if (ratio < 4.5) flaws.push(`contrast ${ratio.toFixed(2)} in bars: ${box.parentElement.textContent}`);
    }
    ticks.forEach((tick, i) => { if (i && ticks[i - 1][0] + pen.measureText(ticks[i - 1][1]).width > tick[0]) flaws.push(`ticks overlap at ${tick[1]}`); });
    labels.forEach((y, i) => { if (i && y - labels[i - 1] < 13) flaws.push("rank labels overlap"); });
  }
  return [...new Set(flaws)].slice(0, 20);
}"""
