"""Hugging Face's Trainer, as it comes from the registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.replicas import KILLS, run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import allranks  # noqa: E402
from allranks.blackbox.header import read_header  # noqa: E402
from allranks.integrations.transformers import AllranksCallback  # noqa: E402
from allranks.lighthouse.options import Options, ServerOptions  # noqa: E402
from allranks.lighthouse.server import Lighthouse  # noqa: E402

MODEL = """
import sys, torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments
class Data(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, i):
        x = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": x, "labels": x}
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
"""

REPLICA = (
    MODEL
    + """
import hashlib
from allranks.integrations.transformers import FaultTolerantTrainer
class Lives(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        lives(trainer.manager)
        state.trained = bits() if state.global_step == 600 else None
def bits():
    return hashlib.sha256(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()).hexdigest()
args = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=600, use_cpu=True,
    logging_steps=50, save_steps=20, save_total_limit=1, load_best_model_at_end=True, report_to=[], disable_tqdm=True,
    warmup_steps=20, eval_strategy="steps", eval_steps=20, metric_for_best_model="loss", greater_is_better=True)
stopping = EarlyStoppingCallback(1000)  # counts, and never stops
trainer = FaultTolerantTrainer(model=model, args=args, train_dataset=Data(), callbacks=[Lives(), stopping],
                               eval_dataset=torch.utils.data.Subset(Data(), range(4)))
trainer.train()
says(f"name={NAME}", f"step={trainer.state.global_step}", f"lr={trainer.lr_scheduler.get_last_lr()[0]!r}",
      f"scheduler={trainer.lr_scheduler.last_epoch}", f"epoch={trainer.state.epoch:.4f}",
      f"logged={[row['step'] for row in trainer.state.log_history if 'loss' in row][-3:]!r}".replace(" ", ""),
      f"patience={stopping.early_stopping_patience_counter}",
      f"trained={trainer.state.trained}", f"best={bits()}")
"""
)


@pytest.mark.parametrize("kills", KILLS)
def test_trainers_are_replicas_with_equal_bits_after_kills(tmp_path: Path, kills: int) -> None:
    """Two changed lines: after the kills steps, rates, epochs, logs, callbacks and parameters are equal at the end."""
    said = run(REPLICA, tmp_path, kills, str(tmp_path / "out"))
    assert said["replica-0"] == said["replica-1"]
    facts = said["replica-0"]
    assert (facts["step"], facts["scheduler"], facts["lr"]) == ("600", "600", "0.0")
    assert facts["logged"] == "[500,550,600]"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-20"], (
        "one replica saves and keeps the best"
    )


def test_a_step_that_is_not_committed_is_made_again_with_the_same_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle and at the end of an epoch; without the repetitions the order is that of a run without errors."""
    from allranks.integrations.transformers import FaultTolerantTrainer

    monkeypatch.setenv("ALLRANKS_TOKEN", "")
    space: dict[str, Any] = {}
    exec(MODEL, space)

    def order(fails_at: set[int]) -> list[int]:
        seen: list[int] = []

        class Seeing(FaultTolerantTrainer):
            def training_step(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
                seen.append(int(inputs["input_ids"].sum()))
                if len(seen) in fails_at:
                    self.manager.report_error(RuntimeError("a link broke"))
                return super().training_step(model, inputs, *args, **named)

        args = transformers.TrainingArguments(
            str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=9, use_cpu=True, save_strategy="no",
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        with Lighthouse(Options(), ServerOptions()) as lighthouse:
            monkeypatch.setenv("ALLRANKS_LIGHTHOUSE", lighthouse.address)
            data = torch.utils.data.Subset(space["Data"](), range(16))
            trainer = Seeing(model=space["model"], args=args, train_dataset=data)
            trainer.train()
        assert trainer.state.global_step == 9
        return seen

    clean = order(set())
    assert len(clean) == 9 and len(set(clean[:4])) == 4
    troubled = order({2, 5})  # the second batch, and the fourth of four, which is the fifth that is made
    assert troubled == [clean[0], clean[1], *clean[1:4], clean[3], *clean[4:]]


def test_the_callback_marks_steps_and_announces_pauses(tmp_path: Path, folder: Path) -> None:
    """An unmodified Trainer: the box knows the step, its tokens, and that an evaluation is not a hang."""
    seen: list[tuple[int, bool, float]] = []

    class Looks(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            header = read_header(recorder.path)
            seen.append((header.step, header.expect_until_ns > 0, header.tokens))

    recorder = allranks.record()
    space: dict[str, Any] = {}
    exec(MODEL, space)
    args = transformers.TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=4, use_cpu=True, eval_steps=2,
        eval_strategy="steps", save_strategy="no", report_to=[], disable_tqdm=True, include_num_input_tokens_seen=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=space["model"], args=args, train_dataset=space["Data"](), callbacks=[AllranksCallback(), Looks()],
        eval_dataset=torch.utils.data.Subset(space["Data"](), range(4)),
    )  # fmt: skip
    trainer.train()
    assert seen == [(1, True, 4 * 16), (3, True, 4 * 16)]
    recorder.close()
