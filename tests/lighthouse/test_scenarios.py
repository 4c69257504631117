"""Scenario files: what happens to a job, and every decision with its reason.

A file is a list of blocks: commands, a line `----`, the expected output, a blank line. After a change in the
rules run `ALLRANKS_REWRITE=1 pytest tests/lighthouse/test_scenarios.py` and review the diff.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from allranks.lighthouse.decide import Form, decide, find_wanted
from allranks.lighthouse.options import Options
from allranks.lighthouse.state import QuorumState
from allranks.model.cluster import Member, Quorum

FOLDER = Path(__file__).parent / "scenarios"


@dataclass
class Play:
    """Carries out the commands of one file."""

    state: QuorumState = field(default_factory=lambda: QuorumState(Options()))
    now: float = 0.0
    lives: dict[str, int] = field(default_factory=dict)
    reported: Quorum | None = None

    def run(self, line: str) -> list[str]:
        """One command; the lines it prints."""
        word, *rest = line.split()
        return getattr(self, f"do_{word}")(*rest) or []

    def do_options(self, *pairs: str) -> list[str]:
        values = dict(pair.split("=") for pair in pairs)
        kinds = {name: type(default) for name, default in vars(Options()).items()}
        self.state = QuorumState(Options(**{name: kinds[name](value) for name, value in values.items()}))
        return []

    def do_connect(self, *names: str) -> None:
        for name in names:
            self.state.connect(self.now, name, self._session(name))

    def do_observe(self, name: str) -> None:
        self.state.connect(self.now, name, self._session(name), observer=True)

    def do_ask(self, *words: str) -> list[str]:
        names = [word for word in words if "=" not in word]
        values = {key: int(value) for key, value in (word.split("=") for word in words if "=" in word)}
        for name in names:
            if name in self.state.evicted:
                return [f"refused: {name} is evicted: {self.state.evicted[name]}"]
            self.state.ask(
                self.now, name,
                Member(name, self._session(name), step=values.get("step", 0), shrink_only=bool(values.get("shrink")),
                       commit_failures=values.get("failed", 0)),
                values.get("patience", 0),
            )  # fmt: skip
        return []

    def do_withdraw(self, name: str) -> None:
        self.state.withdraw(name)

    def do_dies(self, *names: str) -> None:
        for name in names:
            self.state.lose(self.now, name, "connection closed", certain=True)

    def do_silent(self, *names: str) -> None:
        for name in names:
            self.state.lose(self.now, name, "nothing heard for 5.00 s", certain=False)

    def do_leaves(self, *names: str) -> None:
        for name in names:
            self.state.leave(self.now, name, "bye")

    def do_finishes(self, *words: str) -> None:
        step = next((int(word.removeprefix("step=")) for word in words if "=" in word), -1)
        for name in (word for word in words if "=" not in word):
            self.state.leave(self.now, name, "through", step)
            assert self.state.finish(self.now, name)

    def do_restarts(self, name: str) -> None:
        if name in self.state.replicas:
            self.state.lose(self.now, name, "restarted under the same name", certain=True)
        self.lives[name] = self.lives.get(name, 0) + 1
        self.state.connect(self.now, name, self._session(name))

    def do_evict(self, name: str) -> None:
        self.state.evict(name, "bad GPU")

    def do_let_in(self, name: str) -> None:
        self.state.let_in(name)

    def do_sleep(self, seconds: str) -> None:
        self.now += float(seconds)

    def do_lighthouse_starts(self, grace: str) -> None:
        """A new one that knows nothing of the one before."""
        self.reported, options = self.state.last, self.state.options
        self.state = QuorumState(options, settling_until=self.now + float(grace))

    def do_report(self) -> list[str]:
        """A member of the earlier lighthouse's quorum comes back and tells it."""
        assert self.reported is not None
        self.state.adopt(self.now, self.reported)
        return [f"took over quorum {self.reported.number}"]

    def do_lighthouse_restarts(self) -> list[str]:
        last, options = self.state.last, self.state.options
        assert last is not None
        self.state = QuorumState(options)
        expected = self.state.adopt(self.now, last)
        return [f"took over quorum {last.number}, expecting {' '.join(expected)}"]

    def do_wanted(self) -> list[str]:
        return [find_wanted(self.now, self.state, self.state.options) or "no"]

    def do_decide(self) -> list[str]:
        self.state.advance(self.now)
        decision, reason = decide(self.now, self.state, self.state.options)
        if not isinstance(decision, Form):
            until = "" if decision.until is None else f" (again at {decision.until:g})"
            refused = f", refuses {' '.join(decision.refused)}" if decision.refused else ""
            return [f"wait, {decision.rule}{until}{refused}: {reason}"]
        quorum = self.state.next_quorum(decision.members, decision.spares, reason)
        self.state.form(quorum)
        return self._shown(quorum, decision.rule)

    def _shown(self, quorum: Quorum, rule: str) -> list[str]:
        lines = [f"quorum {quorum.number} of epoch {quorum.epoch}, {rule}: {' '.join(quorum.names)}"]
        lines.append(f"  {quorum.reason}")
        if quorum.spares:
            lines.append(f"  spares: {' '.join(quorum.spares)}")
        return lines

    def _session(self, name: str) -> str:
        return f"{name}.{self.lives.get(name, 0)}"


def _blocks(text: str) -> list[tuple[list[str], list[str]]]:
    blocks = []
    for chunk in text.strip().split("\n\n"):
        lines = chunk.splitlines()
        cut = lines.index("----")
        blocks.append((lines[:cut], lines[cut + 1 :]))
    return blocks


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_every_decision_of_a_scenario_is_as_written(path: Path) -> None:
    """Same events, same decisions, same reasons."""
    play, written, happened = Play(), [], []
    for commands, expected in _blocks(path.read_text()):
        output = [line for command in commands if not command.startswith("#") for line in play.run(command)]
        written.append("\n".join([*commands, "----", *expected]))
        happened.append("\n".join([*commands, "----", *output]))
    if os.environ.get("ALLRANKS_REWRITE"):
        path.write_text("\n\n".join(happened) + "\n")
    assert happened == written or os.environ.get("ALLRANKS_REWRITE")


def test_there_are_scenarios() -> None:
    """An empty folder must not look like success."""
    assert len(list(FOLDER.glob("*.txt"))) >= 10
