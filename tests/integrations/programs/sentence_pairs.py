"""Sentence Transformers' trainer over two ranks."""

import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer

transformer = Transformer("model", max_seq_length=32)
model = SentenceTransformer(
    modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu"
)
pairs = Dataset.from_list(
    [{"anchor": f"the ring of rank {i}", "positive": f"the tree of rank {i}"} for i in range(100)]
)
args = SentenceTransformerTrainingArguments(
    sys.argv[1],
    max_steps=20,
    per_device_train_batch_size=2,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
)
SentenceTransformerTrainer(
    model=model, args=args, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
).train()
print("trained")
