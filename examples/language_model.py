"""Train a small byte-level language model on the source of Python's standard library.

python examples/language_model.py
accelerate launch --cpu --num_processes 2 examples/language_model.py --gradient_accumulation_steps 2
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from curves import plot_curves
from offline_data import python_source
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from watch_option import add_watch

from accelerate import Accelerator
from accelerate.utils import set_seed

NUM_BYTES = 256


class ByteModel(nn.Module):
    """A causal transformer over bytes, with the embedding tied to the output."""

    def __init__(self, width: int, num_layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=4,
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, NUM_BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.output.weight = self.embedding.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.position[:length]
        return self.output(self.layers(hidden, mask=self.mask[:length, :length], is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=16, help="windows a process and step")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--windows_per_epoch", type=int, default=2048)
    parser.add_argument("--length", type=int, default=128, help="bytes a window")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--plot", help="write the curves to this PNG file")
    add_watch(parser)
    arguments = parser.parse_args()

    accelerator = Accelerator(
        cpu=arguments.cpu,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
    )
    set_seed(42)
    train_set, held_out_set = python_source(
        arguments.length, arguments.windows_per_epoch, arguments.windows_per_epoch // 8
    )
    accelerator.print(f"data: {len(train_set.bytes):,} bytes of Python source, {len(held_out_set.bytes):,} held out")
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    held_out_loader = DataLoader(held_out_set, batch_size=arguments.batch_size)
    model = ByteModel(arguments.width, arguments.num_layers, arguments.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.num_epochs * len(train_loader))
    model, optimizer, train_loader, held_out_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader, scheduler
    )

    def next_byte_losses(windows: torch.Tensor) -> torch.Tensor:
        scores = model(windows[:, :-1])
        return nn.functional.cross_entropy(scores.transpose(1, 2), windows[:, 1:], reduction="none").mean(dim=1)

    history = []
    quiet = None if accelerator.is_local_main_process else True
    for epoch in range(1, arguments.num_epochs + 1):
        model.train()
        started = time.perf_counter()
        losses, num_samples = [], 0
        for windows in tqdm(train_loader, desc=f"epoch {epoch}", leave=False, disable=quiet):
            with accelerator.accumulate(model):
                loss = next_byte_losses(windows).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            num_samples += len(windows) * accelerator.num_processes
        seconds = time.perf_counter() - started

        model.eval()
        held_out = []
        for windows in held_out_loader:
            with torch.no_grad():
                held_out.append(accelerator.gather_for_metrics(next_byte_losses(windows)))
        held_out_loss = torch.cat(held_out).mean().item()
        mean_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
        history.append(
            {
                "epoch": epoch,
                "loss": mean_loss,
                "held_out_perplexity_per_byte": math.exp(held_out_loss),
                "samples_per_second": num_samples / seconds,
            }
        )
        accelerator.print(
            f"epoch {epoch}: loss {mean_loss:.4f}, "
            f"held-out perplexity {math.exp(held_out_loss):.2f} per byte, "
            f"{num_samples / seconds:.0f} samples/s"
        )
    if arguments.plot and accelerator.is_main_process:
        plot_curves({"run": history}, arguments.plot, "A language model on Python's own source")
    accelerator.end_training()


if __name__ == "__main__":
    main()
