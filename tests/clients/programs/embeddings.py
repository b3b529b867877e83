"""sentence-transformers' trainer on a tiny BERT, with two data sets."""

from __future__ import annotations

import torch
from datasets import load_dataset
from report import ASSETS, OUTPUT, report, weight_of
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)

torch.manual_seed(0)
words = models.Transformer(f"{ASSETS}/bert", max_seq_length=32)
model = SentenceTransformer(modules=[words, models.Pooling(32)], device="cpu")
pairs = load_dataset("json", data_files=f"{ASSETS}/pairs/train.jsonl", split="train")
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        f"{OUTPUT}/embeddings", max_steps=4, per_device_train_batch_size=8, per_device_eval_batch_size=8,
        learning_rate=1e-3, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        multi_dataset_batch_sampler="round_robin", eval_strategy="steps", eval_steps=4,
    ),
    train_dataset={"all": pairs, "some": pairs.select(range(24))},
    eval_dataset=pairs.select(range(13)),
    loss=losses.MultipleNegativesRankingLoss(model),
)  # fmt: skip
trainer.train()
history = trainer.state.log_history
report(
    losses=[entry["loss"] for entry in history if "loss" in entry],
    evaluation=[entry["eval_loss"] for entry in history if "eval_loss" in entry],
    weight=weight_of(model),
)
