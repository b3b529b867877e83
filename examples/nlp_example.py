"""Classify pairs of sentences: GLUE MRPC with BERT; without internet access, pairs from Python's manual.

    python examples/nlp_example.py
    accelerate launch --cpu --num_processes 2 examples/nlp_example.py
    python examples/nlp_example.py --train_file train.csv --validation_file dev.csv     # sentence1, sentence2, label

With `datasets`, `transformers` and internet access this fine-tunes bert-base-cased on MRPC (learning rate 2e-5, 3
epochs, batch 16, 100 warm-up steps, seed 42); expect an accuracy near 0.85 and an F1 near 0.9. Without them it trains a
small encoder of the same shape from scratch on Python's documentation: do two sentences come from the same page?
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from curves import plot_curves
from offline_data import PairTokens, sentence_pairs, vocabulary_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from watch_option import add_watch

from accelerate import Accelerator
from accelerate.utils import set_seed

EVALUATION_BATCH_SIZE = 32
WARM_UP_STEPS = 100


class PairEncoder(nn.Module):
    """A BERT-shaped encoder of two segments, and a classifier that compares what each of them became."""

    def __init__(self, vocabulary_size: int, length: int = 96, width: int = 64, num_layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary_size, width, padding_idx=PairTokens.PAD)
        self.segments = nn.Embedding(2, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.importance = nn.Linear(width, 1)
        self.classifier = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 2))
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.segments.weight, std=0.02)
        for block in self.layers.layers:  # each layer begins as the identity: small data trains faster from there
            nn.init.zeros_(block.self_attn.out_proj.weight)
            nn.init.zeros_(block.linear2.weight)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        attention_mask: torch.Tensor,
    ) -> torch.Tensor:
        is_word = attention_mask == 1
        if self.training:  # overlooking words keeps a small model from learning the passages by heart
            overlooked = torch.rand(input_ids.shape, device=input_ids.device) < 0.3
            is_word = is_word & ~(overlooked & (input_ids >= PairTokens.UNKNOWN))
        hidden = self.words(input_ids) + self.segments(token_type_ids) + self.positions[: input_ids.shape[1]]
        hidden = self.layers(hidden, src_key_padding_mask=~is_word)
        importance = self.importance(hidden).float()
        first, second = (
            (hidden * importance.masked_fill(~mask.unsqueeze(-1), -torch.inf).softmax(dim=1)).sum(dim=1)
            for mask in (is_word & (token_type_ids == 0), is_word & (token_type_ids == 1))
        )
        return self.classifier(torch.cat([first * second, (first - second).abs()], dim=-1))


@dataclass
class Task:
    """Everything the loop needs to know."""

    name: str
    train_set: Dataset[dict[str, torch.Tensor]]
    held_out_set: Dataset[dict[str, torch.Tensor]]
    model: nn.Module
    learning_rate: float
    num_epochs: int
    batch_size: int


def read_pairs(path: str | Path) -> list[tuple[str, str, int]]:
    """The rows of a CSV or TSV file with the columns sentence1, sentence2 and label.

    Raises:
        ValueError: a column is missing, or a label is not 0 or 1; the text names the file and the line.
    """
    path = Path(path)
    with path.open(newline="", encoding="utf-8") as file:
        is_tab_separated = path.suffix == ".tsv"
        quoting = csv.QUOTE_NONE if is_tab_separated else csv.QUOTE_MINIMAL
        rows = csv.DictReader(file, delimiter="\t" if is_tab_separated else ",", quoting=quoting)
        missing = {"sentence1", "sentence2", "label"} - set(rows.fieldnames or ())
        if missing:
            raise ValueError(f"{path}:1: no column {', '.join(sorted(missing))}")
        pairs = []
        for row in rows:
            if row["label"] not in ("0", "1"):
                raise ValueError(f"{path}:{rows.line_num}: label {row['label']!r} is not 0 or 1")
            pairs.append((row["sentence1"], row["sentence2"], int(row["label"])))
    return pairs


def accuracy_and_f1(predictions: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The share of right predictions, and the harmonic mean of precision and recall of label 1."""
    true_positives = int(((predictions == 1) & (labels == 1)).sum())
    marked = int((predictions == 1).sum()) + int((labels == 1).sum())
    return {
        "accuracy": float((predictions == labels).double().mean()),
        "f1": 2 * true_positives / marked if marked else 0.0,
    }


def small_task(name: str, train: list[tuple[str, str, int]], held_out: list[tuple[str, str, int]]) -> Task:
    """The small encoder, trained from scratch."""
    vocabulary = vocabulary_of(train)
    return Task(
        name,
        PairTokens(train, vocabulary),
        PairTokens(held_out, vocabulary),
        PairEncoder(max(vocabulary.values()) + 1),
        learning_rate=2e-3,
        num_epochs=4,
        batch_size=32,
    )


def mrpc_task() -> Task | None:
    """BERT on MRPC from the hub, or None where a library or the network is missing."""
    try:
        from datasets import load_dataset
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    except ImportError:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
        model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
        rows: Any = load_dataset("nyu-mll/glue", "mrpc")
    except (OSError, RuntimeError, ValueError):  # what these libraries raise where the hub is out of reach
        return None

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        return tokenizer(row["sentence1"], row["sentence2"], truncation=True, padding="max_length", max_length=128)

    rows = rows.map(encode, batched=True, remove_columns=["idx", "sentence1", "sentence2"])
    rows = rows.rename_column("label", "labels").with_format("torch")

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = model

        def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
            return self.bert(**inputs).logits

    return Task(
        "GLUE MRPC", rows["train"], rows["validation"], Scores(), learning_rate=2e-5, num_epochs=3, batch_size=16
    )


def choose_task(arguments: argparse.Namespace) -> Task:
    """The task that the arguments and this machine allow."""
    if arguments.train_file or arguments.validation_file:
        if not (arguments.train_file and arguments.validation_file):
            raise SystemExit("--train_file and --validation_file are needed together")
        name = f"pairs of {arguments.train_file}"
        return small_task(name, read_pairs(arguments.train_file), read_pairs(arguments.validation_file))
    return mrpc_task() or small_task("passages of Python's documentation strings", *sentence_pairs())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--train_file", help="CSV or TSV with sentence1, sentence2, label")
    parser.add_argument("--validation_file", help="CSV or TSV with sentence1, sentence2, label")
    parser.add_argument("--batch_size", type=int, help="pairs a process and step: 16 on MRPC, 32 offline")
    parser.add_argument("--num_epochs", type=int, help="3 on MRPC, 4 offline")
    parser.add_argument("--learning_rate", type=float, help="2e-5 on MRPC, 2e-3 offline")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--plot", help="write the curves to this PNG file")
    add_watch(parser)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=arguments.cpu, mixed_precision=arguments.mixed_precision)
    set_seed(arguments.seed)
    with accelerator.main_process_first():  # one process fills the caches, the others read them
        task = choose_task(arguments)
    num_epochs = arguments.num_epochs or task.num_epochs
    batch_size = arguments.batch_size or task.batch_size
    accelerator.print(f"data: {task.name}, {len(task.train_set)} pairs, {len(task.held_out_set)} held out")
    train_loader = DataLoader(task.train_set, batch_size=batch_size, shuffle=True, drop_last=True)
    held_out_loader = DataLoader(task.held_out_set, batch_size=EVALUATION_BATCH_SIZE)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=arguments.learning_rate or task.learning_rate)
    num_steps = num_epochs * len(train_loader)

    def share_of_the_learning_rate(step: int) -> float:
        if step < WARM_UP_STEPS:
            return step / WARM_UP_STEPS
        return max(0.0, (num_steps - step) / max(1, num_steps - WARM_UP_STEPS))

    scheduler = LambdaLR(optimizer, share_of_the_learning_rate)
    model, optimizer, train_loader, held_out_loader, scheduler = accelerator.prepare(
        task.model, optimizer, train_loader, held_out_loader, scheduler
    )

    history = []
    quiet = None if accelerator.is_local_main_process else True
    for epoch in range(num_epochs):
        model.train()
        started = time.perf_counter()
        losses, num_samples = [], 0
        for batch in tqdm(train_loader, desc=f"epoch {epoch}", leave=False, disable=quiet):
            labels = batch.pop("labels")
            loss = nn.functional.cross_entropy(model(**batch), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            num_samples += len(labels) * accelerator.num_processes
        seconds = time.perf_counter() - started

        model.eval()
        predictions, truths = [], []
        for batch in held_out_loader:
            labels = batch.pop("labels")
            with torch.no_grad():
                guesses = model(**batch).argmax(dim=-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            predictions.append(guesses)
            truths.append(labels)
        metrics = accuracy_and_f1(torch.cat(predictions), torch.cat(truths))
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        history.append({"epoch": epoch, "loss": mean_loss, **metrics, "samples_per_second": num_samples / seconds})
        accelerator.print(
            f"epoch {epoch}: accuracy {metrics['accuracy']:.4f}, f1 {metrics['f1']:.4f}  "
            f"(loss {mean_loss:.4f}, {num_samples / seconds:.0f} samples/s)"
        )
    if arguments.plot and accelerator.is_main_process:
        plot_curves({"run": history}, arguments.plot, task.name)
    accelerator.end_training()


if __name__ == "__main__":
    main()
