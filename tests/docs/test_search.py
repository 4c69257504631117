"""Forty-four questions that users ask find their page first, by a search like the site's: words of sections, titles and boosts."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
LEAST = 42  # of 44
TITLE, SATURATION, TYPICAL = 8.0, 1.2, 120.0
STOP = frozenset(re.findall(r"\w+", "a an and are as at be by can do does for from how i in is it its me my of on or so that the this to use what when where which why will with"))  # fmt: skip

#: question -> pages that answer it
QUESTIONS: dict[str, tuple[str, ...]] = {
    "how do I install": ("index.md",),
    "which torch versions": ("compatibility.md", "index.md"),
    "macOS Windows": ("index.md",),
    "overhead of recording": ("performance.md",),
    "does it slow my training": ("understand/hangs.md", "performance.md"),
    "why does my job hang": ("tasks/hang_now.md",),
    "what does UNCLEAR mean": ("tasks/hang_now.md",),
    "attach without restart": ("tasks/hang_now.md",),
    "ptrace in docker container": ("tasks/hang_now.md",),
    "Kubernetes": ("tasks/clusters.md",),
    "Slurm several nodes": ("tasks/clusters.md",),
    "several nodes by hand": ("tasks/clusters.md",),
    "change the notice time": ("understand/hangs.md",),
    "switch actions off": ("understand/hangs.md",),
    "what does 90 % confidence mean": ("understand/verdicts.md",),
    "what is a black box": ("concepts.md",),
    "where are the black boxes": ("concepts.md",),
    "how large is a black box": ("concepts.md",),
    "FSDP2": ("tasks/libraries.md", "compatibility.md"),
    "tensor pipeline parallel": ("tasks/libraries.md",),
    "NCCL watchdog timeout": ("understand/verdicts.md",),
    "enable the flight recorder": ("tasks/dumps.md",),
    "which ports firewall": ("tasks/clusters.md",),
    "token TLS": ("security.md",),
    "checkpoint to S3": ("tasks/checkpoints.md",),
    "restore on other number of GPUs": ("tasks/checkpoints.md",),
    "torch.compile": ("tasks/libraries.md",),
    "Hugging Face Trainer": ("tasks/libraries.md",),
    "moving from torchft": ("understand/moving.md",),
    "exactly-once data": ("tasks/elastic.md",),
    "delete old checkpoints": ("tasks/checkpoints.md",),
    "uninstall clean up /dev/shm": ("index.md",),
    "slow rank straggler": ("understand/verdicts.md", "tasks/goodput.md"),
    "long evaluation false alarm": ("understand/hangs.md",),
    "silent data corruption": ("understand/replicas.md", "performance.md"),
    "vLLM sglang": ("tasks/serving.md",),
    "read dumps on a laptop": ("tasks/dumps.md",),
    "Perfetto": ("tasks/dumps.md",),
    "Slack": ("tasks/watch.md",),
    "Grafana": ("tasks/watch.md",),
    "W&B": ("tasks/watch.md",),
    "loss curve on the page": ("tasks/watch.md",),
    "step marks": ("tasks/python.md",),
    "what is a lighthouse": ("concepts.md",),
}


@dataclass(frozen=True)
class Section:
    """One heading and what stands under it; its page's boost counts."""

    page: str
    title: Counter[str]
    text: Counter[str]
    boost: float


def terms(text: str) -> list[str]:
    found = re.findall(r"[a-z0-9][a-z0-9&.'_-]*[a-z0-9]|[a-z0-9]", text.lower())
    return [word.rstrip("s") if len(word) > 3 else word for word in found if word not in STOP]


@cache
def sections() -> tuple[Section, ...]:
    """Of every page."""
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        text, boost = path.read_text(), 1.0
        if front := re.match(r"---\n(.*?)\n---\n", text, re.S):
            text, boost = text[front.end() :], float(front[1].rpartition("boost:")[2])
        text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
        for part in re.split(r"\n(?=#+ )", f"\n{text}"):
            title, _, body = part.strip().partition("\n")
            page = str(path.relative_to(DOCS))
            found.append(Section(page, Counter(terms(title)), Counter(terms(body)), boost))
    return tuple(found)


def ranked(question: str) -> list[str]:
    """Pages, the best section of each, best first."""
    every = sections()
    best: Counter[str] = Counter()
    wanted = terms(question)
    rarity = {
        term: math.log(1 + len(every) / (1 + sum(term in one.text or term in one.title for one in every)))
        for term in wanted
    }
    for one in every:
        length = SATURATION * (0.25 + 0.75 * sum(one.text.values()) / TYPICAL)
        score = sum(
            weight
            * (
                TITLE * bool(one.title[term]) / math.sqrt(len(one.title) or 1)
                + one.text[term] / (one.text[term] + length)
            )
            for term, weight in rarity.items()
        )
        best[one.page] = max(best[one.page], score * math.sqrt(one.boost))  # type: ignore[assignment]
    return [page for page, _ in best.most_common()]


def test_the_questions_of_users_find_their_page_first() -> None:
    assert len(QUESTIONS) == 44
    missed = {
        question: ranked(question)[:3]
        for question, pages in QUESTIONS.items()
        if ranked(question)[0] not in pages
    }
    assert len(QUESTIONS) - len(missed) >= LEAST, missed
    assert all(set(found) & set(QUESTIONS[question]) for question, found in missed.items()), missed


def test_tasks_come_before_generated_pages_in_the_search() -> None:
    boosts = {one.page: one.boost for one in sections()}
    assert all(boosts[page] >= 2 for page in boosts if page.startswith("tasks/"))
    generated = [
        page for page in boosts if page.startswith("reference/") and page != "reference/environment.md"
    ]
    assert len(generated) == 5 and all(boosts[page] < 0.5 for page in generated)
