"""Saves, crashes, clean-ups and restores at random over lists that lie: the rules of the store, in a model of its objects.

A file that is requested by its name is current. Lists show what they like: they may lack keys, or be of an earlier time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from allranks.checkpoint.manifest import MANIFEST, Manifest, Part, encode_manifest, part_name
from allranks.checkpoint.stores import Attempt, StoreSpec, checkpoint_name, step_in_name
from allranks.checkpoint.stores import keyed_store as keyed
from allranks.checkpoint.stores.keyed_store import KeyedStore
from allranks.checkpoint.stores.listing import list_checkpoints, prune

KEEP = 2
DAY_S = 24 * 3600.0
RANKS = 2


class Objects:
    """The objects of a bucket, by key."""

    def __init__(self) -> None:
        self.now = 0.0
        self.held: dict[str, tuple[bytes, int, float]] = {}  # data, version, time
        self.shown: dict[str, float] | None = None  # an earlier list, instead of the true one
        self.hidden: set[str] = set()
        self.versions = itertools.count(1)

    def put(self, key: str, pieces: Iterable[memoryview], length: int) -> None:
        data = b"".join(pieces)
        assert len(data) == length
        self.held[key] = data, next(self.versions), self.now

    def put_if(self, key: str, data: bytes, version: int | None) -> None:
        if (self.held[key][1] if key in self.held else None) != version:
            raise FileExistsError(key)
        self.put(key, [memoryview(data)], len(data))

    def get(self, key: str) -> tuple[bytes, int]:
        if key not in self.held:
            raise FileNotFoundError(key)
        return self.held[key][:2]

    def size(self, key: str) -> int:
        return len(self.get(key)[0])

    def keys(self, prefix: str) -> list[tuple[str, float]]:
        listed = {key: found[2] for key, found in self.held.items()} if self.shown is None else self.shown
        return [(key, at) for key, at in listed.items() if key.startswith(prefix) and key not in self.hidden]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.held.pop(key, None)


class ListMachine(RuleBasedStateMachine):
    """One training that saves and cleans up, and restores that anybody may make at any time."""

    events = 0  # of all machines

    def __init__(self) -> None:
        super().__init__()
        self.objects = Objects()
        self.store = KeyedStore(self.objects, StoreSpec("s3://bucket/run"), pointer=True)  # type: ignore[arg-type]
        self.step = 0
        self.attempts = itertools.count(1)
        self.committed: dict[int, set[str]] = {}  # the keys of every checkpoint that was not rightly removed

    def write(self) -> tuple[Attempt, set[str]]:
        ListMachine.events += 1
        attempt = Attempt(checkpoint_name(self.step), f"{next(self.attempts):012x}")
        files = [
            part_name(rank, suffix, attempt.token)
            for rank in range(RANKS)
            for suffix in ("safetensors", "json")
        ]
        for file in files:
            self.store.write(attempt, file, [memoryview(b"x")], 1)
        return attempt, {f"{attempt.name}/{file}" for file in files}

    @rule(again=some.booleans())
    def crash(self, again: bool) -> None:
        """A save that dies before its commit; the same step may be saved later."""
        self.step += not again or not self.step
        self.write()

    @rule(again=some.booleans())
    def save(self, again: bool) -> None:
        self.step += not again or not self.step
        attempt, keys = self.write()
        parts = tuple(
            Part(rank, part_name(rank, "json", attempt.token), 1, "0" * 64, 1) for rank in range(RANKS)
        )
        manifest = Manifest(self.step, 0, RANKS, self.objects.now, attempt.token, parts)
        self.store.commit(attempt, encode_manifest(manifest))
        self.committed[self.step] = {*keys, f"{attempt.name}/{MANIFEST}"}

    @rule()
    def clean_up(self) -> None:
        """As after a save: the newest stay. A list that is found to lie ends it."""
        ListMachine.events += 1
        try:
            removed, _ = prune(self.store, KEEP)
        except OSError:
            return
        for name in removed:
            self.committed.pop(step_in_name(name) or 0, None)

    @rule()
    def tidy(self) -> None:
        ListMachine.events += 1
        try:
            self.store.tidy()
        except OSError:
            return

    @rule(days=some.sampled_from((0.1, 1.0, 3.0)))
    def wait(self, days: float) -> None:
        self.objects.now += days * DAY_S
        self.objects.put("another.txt", [memoryview(b"")], 0)  # some other file, which shows what time it is

    @rule(kind=some.sampled_from(("true", "old", "manifests", "newest", "some")), seed=some.integers(0, 99))
    def change_list(self, kind: str, seed: int) -> None:
        """What lists show from now on."""
        objects, newest = self.objects, checkpoint_name(max(self.committed, default=0))
        objects.shown = None
        keys = sorted(objects.held)
        objects.hidden = {
            "manifests": {key for key in keys if key.endswith(MANIFEST)},
            "newest": {key for key in keys if key.startswith(newest)},
            "some": set(random.Random(seed).sample(keys, len(keys) // 2)),
        }.get(kind, set())
        if kind == "old":
            objects.shown = dict(objects.keys(""))

    @rule()
    def restore(self) -> None:
        """The newest checkpoint, or an error; never an older one."""
        ListMachine.events += 1
        try:
            found = [one.step for one in list_checkpoints(self.store) if not one.problem]
        except OSError:
            return
        assert max(found, default=0) == max(self.committed, default=0), "an older step is restored"

    @invariant()
    def newest_are_complete(self) -> None:
        for step in sorted(self.committed)[-KEEP:]:
            lost = self.committed[step] - self.objects.held.keys()
            assert not lost, f"a checkpoint that is kept has lost {lost}"


class Unread(ListMachine):
    """Nobody restores."""

    restore = None


def run(examples: int, soak: bool = False, machine: type[ListMachine] = ListMachine) -> None:
    limits = settings(
        max_examples=examples,
        deadline=None,
        stateful_step_count=50,
        derandomize=not soak,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)  # type: ignore[no-untyped-call]


def test_no_list_makes_a_checkpoint_disappear_or_an_older_one_the_newest() -> None:
    """A thousand events."""
    run(40)


@pytest.mark.soak
def test_lists_are_not_believed_in_a_hundred_thousand_events() -> None:
    """The same for long."""
    before = ListMachine.events
    while ListMachine.events - before < 100_000:
        run(500, soak=True)


def test_the_machine_finds_deletions_that_believe_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect A6: what a list shows without a manifest is deleted, without a look at the manifest itself."""
    monkeypatch.setattr(keyed, "check_list", lambda *_: None)
    with pytest.raises(AssertionError, match="has lost"):
        run(400, machine=Unread)


def test_the_machine_finds_restores_that_believe_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect A7: nothing but the list says which checkpoints there are."""
    monkeypatch.setattr(KeyedStore, "_known", lambda self: [])
    with pytest.raises(AssertionError, match="an older step is restored"):
        run(400)
