"""One bit of one replica's memory flips while another library's trainer trains: the replica is named and healed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]
FLIP_AT, STEPS = 6, 14

# All replicas see the same data, so that a step without one of them has the same result.
COMMON = f"""
import json, os, torch
from allranks.manager.groups.group import ProcessGroupGloo
from allranks.manager.manager import Manager
NAME, WORLD = os.environ["ALLRANKS_REPLICA"], int(os.environ["WORLD"])
manager = Manager(pg=ProcessGroupGloo(), min_replica_size=WORLD, check_every=1)
flipped, curve = not int(os.environ["FLIP"]) or NAME != f"replica-{{WORLD - 1}}", {{}}
def after(step, model, loss):
    global flipped
    with torch.no_grad():
        curve[step] = float(loss())
    if step == {FLIP_AT} and not flipped:
        flipped = True
        next(model.parameters()).data.view(torch.int32).flatten()[3] ^= 1 << 22
def say(model):
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    print("SAYS " + json.dumps(dict(name=NAME, curve=curve, bits=hash(parameters.numpy().tobytes()))), flush=True)
"""

TRANSFORMERS = (
    COMMON
    + f"""
import sys
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
from allranks.integrations.transformers import FaultTolerantTrainer
TOKENS = torch.arange(16) * 3 % 50
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i): return {{"input_ids": TOKENS, "labels": TOKENS}}
class After(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        after(state.global_step, model, lambda: model(input_ids=TOKENS[None], labels=TOKENS[None]).loss)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                                   attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
args = TrainingArguments(sys.argv[1], per_device_train_batch_size=2, max_steps={STEPS}, use_cpu=True, save_strategy="no",
                         report_to=[], disable_tqdm=True, learning_rate=1e-3)
trainer = FaultTolerantTrainer(model=model, args=args, train_dataset=Data(), callbacks=[After()], manager=manager)
trainer.train()
say(model)
"""
)

LIGHTNING = (
    COMMON
    + f"""
import sys, lightning.pytorch as pl
from allranks.integrations.lightning import FaultTolerantStrategy
ROW = torch.linspace(-1, 1, 8)
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    def training_step(self, batch, index):
        return (self.net(batch[0]) - 1).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000)
        return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, "interval": "step"}}}}
    def on_train_batch_end(self, *_):
        after(self.trainer.global_step, self.net, lambda: (self.net(ROW) - 1).square().mean())
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(ROW.repeat(300, 1))
trainer = pl.Trainer(strategy=FaultTolerantStrategy(manager=manager), max_steps={STEPS}, logger=False, default_root_dir=sys.argv[1],
                     enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
say(module.net)
"""
)


def _run(script: str, folder: Path, replicas: int, flip: bool) -> tuple[list[dict[str, Any]], str]:
    folder.mkdir()
    (folder / "train.py").write_text(script)
    env = {
        **os.environ,
        "WORLD": str(replicas),
        "FLIP": str(int(flip)),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "allranks", "run", "--replicas", str(replicas)]
    done = subprocess.run(
        [*command, "--incidents", str(folder / "incidents"), str(folder / "train.py"), str(folder / "out")],
        env=env, cwd=folder, text=True, timeout=180, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    said = [json.loads(line) for line in re.findall(r"SAYS (\{.*\})", done.stdout)]
    assert len(said) == replicas, done.stdout[-6000:]
    return said, done.stdout


SCRIPTS = pytest.mark.parametrize(
    ("library", "script"), [("transformers", TRANSFORMERS), ("lightning", LIGHTNING)]
)


@SCRIPTS
def test_of_three_trainers_the_one_with_the_flipped_bit_is_named_and_healed(
    library: str, script: str, tmp_path: Path
) -> None:
    """In the vote of the next step; from there on losses are those of an undisturbed run, and all bits are equal."""
    pytest.importorskip(library)
    undisturbed, _ = _run(script, tmp_path / "undisturbed", 3, flip=False)
    disturbed, log = _run(script, tmp_path / "disturbed", 3, flip=True)
    assert re.search(rf"step {FLIP_AT}: the state of replica-2 differs from that of the other replicas", log)
    assert len({one["bits"] for one in disturbed}) == 1
    for one in disturbed:
        expected = undisturbed[0]["curve"]
        late = {step: loss for step, loss in one["curve"].items() if int(step) > FLIP_AT}
        assert len(late) >= STEPS - FLIP_AT - 1
        assert late == pytest.approx({step: expected[step] for step in late}, abs=1e-6)


@SCRIPTS
def test_of_two_trainers_a_flipped_bit_is_reported(library: str, script: str, tmp_path: Path) -> None:
    """Nobody can tell which is right."""
    pytest.importorskip(library)
    said, log = _run(script, tmp_path / "two", 2, flip=True)
    assert f"step {FLIP_AT}: the states of replica-0 and replica-1 differ" in log
    assert len({one["bits"] for one in said}) == 2
