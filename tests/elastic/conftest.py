"""Text, tokenizers and indexes for the tests of data."""

from __future__ import annotations

from pathlib import Path

import pytest

from .corpus import texts
from .worlds import sequence_index


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE tokenizer, trained here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(texts(500), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def imported() -> None:
    """What checkpoints, DDP and optimizers import on first use: once here, and forked ranks need not."""

    import allranks.checkpoint.manager  # noqa: F401


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """203 sequences of tokens."""
    return sequence_index(tmp_path_factory.mktemp("data"), 203)
