"""Trainers of others: pytorch-accelerated's, setfit's, and sentence-transformers' for pairs and sparse vectors.

python layers_on_top.py NAME...
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import Dataset, load_dataset
from report import ASSETS, OUTPUT, report, weight_of

QUIET: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "logging_steps": 1, "report_to": [],
    "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def logged(trainer: Any, model: Any) -> dict[str, Any]:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "weight": weight_of(model)}


def pytorch_accelerated() -> dict[str, Any]:
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import TerminateOnNaNCallback, TrainerCallback

    class Losses(TrainerCallback):
        """Keeps each epoch's losses."""

        kept: list[float] = []

        def on_eval_epoch_end(self, trainer: Any, **_others: Any) -> None:
            self.kept += [
                trainer.run_history.get_latest_metric("train_loss_epoch"),
                trainer.run_history.get_latest_metric("eval_loss_epoch"),
            ]

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    rows = torch.randn(26, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(rows, rows.sum(-1, keepdim=True))
    trainer = Trainer(
        model, torch.nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[TerminateOnNaNCallback(), Losses()],
    )  # fmt: skip
    trainer.train(
        data, num_epochs=2, eval_dataset=data, per_device_batch_size=4, gradient_accumulation_steps=2,
        gradient_clip_value=1.0, train_dataloader_kwargs={"shuffle": False, "num_workers": 0},
        eval_dataloader_kwargs={"num_workers": 0},
    )  # fmt: skip
    return {"losses": Losses.kept, "weight": weight_of(trainer._accelerator.unwrap_model(trainer.model))}


def setfit() -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer, models
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    torch.manual_seed(0)
    body = SentenceTransformer(modules=[models.Transformer(f"{ASSETS}/bert", max_seq_length=32), models.Pooling(32)],
                               device="cpu")  # fmt: skip
    model = SetFitModel(model_body=body, model_head=LogisticRegression())
    data = load_dataset("json", data_files=f"{ASSETS}/task/cats.jsonl", split="train")
    arguments = TrainingArguments(output_dir=f"{OUTPUT}/setfit", batch_size=8, max_steps=4, report_to="none",
                                  logging_steps=1, seed=3, show_progress_bar=False)  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    answers = model.predict(data["text"][:20])
    return {"weight": weight_of(body), "answers": [int(each) for each in answers]}


def cross_encoder() -> dict[str, Any]:
    from sentence_transformers.cross_encoder import (
        CrossEncoder,
        CrossEncoderTrainer,
        CrossEncoderTrainingArguments,
        losses,
    )  # fmt: skip

    torch.manual_seed(0)
    model = CrossEncoder(f"{ASSETS}/bert", num_labels=2, device="cpu")
    pairs = load_dataset("json", data_files=f"{ASSETS}/pairs/train.jsonl", split="train")
    labelled: Dataset = pairs.add_column("label", [index % 2 for index in range(len(pairs))])
    arguments = CrossEncoderTrainingArguments(f"{OUTPUT}/cross_encoder", **QUIET)
    trainer = CrossEncoderTrainer(
        model=model, args=arguments, train_dataset=labelled, loss=losses.CrossEntropyLoss(model)
    )
    return logged(trainer, model)


def sparse_encoder() -> dict[str, Any]:
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder import losses
    from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(f"{ASSETS}/bert")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape)).save_pretrained(
        f"{OUTPUT}/masked_{torch.initial_seed()}"
    )
    tokenizer.save_pretrained(f"{OUTPUT}/masked_{torch.initial_seed()}")
    words = MLMTransformer(f"{OUTPUT}/masked_{torch.initial_seed()}")
    model = SparseEncoder(modules=[words, SpladePooling("max")], device="cpu")
    pairs = load_dataset("json", data_files=f"{ASSETS}/pairs/train.jsonl", split="train")
    loss = losses.SpladeLoss(model, losses.SparseMultipleNegativesRankingLoss(model), 3e-5, 5e-5)
    arguments = SparseEncoderTrainingArguments(f"{OUTPUT}/sparse_encoder", **QUIET)
    trainer = SparseEncoderTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
    return logged(trainer, model)


if __name__ == "__main__":
    report(**{name: globals()[name]() for name in sys.argv[1:]})
