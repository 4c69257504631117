"""MMEngine: its Runner with a model of three lines."""

import sys

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, *inputs: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
        return {"loss": self.layer(torch.stack(inputs)).pow(2).mean()}


rows = [torch.randn(8) for _ in range(160)]
loader = {
    "batch_size": 4,
    "sampler": {"type": "DefaultSampler", "shuffle": True},
    "dataset": rows,
    "num_workers": 0,
}
gloo = {"dist_cfg": {"backend": "gloo"}}
Runner(
    Net(), sys.argv[1], train_dataloader=loader, train_cfg={"by_epoch": True, "max_epochs": 1}, launcher="pytorch",
    optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.01}}, env_cfg=gloo,
).train()  # fmt: skip
print("trained", flush=True)
