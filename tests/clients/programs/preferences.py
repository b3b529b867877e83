"""trl's trainers of preferences and rewards on a tiny Llama: DPO, KTO, a reward model, GRPO, RLOO.

python preferences.py NAME...
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import load_dataset
from report import ASSETS, OUTPUT, report, weight_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer

LLAMA, CHOICES = f"{ASSETS}/llama", f"{ASSETS}/choices/train.jsonl"
COMMON: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "report_to": [],
    "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False,
    "seed": 3,
}  # fmt: skip


def choices() -> Any:
    return load_dataset("json", data_files=CHOICES, split="train")


def told(trainer: Any, *names: str) -> dict[str, Any]:
    """The run's losses and these other columns of its log, and its weights."""
    trainer.train()
    history = trainer.state.log_history
    columns = {name: [entry[name] for entry in history if name in entry] for name in ("loss", *names)}
    return {**columns, "weight": weight_of(trainer.accelerator.unwrap_model(trainer.model))}


def dpo() -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(f"{OUTPUT}/dpo", **COMMON, max_length=32)
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    trainer = DPOTrainer(LLAMA, args=arguments, train_dataset=choices(), processing_class=tokenizer)
    return told(trainer, "rewards/margins", "logps/chosen")


def reward() -> dict[str, Any]:
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(LLAMA, num_labels=1)
    arguments = RewardConfig(f"{OUTPUT}/reward", **COMMON, max_length=32)
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    trainer = RewardTrainer(model, args=arguments, train_dataset=choices(), processing_class=tokenizer)
    return told(trainer, "margin")


def kto() -> dict[str, Any]:
    from trl.experimental.kto import KTOConfig, KTOTrainer

    arguments = KTOConfig(f"{OUTPUT}/kto", **COMMON, max_length=32)
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    trainer = KTOTrainer(LLAMA, args=arguments, train_dataset=choices(), processing_class=tokenizer)
    return told(trainer)


def lengths(completions: list[str], **_others: Any) -> list[float]:
    """A reward that needs no other model."""
    return [float(len(set(each))) for each in completions]


def grpo() -> dict[str, Any]:
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(f"{OUTPUT}/grpo", **COMMON, num_generations=2, max_completion_length=6, beta=0.1)
    data = choices().select_columns(["prompt"])
    trainer = GRPOTrainer(LLAMA, reward_funcs=lengths, args=arguments, train_dataset=data)
    return told(trainer, "reward", "completions/mean_length", "kl")


def rloo() -> dict[str, Any]:
    from trl import RLOOConfig, RLOOTrainer

    arguments = RLOOConfig(f"{OUTPUT}/rloo", **COMMON, num_generations=2, max_completion_length=6)
    data = choices().select_columns(["prompt"])
    trainer = RLOOTrainer(LLAMA, reward_funcs=lengths, args=arguments, train_dataset=data)
    return told(trainer, "reward", "completions/mean_length")


if __name__ == "__main__":
    report(**{name: globals()[name]() for name in sys.argv[1:]})
