"""States taken apart into tensors and JSON, and put together again."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.checkpoint.checksum import best_algorithm, checksum, new_hasher
from allranks.checkpoint.manifest import Shard, lay_out
from allranks.checkpoint.tensors import Unstorable, flatten, memory_of, tensor_names, unflatten

_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
)
_keys = st.text(max_size=6) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text(max_size=3))
_states = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(_keys, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(_states)
@settings(max_examples=300)
def test_any_plain_state_survives_the_way_through_json(state: object) -> None:
    """Types and values come back equal after a real JSON round trip."""
    flat = flatten(state)
    again = unflatten(json.loads(json.dumps(flat.skeleton, allow_nan=False)), flat.tensors)
    assert again == state
    assert type(again) is type(state)


def test_tensors_leave_by_the_path_they_had() -> None:
    """Names are dotted paths, so that plain safetensors tools show something readable."""
    state = {"model": OrderedDict(w=torch.ones(2)), "optim": {"state": {0: {"step": torch.tensor(3.0)}}}}
    flat = flatten(state)
    assert list(flat.tensors) == ["model.w", "optim.state.0.step"]
    assert tensor_names(flat.skeleton) == ["model.w", "optim.state.0.step"]
    assert unflatten(flat.skeleton, flat.tensors)["optim"]["state"][0]["step"] == 3.0


@pytest.mark.parametrize("skeleton", [5, "text", None, {}, [], [[3]]])
def test_a_skeleton_without_tensors_names_none(skeleton: object) -> None:
    """Also one that no state of ours would have."""
    assert tensor_names(skeleton) == []


def test_two_paths_that_read_the_same_keep_two_tensors() -> None:
    """The key "a.b" and the path a → b do not overwrite each other."""
    flat = flatten({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    again = unflatten(flat.skeleton, flat.tensors)
    assert again["a.b"].item() == 0 and again["a"]["b"].item() == 1


def test_random_states_of_python_and_numpy_come_back_usable() -> None:
    """The generators accept what comes back and go on with the same numbers."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    flat = flatten(state)
    expected = random.random(), np.random.rand(), torch.rand(1)
    again = unflatten(json.loads(json.dumps(flat.skeleton)), flat.tensors)
    random.setstate(again["python"])
    np.random.set_state(again["numpy"])
    torch.set_rng_state(again["torch"])
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_odd_scalars_keep_their_type() -> None:
    """dtype, device, size, numpy scalars and non-finite floats are typed in JSON."""
    state = [
        torch.bfloat16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        np.float32(1.5),
        np.int64(7),
        math.inf,
        {1},
    ]
    flat = flatten(state)
    again = unflatten(json.loads(json.dumps(flat.skeleton, allow_nan=False)), {})
    assert again == state and [type(a) for a in again] == [type(a) for a in state]
    assert math.isnan(unflatten(flatten(math.nan).skeleton, {}))


def test_what_json_cannot_hold_is_refused_with_its_path() -> None:
    """Functions and objects are not pickled behind the user's back."""
    with pytest.raises(Unstorable, match=r"type builtins\.function at 'scheduler\.lr_lambdas\.0'"):
        flatten({"scheduler": {"lr_lambdas": [lambda step: step]}})


def test_the_layout_is_a_safetensors_file_with_aligned_tensors() -> None:
    """safetensors itself parses our image; every tensor starts at a multiple of its element size."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {
        "b": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "a": torch.randn(5),
        "c": torch.randn(3).double(),
    }
    names = {torch.uint8: "U8", torch.float32: "F32", torch.float64: "F64"}
    layout = lay_out(
        [Shard(k, names[t.dtype], tuple(t.shape), (0,), tuple(t.shape), t.nbytes) for k, t in tensors.items()]
    )
    image = bytearray(layout.bytes)
    image[: len(layout.header)] = layout.header
    for placed in layout.placed:
        assert placed.start % tensors[placed.shard.name].element_size() == 0
        image[placed.start : placed.start + placed.shard.bytes] = memory_of(tensors[placed.shard.name])
    loaded = safetensors.load(bytes(image))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert (8 + int.from_bytes(image[:8], "little")) % 4096 == 0


def test_a_checksum_is_the_same_in_pieces_and_at_once() -> None:
    """Hashing by pieces is only a way to free the GIL."""
    data = bytes(range(256)) * 40_000
    for algorithm in ("crc32", "sha256", best_algorithm()):
        hasher = new_hasher(algorithm)
        hasher.update(data)
        assert hasher.hexdigest() == checksum(memoryview(data), algorithm)
    assert checksum(b"a", "crc32") != checksum(b"b", "crc32")
