"""PyTorch-Ignite: an Engine with what its idist makes of model, optimizer and data."""

from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine


def training(local_rank: int, config: dict[str, Any]) -> None:
    model = idist.auto_model(torch.nn.Linear(8, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.01))
    data = idist.auto_dataloader(torch.utils.data.TensorDataset(torch.randn(320, 8)), batch_size=8)

    def update(_: Engine, batch: list[torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = model(batch[0]).pow(2).mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    Engine(update).run(data, max_epochs=2)
    print("trained", flush=True)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, {})
