"""A model in Llama's shape, written by hand, and the operations of its step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16, datasheets (SXM)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batch."""

    hidden: int = 3072
    inner: int = 8192
    layers: int = 9
    heads: int = 24
    vocabulary: int = 32000
    sequence: int = 2048
    samples: int = 4


LARGE = Shape()  # 1.2 billion parameters, in few blocks: a whole compilation takes time by the block
TINY = Shape(hidden=32, inner=64, layers=2, heads=2, vocabulary=64, sequence=16, samples=2)


class Attention(nn.Module):
    """Causal attention with rotary position embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the attention output of every position over the earlier ones."""
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        q, k = (
            torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1) * sin + t * cos for t in (q, k)
        )
        mixed = nn.functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class LlamaBlock(nn.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states."""
        x = x + self.attention(self.first(x), cos, sin)
        hidden = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


class LlamaShaped(nn.Module):
    """A decoder: embeddings, blocks, a norm, and a head of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.hidden), nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        size = shape.hidden // shape.heads
        angles = torch.outer(torch.arange(shape.sequence), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens."""
        x = self.tokens(tokens)
        length = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


def flops_per_token(shape: Shape, parameters: int) -> float:
    """Return the operations of forward and backward: 6 for each weight in a product, and causal attention's."""
    in_products = parameters - shape.vocabulary * shape.hidden  # the embedding is a look-up
    return 6 * in_products + 6 * shape.layers * shape.sequence * shape.hidden


def peak_flops(device_name: str) -> float | None:
    """Return the datasheet's dense bf16 rate of a device; None for one that isn't listed."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)
