"""Checks how much memory training takes at most: ``--peak_memory_upper_bound`` (MB) must hold."""

from __future__ import annotations

import argparse
import gc

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.distributed.random import set_seed


def b2mb(num_bytes: float) -> int:
    """Return bytes as whole megabytes."""
    return int(num_bytes / 2**20)


class TorchTracemalloc:
    """A context that measures the memory added by its block (``used``) and its peak (``peaked``), in MB.

    On a device without a memory account (the CPU), both are those of the process, from the operating system.
    """

    def __enter__(self) -> TorchTracemalloc:
        gc.collect()
        self.begin: int = self._now()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_exception: object) -> None:
        gc.collect()
        self.end, self.peak = self._now(), self._peak()
        self.used, self.peaked = b2mb(self.end - self.begin), b2mb(max(0, self.peak - self.begin))

    def _now(self) -> int:
        if torch.cuda.is_available():
            return torch.cuda.memory_allocated()
        import psutil

        return psutil.Process().memory_info().rss

    def _peak(self) -> int:
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def training_function(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the peak of each epoch, in MB.

    Raises:
        ValueError: a peak is above ``--peak_memory_upper_bound``.
    """
    accelerator = Accelerator()
    set_seed(42)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    dataset = TensorDataset(torch.randn(arguments.n_train, 64), torch.randint(0, 10, (arguments.n_train,)))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    peaks: dict[str, int] = {}
    for epoch in range(arguments.num_epochs):
        with TorchTracemalloc() as memory:
            for inputs, targets in loader:
                accelerator.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        peaks[f"epoch-{epoch}"] = memory.peaked
        accelerator.print(f"epoch {epoch}: {memory.used} MB more than before, {memory.peaked} MB at the peak")
        bound = arguments.peak_memory_upper_bound
        if bound is not None and memory.peaked > bound:
            raise ValueError(f"the peak of {memory.peaked} MB is above --peak_memory_upper_bound {bound}")
    accelerator.end_training()
    return peaks


def main() -> None:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peak_memory_upper_bound", type=float, default=None, help="in MB")
    parser.add_argument("--n_train", type=int, default=320, help="samples")
    parser.add_argument("--num_epochs", type=int, default=1)
    training_function(parser.parse_known_args()[0])


if __name__ == "__main__":
    main()
