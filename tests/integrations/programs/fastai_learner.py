"""fastai: a Learner in its distrib_ctx."""

from functools import partial

import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.distributed import rank_distrib
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper

rows = [(torch.randn(8), torch.randn(1)) for _ in range(160)]
loaders = DataLoaders(DataLoader(rows, bs=4), DataLoader(rows[:16], bs=4))
learner = Learner(
    loaders,
    torch.nn.Linear(8, 1),
    loss_func=torch.nn.MSELoss(),
    opt_func=partial(OptimWrapper, opt=torch.optim.SGD),
)
with learner.distrib_ctx(in_notebook=False, cpu=True):
    learner.fit(1, 0.01)
print("trained", rank_distrib(), flush=True)
