"""SpeechBrain: its Brain, with its own DDP."""

import speechbrain
import torch
from speechbrain.utils.distributed import ddp_init_group


class Small(speechbrain.Brain):
    def compute_forward(self, batch: list[torch.Tensor], stage: object) -> torch.Tensor:
        out: torch.Tensor = self.modules.layer(batch[0])
        return out

    def compute_objectives(self, predictions: torch.Tensor, batch: object, stage: object) -> torch.Tensor:
        return predictions.pow(2).mean()


_, options, _ = speechbrain.parse_arguments(["none.yaml", "--device=cpu", "--distributed_backend=gloo"])
ddp_init_group(options)
brain = Small({"layer": torch.nn.Linear(8, 1)}, lambda some: torch.optim.SGD(some, lr=0.01), run_opts=options)
data = torch.utils.data.TensorDataset(torch.randn(160, 8))
brain.fit(range(1), data, train_loader_kwargs={"batch_size": 4}, progressbar=False)
print("trained", flush=True)
