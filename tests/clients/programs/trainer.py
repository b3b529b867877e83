"""transformers.Trainer on a tiny GPT-2: train, evaluate, accumulate, bf16, resume, FSDP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from report import OUTPUT, report, weight_of
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

FSDP = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}


class Tokens(Dataset):
    """Random rows that are the same in every process."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row.clone()}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**shape, **dropout, bos_token_id=0, eos_token_id=0))


def trainer(name: str, **options: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    arguments.update(options)
    return Trainer(
        model(), TrainingArguments(f"{OUTPUT}/{name}", **arguments), train_dataset=Tokens(33), eval_dataset=Tokens(10)
    )


def losses(trained: Trainer) -> list[float]:
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def weight(trained: Trainer) -> float:
    return weight_of(trained.accelerator.unwrap_model(trained.model))


def train() -> dict[str, Any]:
    trained = trainer("train")
    trained.train()
    evaluated, predicted = trained.evaluate(), trained.predict(Tokens(7))
    return {
        "losses": losses(trained), "weight": weight(trained), "evaluation": evaluated["eval_loss"],
        "predictions": list(predicted.predictions.shape), "processes": trained.accelerator.num_processes,
    }  # fmt: skip


def accumulation() -> dict[str, Any]:
    trained = trainer("accumulation", per_device_train_batch_size=2, gradient_accumulation_steps=2)
    trained.train()
    return {"losses": losses(trained), "weight": weight(trained)}


def bf16() -> dict[str, Any]:
    trained = trainer("bf16", bf16=True)
    trained.train()
    return {"losses": losses(trained), "evaluation": trained.evaluate()["eval_loss"]}


def checkpointed_activations() -> dict[str, Any]:
    trained = trainer("activations", gradient_checkpointing=True, max_grad_norm=0.1)
    trained.train()
    return {"losses": losses(trained), "weight": weight(trained)}


def resume() -> dict[str, Any]:
    whole = trainer("resume", save_strategy="steps", save_steps=2)
    whole.train()
    again = trainer("resume")
    again.train(resume_from_checkpoint=f"{OUTPUT}/resume/checkpoint-2")
    files = sorted(path.name for path in Path(OUTPUT, "resume", "checkpoint-2").iterdir())
    return {"weight": weight(whole), "same": weight(whole) == weight(again), "files": files}


def fsdp(version: int) -> dict[str, Any]:
    trained = trainer(f"fsdp{version}", fsdp="full_shard auto_wrap", fsdp_config={**FSDP, "version": version})
    trained.train()
    evaluated = trained.evaluate()["eval_loss"]
    state = trained.accelerator.get_state_dict(trained.model)
    total = sum(each.double().abs().sum().item() for each in state.values()) if state else 0.0
    trained.save_model(f"{OUTPUT}/fsdp{version}/final")
    return {
        "losses": losses(trained), "evaluation": evaluated, "state": total,
        "kind": str(getattr(trained.accelerator.distributed_type, "value", "")),
        "files": sorted(path.name for path in Path(OUTPUT, f"fsdp{version}", "final").glob("*")),
    }  # fmt: skip


def fsdp1() -> dict[str, Any]:
    return fsdp(1)


def fsdp2() -> dict[str, Any]:
    return fsdp(2)


if __name__ == "__main__":
    report(**{name: globals()[name]() for name in sys.argv[1:]})
