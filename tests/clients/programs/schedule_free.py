"""schedulefree's optimizer, which has modes of its own, in a loop and in transformers.Trainer."""

from __future__ import annotations

from typing import Any

import schedulefree
import torch
from report import report, weight_of
from settings import build, results

from accelerate import Accelerator


def loop() -> dict[str, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05, warmup_steps=2)
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, batch_size=3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        model.train()
        optimizer.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            errors = [(model(batch).squeeze(-1) - batch.sum(-1)).square() for batch in loader]
        losses.append(accelerator.gather(torch.cat(errors)).mean().item())
    return {"losses": losses, "weight": weight_of(accelerator.unwrap_model(model))}


def trainer() -> dict[str, Any]:
    options = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "eval_strategy": "steps"}
    trained = build("schedule_free", **options, eval_steps=3, warmup_steps=2)
    trained.train()
    return results(trained)


report(loop=loop(), trainer=trainer())
