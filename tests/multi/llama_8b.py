"""A training script of plain torch for a model of Llama's shape with 8 billion parameters; for test_pretend.py."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

WIDTH, HEADS, KEY_HEADS, HIDDEN, LAYERS, WORDS, LENGTH = 4096, 32, 8, 14336, 32, 128256, 4096
HEAD = WIDTH // HEADS


class Norm(nn.Module):
    """Root-mean-square normalization."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Block(nn.Module):
    """Attention with fewer heads for keys and values, and a gated layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape

        def heads(values):
            return values.view(batch, length, -1, HEAD).transpose(1, 2)

        def rotated(values):
            left, right = values.chunk(2, -1)
            return torch.cat([left * cos - right * sin, left * sin + right * cos], -1).to(values.dtype)

        normed = self.first(x)
        q, k, v = rotated(heads(self.q(normed))), rotated(heads(self.k(normed))), heads(self.v(normed))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """The whole model."""

    tp_plan = {
        **{f"layers.*.{name}": "colwise" for name in ("q", "k", "v", "gate", "up")},
        **{f"layers.*.{name}": "rowwise" for name in ("o", "down")},
    }

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("frequencies", 500000.0 ** -(torch.arange(0, HEAD, 2) / HEAD), persistent=False)

    def forward(self, words):
        x = self.embed(words)
        angles = torch.outer(torch.arange(words.shape[1]).float(), self.frequencies)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return self.head(self.norm(x))


accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16",
    parallelism_config=ParallelismConfig(dp_replicate_size=32, dp_shard_size=64, tp_size=8),
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Block"
    ),
)
model = Llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(TensorDataset(torch.randint(0, WORDS, (8192, LENGTH + 1))), batch_size=1, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (words,) in loader:
    logits = model(words[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), words[:, 1:].flatten())
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
