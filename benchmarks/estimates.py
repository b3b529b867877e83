"""Estimated against measured peak memory of a training step: twelve models, in full and in mixed precision.

    python benchmarks/estimates.py [--device cuda]

The estimate is `accelerate estimate-memory`'s: the step is traced without values. The measurement is the same step with
values: on the CPU every allocation and release that torch's profiler reports, on a GPU `max_memory_allocated`. Where
transformers is installed, ten of its architectures (from configurations, a few layers each) follow.

Limit: 10% on each.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from accelerate.guests.estimate.subject import inputs_of_transformers
from accelerate.guests.estimate.trace import loss_of, optimizer_of, recompute_blocks, trace_training

LIMIT = 0.10
VOCABULARY = 1000


@dataclass(frozen=True)
class Subject:
    """A model with its inputs."""

    name: str
    make: Callable[[], nn.Module]
    arguments: Callable[[nn.Module, int, int], Any]
    batch: int
    sequence: int = 1

    def build(self) -> nn.Module:
        """Return the model without values."""
        with torch.device("meta"):
            return self.make()

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> Any:
        """Return the inputs of the model."""
        return self.arguments(model, batch, sequence)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the attention output of every position over the earlier ones."""
        batch, length, width = hidden.shape
        query, key, value = self.into(hidden).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after attention and after the two linear layers."""
        hidden = hidden + self.attention(self.first(hidden))
        return hidden + self.down(nn.functional.gelu(self.up(self.second(hidden))))


class LanguageModel(nn.Module):
    """A small GPT; ``tied`` makes the head the embedding."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits and the loss of the next token."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the image with the output of the convolutions added."""
        return torch.relu(image + self.inner(image))


class VisionTransformer(nn.Module):
    """A transformer over the patches of an image."""

    def __init__(self, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 256, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the logits of ten classes."""
        hidden = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(1))


class UNet(nn.Module):
    """A U-Net: downsampling, upsampling, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle, self.up = Residual(32), nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return an image of the same size."""
        wide = torch.relu(self.enter(image))
        deep = self.middle(torch.relu(self.down(wide)))
        return self.leave(torch.cat([wide, self.up(deep)], 1))


class Experts(nn.Module):
    """A dense mixture of experts: every expert on every token, weighted by a gate."""

    def __init__(self, width: int = 64, count: int = 4) -> None:
        super().__init__()
        self.gate, self.embedding = nn.Linear(width, count), nn.Embedding(VOCABULARY, width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs."""
        hidden = self.embedding(tokens)
        weights = self.gate(hidden).softmax(-1)
        return torch.stack([expert(hidden) for expert in self.experts], -1).mul(weights.unsqueeze(-2)).sum(-1)


class Recurrent(nn.Module):
    """Two recurrent layers and a head."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.inner, self.head = kind(96, 128, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(128, 10)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return ten numbers for every step."""
        return self.head(self.inner(vectors)[0])


class Translator(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(96, 4, 2, 2, 192, batch_first=True)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """Return the decoder's output."""
        return self.inner(source, source[:, : source.shape[1] // 2])


def _classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))


def _convolutions() -> nn.Module:
    layers = [
        nn.Sequential(nn.Conv2d(3 if first else 32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        for first in (True, False, False, False)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _residuals() -> nn.Module:
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)
    return nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), *(Residual(24) for _ in range(3)), *ends)


def _frozen() -> nn.Module:
    model = LanguageModel()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks[2:]:
        block.requires_grad_(True)
    return model


def _rows(model: nn.Module, batch: int, sequence: int) -> Any:
    return (torch.zeros(batch, 256),)


def _images(model: nn.Module, batch: int, sequence: int) -> Any:
    return (torch.zeros(batch, 3, 32, 32),)


def _tokens(model: nn.Module, batch: int, sequence: int) -> Any:
    return (torch.zeros(batch, sequence, dtype=torch.long),)


def _vectors(model: nn.Module, batch: int, sequence: int) -> Any:
    return (torch.zeros(batch, sequence, 96),)


MODELS = (
    Subject("classifier", _classifier, _rows, 512),
    Subject("convolutions", _convolutions, _images, 16),
    Subject("residual network", _residuals, _images, 16),
    Subject("U-Net", UNet, _images, 16),
    Subject("vision transformer", VisionTransformer, _images, 16),
    Subject("language model", LanguageModel, _tokens, 4, 128),
    Subject("tied language model", lambda: LanguageModel(tied=True), _tokens, 4, 128),
    Subject("half-frozen language model", _frozen, _tokens, 4, 128),
    Subject("encoder and decoder", Translator, _vectors, 4, 64),
    Subject("experts", Experts, _tokens, 4, 128),
    Subject("LSTM", lambda: Recurrent(nn.LSTM), _vectors, 16, 24),
    Subject("GRU", lambda: Recurrent(nn.GRU), _vectors, 16, 24),
)


def of_transformers() -> Iterator[Subject]:
    """Yield ten architectures of transformers, a few layers each."""
    import transformers as library

    text: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    }  # fmt: skip
    grouped = text | {"num_key_value_heads": 2}
    image = {key: text[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    image |= {"image_size": 64, "patch_size": 8}
    configs: dict[str, dict[str, Any]] = {
        "GPT2LMHeadModel": {"n_embd": 128, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 256},
        "LlamaForCausalLM": grouped,
        "Qwen2ForCausalLM": grouped,
        "MixtralForCausalLM": grouped | {"num_local_experts": 4},
        "BertForMaskedLM": text,
        "DistilBertForSequenceClassification": {
            "dim": 128, "hidden_dim": 256, "n_layers": 3, "n_heads": 4, "vocab_size": VOCABULARY,
        },
        "T5ForConditionalGeneration": {
            "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
        },
        "ViTForImageClassification": image,
        "ResNetForImageClassification": {
            "embedding_size": 32, "hidden_sizes": [32, 64], "depths": [2, 2], "layer_type": "basic",
        },
        "WhisperForConditionalGeneration": {
            "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": VOCABULARY,
            "num_mel_bins": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
        },
    }  # fmt: skip
    for name, options in configs.items():
        kind = getattr(library, name)

        def make(kind: Any = kind, options: dict[str, Any] = options) -> nn.Module:
            return kind(kind.config_class(**options))

        yield Subject(name, make, inputs_of_transformers, 4, 128)


def measured(subject: Subject, device: str, autocast: torch.dtype | None, recompute: bool) -> int:
    """Return the peak bytes of three training steps."""
    gc.collect()  # what is freed while it is measured has to be from there
    if device == "cpu":
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            _train(subject, device, autocast, recompute)
        return _highest(record)
    module: Any = torch.get_device_module(device)
    module.empty_cache()
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    _train(subject, device, autocast, recompute)
    return module.max_memory_allocated() - before


def _highest(record: Any) -> int:
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


def _train(subject: Subject, device: str, autocast: torch.dtype | None, recompute: bool) -> None:
    model = subject.make().train().to(device)
    if recompute:
        recompute_blocks(model)
    inputs = subject.inputs(model, subject.batch, subject.sequence)
    inputs = (
        {n: v.to(device) for n, v in inputs.items()} if isinstance(inputs, dict) else [v.to(device) for v in inputs]
    )
    optimizer = optimizer_of("adamw", model, torch.device(device))
    for _ in range(3):
        with nullcontext() if autocast is None else torch.autocast(device, autocast):
            output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            loss = loss_of(output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Row:
    """The comparison of one estimate with its measurement."""

    name: str
    estimated: int
    measured: int

    @property
    def error(self) -> float:
        """The relative error of the estimate."""
        return self.estimated / self.measured - 1


def compare(
    subjects: Iterable[Subject], device: str = "cpu", autocast: torch.dtype | None = None, recompute: bool = False
) -> list[Row]:
    """Return the estimate and measurement of each subject."""
    rows = []
    for subject in subjects:
        trace = trace_training(
            subject,
            batch=subject.batch,
            sequence=subject.sequence,
            autocast=autocast,
            recompute=recompute,
            device=device,
        )
        rows.append(Row(subject.name, trace.peak, measured(subject, device, autocast, recompute)))
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    subjects = list(MODELS)
    try:
        subjects += of_transformers()
    except ImportError:
        print("transformers isn't installed: its architectures are left out")
    worst = 0.0
    runs: tuple[tuple[str, dict[str, Any]], ...] = (
        ("float32", {}),
        ("bfloat16 autocast", {"autocast": torch.bfloat16}),
        ("float32, recomputed activations", {"recompute": True}),
    )
    for title, options in runs:
        print(f"\n{title} on {device}\n\n| model | estimated | measured | off by |\n|---|---|---|---|")
        for row in compare(subjects, device, **options):
            worst = max(worst, abs(row.error))
            print(f"| {row.name} | {row.estimated / 2**20:.2f} MB | {row.measured / 2**20:.2f} MB | {row.error:+.2%} |")
    print(f"\nThe worst is off by {worst:.2%}; the limit is {LIMIT:.0%}.")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
