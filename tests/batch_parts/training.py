"""Loops that train small models of each kind, and the hash of all that they leave."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig, set_seed

NUM_PARTS = 12
NUM_CLASSES = 5


class Dense(nn.Module):
    """A perceptron with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, NUM_CLASSES)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Transformer(nn.Module):
    """One layer with dropout, and tied weights at both ends; it predicts the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(inputs.argsort(1).argsort(1) % NUM_CLASSES)).mean(1))


class Convolutional(nn.Module):
    """Convolutions over images that are augmented while they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4, momentum=None)
        self.last = nn.Linear(4, NUM_CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.norm(self.first(inputs.view(-1, 1, 2, 3)))).mean((2, 3)))


class Experts(nn.Module):
    """A mixture of experts, some of which get no sample of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, NUM_CLASSES) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights = self.router(inputs).softmax(1)
        chosen = weights.argmax(1)
        outputs = inputs.new_zeros(len(inputs), NUM_CLASSES)
        for number, expert in enumerate(self.experts):
            own = (chosen == number).nonzero()[:, 0]
            if len(own):  # else the expert has no gradient
                said = expert(inputs[own]) * weights[own, number, None]
                outputs = outputs.to(said.dtype).index_add(0, own, said)  # bfloat16 under FSDP 2
        return outputs


class Recurrent(nn.Module):
    """An LSTM over the elements of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.last = nn.Linear(8, NUM_CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(inputs[..., None])[0][:, -1])


MODELS = {model.__name__: model for model in (Dense, Transformer, Convolutional, Experts, Recurrent)}


class Noisy(Dataset[Any]):
    """Rows that are augmented with all three of the process's random streams."""

    def __init__(self, rows: torch.Tensor, targets: torch.Tensor) -> None:
        self.rows, self.targets = rows, targets

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(6) * 0.1 + random.random() * 0.1 + float(np.random.random()) * 0.1
        return self.rows[index] + noise, self.targets[index]


def data(num_rows: int = 53, *, noisy: bool = False) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(num_rows, 6, generator=generator)
    targets = torch.randint(NUM_CLASSES, (num_rows,), generator=generator)
    return Noisy(rows, targets) if noisy else TensorDataset(rows, targets)


def digest(values: Iterable[Any]) -> str:
    """Return the SHA-256 of tensors and numbers in order."""
    found = hashlib.sha256()
    for value in values:
        whole = getattr(value, "full_tensor", lambda value=value: value)()
        tensor = torch.as_tensor(whole).detach().cpu().contiguous()
        found.update(
            f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


def state_of(accelerator: Accelerator, model: Any, optimizer: Any) -> str:
    """Return the hash of whole weights, buffers and the optimizer's state."""
    states = optimizer.state_dict()["state"]
    return digest(
        [*accelerator.unwrap_model(model).state_dict().values()]
        + [value for number in states for value in states[number].values()]
    )


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    return {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    }[kind]()


def layout_options(layout: str) -> dict[str, Any]:
    """Return the Accelerator's arguments for "replicas", "fsdp2" or "hsdp"."""
    if layout == "replicas":
        return {}
    options: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    if layout == "hsdp":
        size = int(os.environ["WORLD_SIZE"])
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=size // 2)
    return options


def train(
    model: str = "Dense",
    optimizer: str = "adamw",
    num_epochs: int = 2,
    num_steps: int = 1,
    precision: str = "no",
    num_workers: int = 0,
    weighted: bool = False,
    clips: bool = True,
    num_parts: int = NUM_PARTS,
    num_rows: int = 53,
    layout: str = "replicas",
    **options: Any,
) -> list[Any]:
    """Train, evaluate, and return hashes of the state, and numbers that must not depend on the number of ranks."""
    accelerator = Accelerator(
        cpu=True, batch_parts=num_parts, mixed_precision=precision, gradient_accumulation_steps=num_steps,
        **layout_options(layout), **options,
    )  # fmt: skip
    set_seed(3)
    net: Any = MODELS[model]()
    opt: Any = optimizer_of(optimizer, net)
    schedule: Any = torch.optim.lr_scheduler.StepLR(opt, 20, 0.7)
    loader: Any = DataLoader(data(num_rows, noisy=True), batch_size=2, shuffle=True, num_workers=num_workers)
    evaluation: Any = DataLoader(data(19), batch_size=2)
    net, opt, loader, evaluation, schedule = accelerator.prepare(net, opt, loader, evaluation, schedule)
    norms, drawn = [], []
    for _ in range(num_epochs):
        net.train()
        for rows, targets in loader:
            with accelerator.accumulate(net):
                outputs = net(rows + torch.randn(1) * 0.01)
                if weighted:
                    counts = targets != 0
                    losses = F.cross_entropy(outputs.float(), targets, reduction="none") * counts
                    accelerator.backward(losses.sum(), weight=counts.sum())
                else:
                    accelerator.backward(F.cross_entropy(outputs.float(), targets))
                if accelerator.sync_gradients and clips:
                    norms.append(accelerator.clip_grad_norm_(net.parameters(), 0.5))
                opt.step()
                schedule.step()
                opt.zero_grad()
        drawn.append([random.random(), float(np.random.random()), float(torch.rand(()))])
        net.eval()
        outputs = []
        with torch.no_grad():
            for rows, _ in evaluation:
                outputs.append(accelerator.gather_for_metrics(net(rows).float()))
    return [
        state_of(accelerator, net, opt), digest(norms), digest([torch.cat(outputs)]), len(torch.cat(outputs)), drawn,
        schedule.get_last_lr(), opt.num_updates, accelerator.fingerprint(),
    ]  # fmt: skip
