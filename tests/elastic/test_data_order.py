"""The same order on every machine for ever, with no permutation in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.elastic.data import Mixture, Order
from allranks.elastic.data.order import permuted
from allranks.errors import ConfigurationError


@settings(max_examples=150)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_a_shuffle_is_a_bijection(size: int, key: int) -> None:
    """Every sample once, for any size and key."""
    positions = np.arange(size, dtype=np.int64)
    found = permuted(size, [key], np.zeros_like(positions), positions)
    assert np.array_equal(np.sort(found), np.arange(size))


def test_a_shuffle_of_a_trillion_needs_no_memory_and_spreads() -> None:
    """NodeMonitor land far apart, evenly over the range, and differently in each epoch."""
    size = 10**12 + 39
    order = Order(size, seed=7)
    first, second = order.ids(0, 20_000), order.ids(size, 20_000)
    assert len(set(first.tolist())) == 20_000 and first.min() >= 0 and first.max() < size
    buckets = np.bincount(first * 20 // size, minlength=20)
    assert buckets.min() > 800 and buckets.max() < 1200  # 1000 expected, 6 standard deviations
    steps = np.abs(np.diff(first)) / size
    assert 0.31 < steps.mean() < 0.36  # a third for independent places
    assert (first == second).mean() < 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_the_order_is_the_same_on_every_machine_and_for_ever() -> None:
    """Golden values: a change here would silently reshuffle every running job."""
    assert Order(1000, seed=3).ids(0, 8).tolist() == GOLDEN_ORDER
    assert Mixture((100, 50), (3.0, 1.0), seed=3).ids(0, 8).tolist() == GOLDEN_MIXTURE


GOLDEN_ORDER = [219, 988, 962, 494, 132, 87, 368, 229]


GOLDEN_MIXTURE = [83, 39, 12, 62, 52, 113, 131, 53]


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(0, 50), st.integers(0, 40_000), st.integers(0, 9000))
def test_any_window_of_the_order_equals_its_parts(size: int, seed: int, start: int, count: int) -> None:
    """Random access gives what a walk from the beginning gives, across blocks and epochs."""
    window = Order(size, seed).ids(start, count)
    direct = Order(size, seed).at(np.arange(start, start + count, dtype=np.int64))
    assert np.array_equal(window, direct)


def test_without_shuffle_the_order_is_that_of_the_files() -> None:
    """0, 1, 2, ... and again."""
    assert Order(3, shuffle=False).ids(0, 7).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_mixture_meets_its_weights_in_every_block_and_sees_each_source_once_per_pass() -> None:
    """3 to 1 exactly; each source's own epochs are complete before they repeat."""
    mixture = Mixture((9000, 1000), (0.75, 0.25), seed=5)
    ids = mixture.ids(0, 8192 * 3)
    for block in range(3):
        part = ids[block * 8192 : (block + 1) * 8192]
        assert (part < 9000).sum() == 6144
    big = ids[ids < 9000]
    assert len(set(big[:9000].tolist())) == 9000 and len(set(big[9000:18_000].tolist())) == 9000
    small = ids[ids >= 9000] - 9000
    for turn in range(6):
        assert len(set(small[turn * 1000 : (turn + 1) * 1000].tolist())) == 1000
    assert mixture.passes(8192 * 3) == [2, 6]
    assert np.array_equal(mixture.ids(5000, 9000), ids[5000:14_000])


def test_wrong_weights_are_refused() -> None:
    """Counts and signs are checked."""
    with pytest.raises(ConfigurationError, match="2 sources but 1 weights"):
        Mixture((1, 2), (1.0,))
    with pytest.raises(ConfigurationError, match="must be positive"):
        Mixture((1, 2), (1.0, 0.0))
