"""The demo's training script: a small character-level transformer, in replicas with a Manager.

The global batch is a pure function of the step and is divided among the participating replicas, with shares weighted by size.
So every step sees the same samples whatever happens to replicas, and the loss curve equals the undisturbed one up to the order
of floating-point sums.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
from pathlib import Path

import torch
from torch import nn

from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.manager import Manager
from allranks.manager.optimizer import Optimizer

CONTEXT, WIDTH, BATCH = 32, 64, 12
State = dict[str, dict[str, object]]


def shipped_text() -> str:
    """A generated text with structure to learn: sums in words."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = [f"{words[a]} and {words[b]} make {a + b}." for a in range(11) for b in range(11)]
    return " ".join(lines)


class CharModel(nn.Module):
    """Two transformer layers over characters."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the next character."""
        hidden = self.body(self.embed(x) + self.place, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Text:
    """Samples of the text by step: a pure function of the step."""

    def __init__(self) -> None:
        text = shipped_text()
        letters = sorted(set(text))
        self.vocabulary = len(letters)
        self.codes = torch.tensor([letters.index(c) for c in text])

    def starts(self, step: int) -> list[int]:
        """Where the samples of a step's global batch begin."""
        dice = torch.Generator().manual_seed(1000 + step)
        found: list[int] = torch.randint(len(self.codes) - CONTEXT - 1, (BATCH,), generator=dice).tolist()
        return found

    def load_batch(self, starts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.stack([self.codes[s : s + CONTEXT] for s in starts])
        y = torch.stack([self.codes[s + 1 : s + 1 + CONTEXT] for s in starts])
        return x, y


def train_step(
    manager: Manager, model: nn.Module, optimizer: Optimizer, text: Text
) -> tuple[int, float] | None:
    """One step on this replica's share; returns its number and the global loss if it was committed with this replica."""
    optimizer.zero_grad()
    step, count, index = manager.current_step(), manager.num_participants(), manager.participating_rank()
    mine = text.starts(step)[index::count] if index is not None else text.starts(step)[:1]
    x, y = text.load_batch(mine)
    loss_sum = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    share = loss_sum / (BATCH * CONTEXT) * count  # gradients are averaged over `count` replicas
    share.backward()
    total = share.detach().clone()
    manager.allreduce(total).wait()
    if (manager.num_participants(), manager.participating_rank()) != (count, index):
        manager.report_error(RuntimeError("the members changed during the step: its batch is divided again"))
    committed = optimizer.step()
    return (step, float(total)) if committed and index is not None else None


def digest(model: nn.Module) -> str:
    seen = hashlib.sha256()
    for value in model.state_dict().values():
        seen.update(value.detach().cpu().contiguous().numpy().tobytes())
    return seen.hexdigest()[:16]


def report(step: int, loss: float, model: nn.Module) -> None:
    """Reports a committed step to the drill, if there is one."""
    if os.environ.get("ALLRANKS_DRILL"):
        from allranks.drill.preload import tell

        tell(at_step=step, digest=digest(model), loss=loss)


def reference_losses(steps: int) -> list[float]:
    """The undisturbed run: the same steps in one process, without a manager."""
    torch.manual_seed(0)
    text = Text()
    model = CharModel(text.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        x, y = text.load_batch(text.starts(step))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def last_step(limit: int, out: Path) -> int:
    """--steps, or the step in the file `stop_at`, which is written well ahead so that all replicas read it."""
    try:
        return min(limit, int((out / "stop_at").read_text()))
    except (OSError, ValueError):
        return limit


def main() -> None:
    """Trains to --steps; each replica reports its losses."""
    args = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # sums in another order differ by only 1e-16
    if args.reference:
        (args.out / "reference.json").write_text(json.dumps(reference_losses(args.steps)))
    else:
        train(args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--pace-s", type=float, default=0.0, help="least time of a step, so that people can watch"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--reference", action="store_true", help="the undisturbed run, in this process alone")
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """One replica, from its first to the last step."""
    torch.manual_seed(0)
    text = Text()
    plain = CharModel(text.vocabulary)
    inner = torch.optim.AdamW(plain.parameters(), lr=3e-3)

    def load(state: State) -> None:
        plain.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save() -> State:
        return {"model": plain.state_dict(), "optimizer": inner.state_dict()}

    manager = Manager(load_state_dict=load, state_dict=save, min_replica_size=args.min_replicas)
    model, optimizer = DistributedDataParallel(manager, plain), Optimizer(manager, inner)
    while manager.current_step() < last_step(args.steps, args.out):
        begin = time.monotonic()
        done = train_step(manager, model, optimizer, text)
        if done is not None:
            step, loss = done
            report(step, loss, plain)
            if step % 10 == 0:
                print(f"step {step}: loss {loss:.4f}, {manager.num_participants()} replicas", flush=True)
        time.sleep(max(0.0, args.pace_s - (time.monotonic() - begin)))
    manager.shutdown()


if __name__ == "__main__":
    main()
