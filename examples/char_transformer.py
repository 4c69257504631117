"""A real small model to watch: a character-level transformer learns the sentences of a village.

    python examples/char_transformer.py     # two replicas on this machine; kill one with `kill -9 PID`

It prints loss, who trains along and, now and then, a sentence of its own. Kill a replica while it runs: the
loss continues to fall, the replica is started again, takes the live weights, and trains along.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

STEPS = int(os.environ.get("STEPS", "400"))
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16


class CharTransformer(nn.Module):
    """Embeddings, some encoder layers with a causal mask, a head."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        hidden = self.letter(x) + self.place(torch.arange(length))
        return self.head(self.layers(hidden, mask=self.mask[:length, :length]))


def batch(text: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def sentence(model: nn.Module, letters: list[str], length: int = 60) -> str:
    said = [letters.index("T")]
    for _ in range(length):
        logits = model(torch.tensor([said[-CONTEXT:]]))[0, -1]
        said.append(int(torch.multinomial(torch.softmax(logits / 0.7, 0), 1)))
    return "".join(letters[letter] for letter in said).split("\n")[0]


def main() -> None:
    from allranks import DistributedDataParallel, Manager, Optimizer

    torch.set_num_threads(1)
    raw = (Path(__file__).parent / "char_transformer_text.txt").read_text()
    letters = sorted(set(raw))
    text = torch.tensor([letters.index(letter) for letter in raw])
    torch.manual_seed(0)
    model = CharTransformer(len(letters))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

    manager = Manager(state=[model, inner], min_replica_size=1)
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    number = int("".join(filter(str.isdigit, manager.replica_id())) or 0) % 1000
    print(f"{manager.replica_id()} is process {os.getpid()}", flush=True)
    began = time.monotonic()
    while manager.current_step() < STEPS:
        x, y = batch(text, seed=manager.current_step() * 1000 + number)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        step = manager.current_step()
        if step % 20 == 0:
            who = f"{manager.num_participants()} replicas, quorum {manager.quorum_id()}"
            print(
                f"{time.monotonic() - began:6.1f} s  step {step:4}  loss {loss.item():.3f}  {who}", flush=True
            )
        if step % 100 == 0 and manager.participating_rank() == 0:
            print(f"          says: {sentence(model, letters)}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    if not any(os.environ.get(name) for name in ("ALLRANKS_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE")):
        command = [sys.executable, "-m", "allranks", "run", "--replicas", "2", __file__]
        os.execv(sys.executable, command)
    main()
