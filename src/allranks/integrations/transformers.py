"""Hugging Face's Trainer: step marks for the black box, and replicas that survive each other's failures.

    from allranks.integrations.transformers import AllranksCallback        # Trainer(callbacks=[AllranksCallback()])
    from allranks.integrations.transformers import FaultTolerantTrainer    # instead of Trainer

Runs in a rank. A FaultTolerantTrainer is a replica of one rank under `allranks run --replicas N`. Gradients are averaged over the
present replicas, and a step counts when all of them commit it. A replica that heals takes model, optimizer, scheduler, trainer
state and its position in the data from another replica.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sized
from typing import TypedDict

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from allranks import recording as record
from allranks.errors import ConfigurationError
from allranks.integrations import Silences
from allranks.integrations.replica_sampler import ReplicaSampler, replica_number
from allranks.manager.ddp import DistributedDataParallel
from allranks.manager.groups.group import ProcessGroupGloo, ReconfigurableGroup
from allranks.manager.groups.nccl import ProcessGroupNCCL
from allranks.manager.manager import Manager
from allranks.manager.optimizer import OptimizerWrapper

_OWN = frozenset(
    {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "trial_name", "trial_params"}
)
Batches = tuple[
    list[dict[str, torch.Tensor]], torch.Tensor | int | None
]  # of a step, and their number of items
_PAUSE_S = 1800.0  # for an evaluation or a save
_NEVER_ENDING = 1 << 20  # epochs: training ends by its number of steps


class _ReplicaState(TypedDict):
    """The state that a healing replica takes from another one."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, object]
    scheduler: dict[str, object]
    trainer: str  # the TrainerState as JSON
    callbacks: list[dict[str, object]]  # of each stateful callback, in order


class AllranksCallback(TrainerCallback):
    """Marks every step, and announces evaluation and saving as pauses of up to `pause_s` seconds.

    With `include_num_input_tokens_seen` in the training arguments, a mark has the tokens of the previous step.
    """

    def __init__(self, pause_s: float = _PAUSE_S) -> None:
        self._silences = Silences(pause_s)
        self._seen = 0  # tokens of all ranks

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self._seen = state.num_input_tokens_seen  # from a checkpoint

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: object, **_: object
    ) -> None:
        self._silences.end()
        tokens, self._seen = state.num_input_tokens_seen - self._seen, state.num_input_tokens_seen
        record.step(state.global_step, tokens=tokens / args.world_size if tokens > 0 else None)

    def on_step_end(self, args: object, state: object, control: TrainerControl, **_: object) -> None:
        if control.should_evaluate or control.should_save:
            self._silences.begin("evaluate" if control.should_evaluate else "save")

    on_epoch_end = on_step_end

    def on_train_end(self, *_: object, **__: object) -> None:
        self._silences.end()
        record.announce("after training", up_to_s=self._silences.up_to_s)


class CommittedOptimizer(OptimizerWrapper):
    """Steps when all replicas commit. The state is final after the scheduler's step, which the Trainer makes later."""

    committed = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def step(self, closure: object = None) -> bool:
        self.committed = self.manager.should_commit()
        if self.committed:
            self.optim.step()
        return self.committed


class _Steps(TrainerCallback):
    """Begins and ends the manager's steps. Must be the first callback, so that the others see correct counts."""

    def __init__(self, trainer: FaultTolerantTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if state.global_step:  # resumed from a checkpoint
            self.trainer.manager.load_state_dict({"step": state.global_step, "batches_committed": 0})
        state.num_train_epochs = self.trainer.epochs

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.trainer.manager.start_quorum()

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        # makes the Trainer skip the scheduler too
        self.trainer.optimizer._is_overflow = not self.trainer.committing.committed

    def on_step_end(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        state.global_step = self.trainer.manager.current_step()
        state.epoch = state.global_step / self.trainer.steps_per_epoch
        self.trainer.manager.step_applied()


class FaultTolerantTrainer(Trainer):
    """A Trainer that is one replica. At least `min_replica_size` replicas must take part in a step.

    Only the first participating replica saves. Data with a length is divided among the replicas; a dataset without a length must
    divide itself (REPLICA_GROUP_ID, NUM_REPLICA_GROUPS).
    """

    _first = True  # this is the first participating replica, which saves

    def __init__(
        self, *args: object, manager: Manager | None = None, min_replica_size: int = 1, **named: object
    ) -> None:
        super().__init__(*args, **named)
        if self.accelerator.scaler is not None:
            raise ConfigurationError(
                "FaultTolerantTrainer does not support fp16=True: the scaler unscales gradients before the replicas vote, so "
                "a replica that joins in that step would apply them with its old scale",
                hint="use bf16=True, which needs no loss scaling",
            )
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ConfigurationError(
                f"FaultTolerantTrainer is a replica of one rank, not of {max(self.args.world_size, self.args.n_gpu)}",
                hint="start with `allranks run --replicas N SCRIPT`, and one visible GPU per replica",
            )
        self.manager = manager or Manager(pg=self._group(), min_replica_size=min_replica_size)
        self.manager.register_state_dict_fn("trainer", self._load_replica_state, self._replica_state)
        self.steps_per_epoch = self.epochs = 1
        self._received = self._stale = 0  # batches of this pass: used; read before a jump
        self._batches: Batches | None = None  # of the last step, which is retried if it was not committed
        self._sampler: ReplicaSampler | None = None
        self.callback_handler.callbacks.insert(0, _Steps(self))

    def train(self, *args: object, **named: object) -> TrainOutput:
        """Trains as the Trainer does, then leaves the other replicas."""
        try:
            return super().train(*args, **named)
        finally:
            self._first = self.is_world_process_zero()
            self.manager.shutdown()

    # ---- overridden methods of the Trainer ----

    def create_optimizer(self, *args: object, **named: object) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **named)
        if not isinstance(optimizer, CommittedOptimizer):
            self.committing = self.optimizer = CommittedOptimizer(self.manager, optimizer)
        return self.optimizer

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: DataLoader[object] | None = None
    ) -> nn.Module:
        if not training or isinstance(model, DistributedDataParallel):
            return super()._wrap_model(model, training, dataloader) if not training else model
        prepared = self.accelerator.prepare_model(model, evaluation_mode=True)  # autocast, without DDP
        return DistributedDataParallel(self.manager, prepared)

    def training_step(self, model: nn.Module, *args: object, **named: object) -> torch.Tensor:
        if self.accelerator.sync_gradients:
            return super().training_step(model, *args, **named)
        with model.no_sync():
            return super().training_step(model, *args, **named)

    def set_initial_training_values(self, *args: object, **named: object) -> tuple[int, ...]:
        epochs, self.steps_per_epoch, *rest = super().set_initial_training_values(*args, **named)
        self.epochs = epochs
        return (epochs + _NEVER_ENDING, self.steps_per_epoch, *rest)

    def _get_train_sampler(self, train_dataset: Sized | None = None) -> Sampler[int] | None:
        usual = super()._get_train_sampler(train_dataset)
        dataset: Sized = self.train_dataset if train_dataset is None else train_dataset
        if usual is None:
            return None
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        shuffle = not isinstance(usual, SequentialSampler)
        self.args.ignore_data_skip = True  # a resumed training finds its position by the step
        place = replica_number()
        self._sampler = ReplicaSampler(len(dataset), *place, seed=seed, shuffle=shuffle, on_pass=self._pass)
        return self._sampler

    def get_batch_samples(
        self, epoch_iterator: Iterator[object], num_batches: int, *args: object, **named: object
    ) -> Batches:
        if self._batches is not None and not self.committing.committed:
            return self._batches
        while self._stale > 0 and next(epoch_iterator, None) is not None:
            self._stale -= 1
            self._received += 1
        self._batches = super().get_batch_samples(epoch_iterator, num_batches, *args, **named)
        self._received += len(self._batches[0])
        return self._batches

    def is_world_process_zero(self) -> bool:
        """Whether this replica saves and reports."""
        manager = getattr(self, "manager", None)  # called in the constructor, too
        if manager is not None and manager.quorum_id():
            self._first = manager.participating_rank() == 0
        return bool(super().is_world_process_zero()) and self._first

    def save_model(self, *args: object, **named: object) -> None:
        if self.is_world_process_zero():
            super().save_model(*args, **named)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        if self.is_world_process_zero():
            with record.expect("save", up_to_s=_PAUSE_S):
                super()._save_checkpoint(model, trial)
        elif step := self.state.best_global_step:  # another replica saves
            best = os.path.join(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{step}")
            if step == self.state.global_step or os.path.exists(best):
                self.state.best_model_checkpoint = best

    def _finalize_training(self, *args: object, **named: object) -> TrainOutput:
        """Lets only the replica that saves delete checkpoints; the others wait for the best model before they load it."""
        if not self.is_world_process_zero():
            self.args.save_total_limit = None
            if self.args.load_best_model_at_end and (best := self.state.best_model_checkpoint):
                self._wait_for(os.path.join(best, TRAINER_STATE_NAME))
        return super()._finalize_training(*args, **named)

    def _wait_for(self, path: str) -> None:
        deadline = time.monotonic() + _PAUSE_S
        with record.expect("another replica saves", up_to_s=_PAUSE_S):
            while not os.path.exists(path) and time.monotonic() < deadline:
                time.sleep(0.1)

    def _evaluate(self, *args: object, **named: object) -> dict[str, float]:
        with record.expect("evaluate", up_to_s=_PAUSE_S):
            measured: dict[str, float] = super()._evaluate(*args, **named)
        return measured

    # ---- state for healing ----

    def _replica_state(self) -> _ReplicaState:
        state = {key: value for key, value in dataclasses.asdict(self.state).items() if key not in _OWN}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.committing.optim.state_dict(),
            "scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else {},
            "trainer": json.dumps(state, default=str),
            "callbacks": [one.state()["attributes"] for one in self._stateful()],
        }

    def _stateful(self) -> list[ExportableState]:
        return [one for one in self.callback_handler.callbacks if isinstance(one, ExportableState)]

    def _load_replica_state(self, given: _ReplicaState) -> None:
        self.model.load_state_dict(given["model"])
        self.committing.optim.load_state_dict(given["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(given["scheduler"])
        known = {field.name for field in dataclasses.fields(TrainerState)} - _OWN
        for name, value in json.loads(given["trainer"]).items():
            if name in known:
                setattr(self.state, name, value)
        for callback, attributes in zip(self._stateful(), given["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        self._globalstep_last_logged = self.state.global_step
        self._seek(self.state.global_step + 1)  # this replica contributes nothing to the present step

    def _seek(self, step: int) -> None:
        """Moves the sampler to the data of a step."""
        if self._sampler is None:
            return
        batch, accumulation = self._train_batch_size, self.args.gradient_accumulation_steps
        epoch, within = divmod(step, self.steps_per_epoch)
        self._stale = math.ceil(self._sampler.drawn / batch) - self._received
        self._sampler.seek(epoch, within * accumulation * batch)

    def _pass(self) -> None:
        """Called at the begin of a pass over the loader: data that the last pass has read ahead is read again."""
        self._received = self._stale = 0
        kept = self._batches is not None and not self.committing.committed
        self._seek(self.state.global_step + (1 if kept else 0))

    def _group(self) -> ReconfigurableGroup:
        return ProcessGroupNCCL() if self.args.device.type == "cuda" else ProcessGroupGloo()
