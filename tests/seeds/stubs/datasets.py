"""Stands in for the `datasets` library: seven items that fit a Transformer of width 8."""

import torch


def load_dataset(name):
    generator = torch.Generator().manual_seed(len(name))
    return [(torch.randn(4, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(7)]
