"""Hugging Face's Trainer over two ranks, with its own checkpoints."""

import sys
import time

import torch
from faults import say, trouble
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, i):
        x = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": x, "labels": x}


class Callback(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if trouble(state.global_step):
            time.sleep(10_000)  # hangs here


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
)
args = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, max_steps=40, use_cpu=True, ddp_backend="gloo", save_steps=1,
    save_total_limit=2, report_to=[], disable_tqdm=True, logging_steps=10,
)  # fmt: skip
trainer = Trainer(model=model, args=args, train_dataset=Data(), callbacks=[Callback()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(sys.argv[1]))
say(list(model.parameters()), trainer.state.global_step)
