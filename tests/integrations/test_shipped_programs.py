"""Training programs that packages bring along, as they are, under `allranks run`: healthy, and with a hang that is to be named.

A module that is loaded into each rank (ALLRANKS_PRELOAD) makes rank 1 sleep before an optimizer's step, and tells torchtitan,
which looks for an accelerator, to use the CPU without torch.compile; nothing of the programs is changed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from allranks.incidents.folder import read_incidents

PROGRAMS, PACKAGES = Path(__file__).parent / "programs", Path(sysconfig.get_paths()["purelib"])
LIMIT_S = int(os.environ.get("PROGRAM_LIMIT_S", "240"))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * LIMIT_S + 60)]

AROUND = """
import os, pathlib, time
from torch.optim.optimizer import register_optimizer_step_pre_hook

steps = 0

def before_step(*_):
    global steps
    steps += 1
    if steps == 6 and os.environ["RANK"] == "1" and "HANG" in os.environ:
        time.sleep(10_000)  # hangs here

register_optimizer_step_pre_hook(before_step)
"""
ON_CPU = """
import types, torch, torch._utils
torch._utils._get_available_device_type = lambda: "cpu"
import torch.nn.attention.flex_attention as flex
flex._validate_device = lambda *_: None  # its backward runs on a CPU, but not compiled
torch.compile = lambda function=None, **_: function or (lambda one: one)
import torch.distributed.fsdp._fully_shard._fsdp_collectives as sums
factors = sums._get_gradient_divide_factors
sums._get_gradient_divide_factors = lambda *words: factors(*words[:5], True)  # gloo has no PREMUL_SUM
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *_: None
"""
#: a model, a tokenizer and texts, in the formats that all of them read
PREPARE = """
import json, pathlib
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
texts = [f"the {a} {b} of rank {i} waits for the {b} {a}" for i in range(100) for a in ("small", "large") for b in ("ring", "tree")]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
special = ["<s>", "</s>", "<pad>"]
tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special))
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
config = LlamaConfig(vocab_size=len(fast), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=2)
for folder in ("model", "tests/assets/tokenizer"):
    fast.save_pretrained(folder)
LlamaForCausalLM(config).save_pretrained("model")
try:
    from sentencepiece import SentencePieceTrainer
    SentencePieceTrainer.train(sentence_iterator=iter(texts), vocab_size=60, model_prefix="model/tokenizer", minloglevel=2)
except ImportError:
    pass  # only torchtune needs it, and brings it
rows = {"data": [{"text": text} for text in texts], "tests/assets/c4_test": [{"text": text} for text in texts],
        "pairs": [{"prompt": "the ", "chosen": text, "rejected": text[::-1]} for text in texts]}
for folder, some in rows.items():
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    pathlib.Path(folder, "train.jsonl").write_text("".join(json.dumps(one) + "\\n" for one in some))
"""


@dataclass(frozen=True)
class Program:
    """What is typed after `allranks run`, the package that brings it, and what it says at its end."""

    package: str
    words: str
    says: str
    also: str = ""  # another package that it needs


TRL = (
    "--model_name_or_path model --output_dir out --max_steps 20 --per_device_train_batch_size 2 --use_cpu --report_to none"
    " --save_strategy no --logging_steps 5 --bf16 false --gradient_checkpointing false --max_length 32"
)
KINDS = {
    "trl_sft": Program("trl", f"-m trl.scripts.sft --dataset_name data {TRL}", "Training completed"),
    "trl_sft_lora": Program(
        "trl", f"-m trl.scripts.sft --dataset_name data {TRL} --use_peft --lora_r 4", "Training completed", "peft"
    ),
    "trl_dpo": Program("trl", f"-m trl.scripts.dpo --dataset_name pairs {TRL}", "Training completed"),
    "torchtitan": Program(
        "torchtitan",
        "-m torchtitan.train --module llama3 --config llama3_debugmodel --training.steps 12 --training.seq_len 32"
        " --training.local_batch_size 1 --training.mixed_precision_param float32 --validator.freq 1000 --parallelism.spmd_backend partial_dtensor",
        "Training completed",
    ),
    "torchtune": Program(
        "torchtune",
        "{packages}/recipes/full_finetune_distributed.py --config {packages}/recipes/configs/llama2/7B_full.yaml"
        " device=cpu dtype=fp32 output_dir=tuned max_steps_per_epoch=12 log_peak_memory_stats=False optimizer.fused=False"
        " tokenizer.path=model/tokenizer.model tokenizer.max_seq_len=32 dataset._component_=torchtune.datasets.text_completion_dataset dataset.source=json"
        " +dataset.data_files=data/train.jsonl +dataset.split=train"
        " model._component_=torchtune.models.llama2.llama2 +model.vocab_size=300 +model.num_layers=1 +model.num_heads=2"
        " +model.num_kv_heads=2 +model.embed_dim=16 +model.intermediate_dim=32 +model.max_seq_len=128"
        " checkpointer.checkpoint_dir=model checkpointer.checkpoint_files=[model.safetensors]",
        "Starting checkpoint save",
        "torchao",
    ),
    "sentence_transformers": Program("sentence_transformers", "{programs}/sentence_pairs.py out", "trained"),
    "fairscale": Program("fairscale", "{programs}/fairscale_oss.py", "trained"),
    "diffusers": Program("diffusers", "{programs}/diffusers_unet.py", "trained"),
    "ignite": Program("ignite", "{programs}/ignite_engine.py", "trained"),
    "hydra": Program("hydra", "{programs}/hydra_ddp.py hydra.job.chdir=True", "trained in outputs"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs run: tiny models and data, and what is loaded into each rank."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    place = tmp_path_factory.mktemp("shipped")
    (place / "around.py").write_text(AROUND)
    (place / "on_cpu.py").write_text(ON_CPU)
    subprocess.run([sys.executable, "-c", PREPARE], cwd=place, check=True, timeout=LIMIT_S)
    return place


def start(name: str, folder: Path, case: Path, **variables: str) -> subprocess.Popen[bytes]:
    """The program over two ranks; its output is in the case's folder."""
    kind = KINDS[name]
    for package in filter(None, (kind.package, kind.also)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name == "torchtitan" and not hasattr(dist, "set_timeout"):
        pytest.skip("torchtitan 0.3 calls torch.distributed.set_timeout, which this torch does not have")
    command = [
        sys.executable, "-m", "allranks", "run", "--standalone", "--nproc-per-node", "2", "--incidents",
        str(case / "incidents"), *kind.words.format(packages=PACKAGES, programs=PROGRAMS).split(),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ALLRANKS_DIR": str(case / "boxes"), "ALLRANKS_JOB_ID": name,
           "ALLRANKS_PRELOAD": "around,on_cpu" if name == "torchtitan" else "around", "PYTHONPATH": str(folder),
           "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **variables}  # fmt: skip
    with open(case / "output.log", "w") as output:
        return subprocess.Popen(command, env=env, cwd=folder, stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("name", KINDS)
def test_it_runs_as_it_is_and_is_healthy(name: str, folder: Path, tmp_path: Path) -> None:
    """It ends well without an incident, and the verdict on its black boxes is that nothing is wrong."""
    job = start(name, folder, tmp_path)
    try:
        code: int | None = job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
        job.terminate()
        job.wait(30)
    said = (tmp_path / "output.log").read_text(errors="replace")
    assert code == 0 and KINDS[name].says in said, f"exit code {code}: {said[-5000:]}"
    assert not read_incidents(tmp_path / "incidents"), said[-3000:]
    asked = [sys.executable, "-m", "allranks", "diagnose", str(tmp_path / "boxes"), "--json"]
    verdict = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
    assert verdict.returncode == 0 and json.loads(verdict.stdout), verdict.stdout[-3000:] + verdict.stderr


@pytest.mark.parametrize("name", KINDS)
def test_a_hang_is_named_at_its_line(name: str, folder: Path, tmp_path: Path) -> None:
    """The incident's verdict names rank 1 and the line that sleeps, far above which is the program's own loop."""
    job = start(name, folder, tmp_path, HANG="1")
    line = 1 + next(i for i, text in enumerate(AROUND.splitlines()) if "# hangs here" in text)
    try:
        verdict = _verdict(job, tmp_path / "incidents")
    finally:
        job.terminate()
        job.wait(60)
    said = (tmp_path / "output.log").read_text(errors="replace")
    assert verdict is not None, said[-5000:]
    assert verdict["ranks"] == [1] and f"around.py:{line}" in str(verdict["sentence"]), verdict


def _verdict(job: subprocess.Popen[bytes], incidents: Path) -> dict[str, object] | None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and job.poll() is None:
        for story in read_incidents(incidents):
            if story["kind"] == "hang" and story["verdict"]:
                return dict(story["verdict"])
        time.sleep(0.2)
    return None
