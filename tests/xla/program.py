"""Trains on an XLA device, or on the CPU for comparison, and prints what happened as one line of JSON.

`python program.py MODE [--folder FOLDER]`, where MODE is cpu, one, spmd or fsdp; PJRT_DEVICE and CPU_NUM_DEVICES say
what the devices are.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_BATCHES = 12


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs, and what was learned about them."""
        return inputs + self.down(torch.relu(self.up(inputs)))


class Network(nn.Module):
    """Two blocks between an embedding and a head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of every word, for each place."""
        hidden = self.embedding(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


def words() -> TensorDataset:
    """Sentences of six words, always the same; the last batch has fewer."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, 24, (8 * NUM_BATCHES - 3, 6), generator=generator))


def prepared(mode: str, precision: str) -> tuple[Any, ...]:
    """The Accelerator, and the prepared objects of the run."""
    if mode == "spmd":
        import torch_xla.runtime

        torch_xla.runtime.use_spmd()
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, set_seed

    wraps = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Block"}
    run = Accelerator(
        cpu=mode == "cpu",
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **wraps) if mode == "fsdp" else None,
    )
    set_seed(0)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.95**count)
    loader = DataLoader(words(), batch_size=8, shuffle=True)
    return run, *run.prepare(model, optimizer, schedule, loader)


def train(run: Any, model: Any, optimizer: Any, schedule: Any, loader: Any, stop: int | None = None) -> dict[str, Any]:
    """An epoch, or as much of it as was left; or up to batch ``stop``."""
    losses, norms = [], []
    for number, (sentences,) in enumerate(loader, 1):
        with run.accumulate(model):
            scores = model(sentences[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), sentences[:, 1:].flatten())
            run.backward(loss)
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(run.gather_for_metrics(loss.detach()).mean()))
        if number == stop:
            break
    return {"losses": losses, "norms": norms}


def main() -> None:
    """The run has happened, and its numbers are on the last line of the output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("cpu", "one", "spmd", "fsdp"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--precision", default="no")
    parser.add_argument("--task", choices=("train", "save", "load"), default="train")
    args = parser.parse_args()
    run, model, optimizer, schedule, loader = prepared(args.mode, args.precision)
    told: dict[str, Any] = {"device": str(run.device), "type": str(run.distributed_type.value)}
    if args.task == "load":
        run.load_state(str(args.folder))
    told |= train(run, model, optimizer, schedule, loader, stop=4 if args.task == "save" else None)
    if args.task == "save":
        run.save_state(str(args.folder))
    told["weights"] = {name: value.tolist() for name, value in run.get_state_dict(model).items()}
    told["is_tied"] = model.head.weight is model.embedding.weight
    if args.mode != "cpu":
        import torch_xla
        import torch_xla.runtime

        told["programs"] = torch_xla.runtime.get_num_cached_compilation_graph()
        told["sharding"] = torch_xla._XLAC._get_xla_sharding_spec(model.layers[0].up.weight)
    run.end_training()
    os.write(1, (json.dumps(told) + "\n").encode())


if __name__ == "__main__":
    main()
