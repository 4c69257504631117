"""TRL's GRPOTrainer on a tiny random model. Its reward function asks a server, which never answers the second batch."""

import os
import tempfile
import threading

from job import free_port, main, post, ready, serve, start, tell


def reward(port):
    seen = []

    def score(path, body):
        seen.append(body)
        if len(seen) == 2:
            ready()
            threading.Event().wait()  # <- here
        return {"scores": [float(len(text)) for text in body["texts"]]}

    serve(port, score)


def tiny_model():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    shape = GPT2Config(vocab_size=len(words), n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=1)
    return GPT2LMHeadModel(shape), tokenizer


def trainer():
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tell("trainer")
    port = free_port()
    start(reward, port)
    model, tokenizer = tiny_model()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
        max_steps=5, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: post(port, "/score", texts=completions)["scores"],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a b c"}] * 16),
        processing_class=tokenizer,
    ).train()


os.environ.setdefault("HF_HUB_OFFLINE", "1")
main(trainer, reward)
