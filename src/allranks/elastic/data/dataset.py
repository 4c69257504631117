"""Sources of samples: sequences of a token index, or the items of any dataset. Runs in ranks and DataLoader workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from allranks.elastic.batches import StateDict, even
from allranks.elastic.data.order import Ids, Mixture, Order, WorldHistory
from allranks.elastic.index.file import TokenIndexFile
from allranks.elastic.world import world_of
from allranks.errors import DataLoadingError

#: Tensors by name, or the collated items of a user's dataset.
Batch: TypeAlias = dict[str, Any]


class Items(Protocol):
    """A map-style dataset of the user."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


@dataclass(frozen=True)
class TokenSamples:
    """A token index split into sequences; a sample has `seq_length` + 1 tokens, because labels are shifted by one."""

    index: TokenIndexFile
    seq_length: int

    def __len__(self) -> int:
        return max(0, (self.index.total_tokens - 1) // self.seq_length)

    @property
    def fingerprint(self) -> str:
        return self.index.fingerprint

    @property
    def name(self) -> str:
        return str(self.index.path)

    def read(self, ids: Ids, out: Ids) -> None:
        """Copies the samples into the rows of `out`."""
        tokens, length = self.index.tokens, self.seq_length
        for row, start in enumerate((ids * length).tolist()):
            out[row] = tokens[start : start + length + 1]


@dataclass(frozen=True)
class ItemSamples:
    """Any dataset with `len` and `[]`."""

    items: Items

    def __len__(self) -> int:
        return len(self.items)

    @property
    def fingerprint(self) -> str:
        return f"{type(self.items).__qualname__}-{len(self):x}"

    @property
    def name(self) -> str:
        return type(self.items).__qualname__


def as_samples(
    one: str | Path | TokenIndexFile | Items, seq_length: int, data_files: Sequence[str] | None = None
) -> TokenSamples | ItemSamples:
    """Wraps an index, the path of one, or a dataset with `len` and `[]`."""
    if isinstance(one, (str, Path)) and data_files and not Path(one).exists():
        files = " ".join(map(str, data_files))
        hint = f"build it first: allranks index build {files} -o {one} --tokenizer tokenizer.json"
        raise DataLoadingError("Token index file not found", str(data_files[0]), hint=hint)
    opened = TokenIndexFile(one) if isinstance(one, (str, Path)) else one
    if not isinstance(opened, TokenIndexFile):
        if not len(opened):
            raise DataLoadingError("the dataset is empty", type(opened).__qualname__)
        return ItemSamples(opened)
    source = TokenSamples(opened, seq_length)
    if not len(source):
        raise DataLoadingError(
            f"the index has {opened.total_tokens} tokens, but a sample needs {seq_length + 1}",
            str(opened.path),
        )
    return source


STATE_VERSION = 1


@dataclass
class DatasetState:
    """The position as elastic_harness stores it; allranks uses the `state_dict` of dataset or loader."""

    total_tokens_processed: int = 0
    current_file_index: int = 0
    current_byte_offset: int = 0
    world_size_at_checkpoint: int = 1
    epoch: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_dict(values: StateDict) -> DatasetState:
        known = {key: int(values[key]) for key in asdict(DatasetState()) if key in values}
        return DatasetState(**known)


@dataclass
class ResumableDataset:
    """Samples of one or several token indexes (with weights), and the position of this job in them.

    Any dataset with `len` and `[]` works as well; its items are collated by torch. `epochs` None: infinite. `data_files`
    appear in messages only; `tokenizer` is accepted and ignored. `step` counts optimizer steps; `history` holds the shares
    of each world.
    """

    index_file: Any  # an index, its path, any dataset, or a list of them
    seq_length: int = 1024
    seed: int = 0
    shuffle: bool = True
    epochs: int | None = None
    weights: Sequence[float] | None = None
    batch_size: int = 1
    rank: int | None = None
    world_size: int | None = None
    data_files: Sequence[str] | None = None
    tokenizer: object = None
    step: int = 0
    history: WorldHistory = field(default_factory=WorldHistory)

    def __post_init__(self) -> None:
        self.sources = [
            as_samples(one, self.seq_length, self.data_files)
            for one in (self.index_file if isinstance(self.index_file, (list, tuple)) else [self.index_file])
        ]
        self._tokens = all(isinstance(source, TokenSamples) for source in self.sources)
        self._bases = np.cumsum([0, *map(len, self.sources)])
        self.order = self._make_order()
        rank, world = world_of(self.rank, self.world_size)
        self.rank = rank
        if not self.history.segments:
            self.history = self.history.change(0, (self.batch_size,) * world)

    def _make_order(self) -> Order | Mixture:
        if len(self.sources) == 1 and self.weights is None:
            return Order(len(self.sources[0]), self.seed, self.shuffle)
        sizes = tuple(map(len, self.sources))
        return Mixture(sizes, tuple(self.weights or sizes), self.seed, self.shuffle)

    def __len__(self) -> int:
        """Samples per epoch."""
        return self.order.size

    def __getitem__(self, number: int) -> Any:
        """One sample by its id: input_ids and labels, each of seq_length."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        if not self._tokens:
            return self._item(number)
        batch = self.fetch(np.array([number], dtype=np.int64))
        return {key: value[0] for key, value in batch.items()}

    def _item(self, number: int) -> Any:
        owner = int(np.searchsorted(self._bases, number, side="right")) - 1
        source = self.sources[owner]
        assert isinstance(source, ItemSamples)
        return source.items[number - int(self._bases[owner])]

    @property
    def total_tokens(self) -> int:
        return sum(source.index.total_tokens for source in self.sources if isinstance(source, TokenSamples))

    @property
    def total_positions(self) -> int | None:
        """Number of positions in the order; None: infinite."""
        return None if self.epochs is None else self.epochs * len(self)

    @property
    def position(self) -> int:
        """Samples taken by all ranks before the current step."""
        total = self.total_positions
        return total if total is not None and self.finished else self.history.position(self.step)

    @property
    def epoch(self) -> int:
        return self.order.epoch(self.position)

    @property
    def finished(self) -> bool:
        return self.ends_before(self.step)

    def ends_before(self, step: int) -> bool:
        """Whether a finite order has no samples left for a step."""
        if self.total_positions is None:
            return False
        left = self.total_positions - self.history.position(step)
        if left <= 0 or step == 0:
            return left <= 0
        return left < len(self.history.at(step - 1).shares)  # the previous step took such a small remainder

    def shares(self, step: int) -> tuple[int, ...]:
        """Samples of each rank in a step.

        The last step of a finite order distributes the remainder evenly; a remainder with less than one sample per rank is
        added to the previous step. (A rank gets no sample only if the world has just grown beyond the remainder.)
        """
        segment = self.history.at(step)
        if self.total_positions is None:
            return segment.shares
        world, left = len(segment.shares), self.total_positions - self.history.position(step)
        if self.ends_before(step):
            return (0,) * world
        if left >= segment.per_step + world or left == segment.per_step:
            return segment.shares
        return even(left, world)

    def samples(self, step: int, rank: int | None = None) -> Ids:
        """The sample ids of one rank (None: of all ranks, in order) in a step."""
        shares = self.shares(step)
        start = self.history.position(step)
        if rank is None:
            return self.order.ids(start, sum(shares))
        return self.order.ids(start + sum(shares[:rank]), shares[rank])

    def fetch(self, ids: Ids) -> Batch:
        import torch

        if not self._tokens:
            from torch.utils.data import default_collate

            return default_collate([self._item(number) for number in ids.tolist()]) if len(ids) else {}
        rows = np.empty((len(ids), self.seq_length + 1), dtype=np.int64)
        owners = np.searchsorted(self._bases, ids, side="right") - 1 if len(self.sources) > 1 else None
        for i, source in enumerate(self.sources):
            assert isinstance(source, TokenSamples)
            if owners is None:
                source.read(ids, rows)
                break
            here = np.nonzero(owners == i)[0]
            part = np.empty((len(here), self.seq_length + 1), dtype=np.int64)
            source.read(ids[here] - self._bases[i], part)
            rows[here] = part
        tensor = torch.from_numpy(rows)
        return {"input_ids": tensor[:, :-1], "labels": tensor[:, 1:]}

    def __iter__(self) -> Iterator[Batch]:
        """This rank's samples from the current step on; `step` advances with the last sample of a step."""
        while not self.finished:
            mine = self.samples(self.step, self.rank).tolist()
            if not mine:
                self.step += 1
            for i, number in enumerate(mine):
                sample = self[number]
                if i == len(mine) - 1:
                    self.step += 1
                yield sample

    def set_epoch(self, epoch: int) -> None:
        """Moves to the first step that begins in an epoch."""
        segment = self.history.at(self.step)
        missing = epoch * len(self) - segment.position
        self.step = segment.first_step + max(0, -(-missing // segment.per_step))

    def change_world(self, shares: Sequence[int], rank: int) -> None:
        """Distributes the order over the ranks of a new world from the current step on."""
        self.history = self.history.change(self.step, shares)
        self.rank = rank

    def seek(self, step: int) -> None:
        """Moves to a step; an earlier step is taken by the current world."""
        shares = self.history.at(self.step).shares
        back = step < self.step
        self.step = step
        if back:
            self.history = self.history.change(step, shares)

    def state_dict(self) -> StateDict:
        """Plain values, sufficient to continue in any world."""
        position = self.position
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "weights": list(self.weights) if self.weights is not None else None,
            "step": self.step,
            "position": position,
            "epoch": self.order.epoch(position),
            "seq_length": self.seq_length,
            "num_samples": len(self),
            "fingerprint": "+".join(source.fingerprint for source in self.sources),
            "total_tokens_processed": position * self.seq_length,
            "world_size": len(self.history.at(self.step).shares),
            "history": self.history.to_list(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continues from a state, with its seed and shuffle, in the world of this process.

        A state of elastic_harness (`total_tokens_processed`, `epoch`) gives the position only.
        """
        shares = self.history.at(self.step).shares
        if "history" not in state:
            whole = int(state.get("epoch", 0)) * self.total_tokens
            tokens = int(state.get("total_tokens_processed", 0)) + whole
            samples = -(-tokens // self.seq_length)
            self.step = -(-samples // sum(shares))
            self.history = WorldHistory().change(0, shares)
            return
        self._check(state)
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self.weights = state["weights"]
        self.order = self._make_order()
        self.step = int(state["step"])
        self.history = WorldHistory.from_list(list(state["history"])).change(self.step, shares)
        if self.position != int(state["position"]):
            raise DataLoadingError(
                f"the data state is inconsistent: position {state['position']}, but its history gives {self.position}"
            )

    def _check(self, state: StateDict) -> None:
        ours = self.state_dict()
        if state.get("version") != STATE_VERSION:
            raise DataLoadingError(f"the data state has version {state.get('version')}, not {STATE_VERSION}")
        for key, what in (("fingerprint", "other data"), ("seq_length", "another sequence length")):
            if state[key] != ours[key]:
                raise DataLoadingError(
                    f"the state belongs to {what} ({state[key]}, here {ours[key]}): samples would be lost or repeated",
                    self.sources[0].name,
                    hint="use the same index and seq_length as before, or restart the data without this state",
                )
