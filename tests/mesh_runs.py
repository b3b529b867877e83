"""The same short training of a small language model on any mesh, for tests that compare it with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import (
    ExpertParallelConfig,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from tests.slow import IS_SLOW

#: `make meshes` trains four times as long: fewer updates find the same errors, and ranks communicate in each.
NUM_UPDATES = 20 if IS_SLOW else 5
LENGTH, WORDS, WIDTH = 16, 32, 16
BATCH = 8  # samples that all ranks read at once
V2 = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": "Layer"}
PLAN = {
    "embedding": "embedding_rowwise",
    "layers.*.self_attn.query": "colwise",
    "layers.*.self_attn.key": "colwise",
    "layers.*.self_attn.value": "colwise",
    "layers.*.self_attn.out": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}
SEQUENCE_PLAN = {
    "embedding": "embedding_to_sequence",
    "places": "embedding_to_sequence",
    "layers.*.first": "sequence",
    "layers.*.self_attn.query": "colwise_from_sequence",
    "layers.*.self_attn.key": "colwise_from_sequence",
    "layers.*.self_attn.value": "colwise_from_sequence",
    "layers.*.self_attn.out": "rowwise_to_sequence",
    "layers.*.second": "sequence",
    "layers.*.up": "colwise_from_sequence",
    "layers.*.down": "rowwise_to_sequence",
    "norm": "sequence",
    "head": "colwise_gather_from_sequence",
}


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What every place takes from the others."""
        parts = [
            project(hidden).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        ]
        mixed = scaled_dot_product_attention(*parts, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Four two-layer networks, stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, WIDTH, 24) / 4), nn.Parameter(torch.randn(4, 24, WIDTH) / 5)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """A row for each token, which come sorted by expert."""
        parts = zip(tokens.split(counts.tolist()), self.up, self.down, strict=True)
        return torch.cat([torch.relu(part @ up) @ down for part, up, down in parts])


class Mixture(nn.Module):
    """The most likely of four experts, for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the chosen experts say, times how likely they were."""
        tokens = hidden.flatten(0, 1)
        likely, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        said = torch.empty_like(tokens)
        said[order] = self.experts(tokens[order], chosen.bincount(minlength=4)).to(said.dtype)
        return (said * likely.unsqueeze(-1)).view_as(hidden)


class Layer(nn.Module):
    """Attention and a two-layer network or a mixture of such, each around a residual."""

    def __init__(self, causal: bool = True, mixture: bool = False) -> None:
        super().__init__()
        self.mixture = Mixture() if mixture else None
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn = Attention(causal)
        if not mixture:
            self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next hidden state."""
        hidden = hidden + self.self_attn(self.first(hidden))
        if self.mixture is not None:
            return hidden + self.mixture(self.second(hidden))
        return hidden + self.down(torch.relu(self.up(self.second(hidden))))


class LanguageModel(nn.Module):
    """Two layers between an embedding and a head; ``tied`` makes these two one weight."""

    def __init__(self, tied: bool = False, causal: bool = True, mixture: bool = False) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(causal, mixture), Layer(causal, mixture)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Scores of the next words."""
        hidden = self.embedding(words) + self.places(places)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    @torch.no_grad()
    def generate(self, words: torch.Tensor, count: int) -> torch.Tensor:
        """``words`` and the ``count`` most likely next ones."""
        for _ in range(count):
            scores = self(words, torch.arange(words.shape[1]).expand_as(words))
            words = torch.cat([words, scores[:, -1:].argmax(-1)], 1)
        return words


def samples(count: int = BATCH * 2 * NUM_UPDATES) -> TensorDataset:
    """Words and the words that follow them, always the same."""
    words = torch.randint(0, WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def accelerator(
    degrees: dict[str, int] | None = None,
    fsdp: dict[str, Any] | None = None,
    *,
    plan: dict[str, Any] | None = None,
    communication: str = "allgather",
    pipeline: dict[str, Any] | None = None,
    cpu: bool = True,
    **arguments: Any,
) -> Accelerator:
    """An Accelerator for a mesh of ``degrees``; none: one process, or replicas."""
    config = None
    if degrees is not None:
        handlers: dict[str, Any] = {}
        if degrees.get("tp", 1) > 1:
            handlers["tp_handler"] = TorchTensorParallelConfig(plan=PLAN if plan is None else plan)
        if degrees.get("cp", 1) > 1:
            handlers["cp_handler"] = TorchContextParallelConfig(cp_comm_strategy=communication)
        if degrees.get("ep", 1) > 1:
            handlers["ep_handler"] = ExpertParallelConfig(plan=["layers.*.mixture.experts"])
        if degrees.get("pp", 1) > 1:
            handlers["pp_handler"] = PipelineParallelConfig(**pipeline or {})
        config = ParallelismConfig(
            **{f"{axis}_size": size for axis, size in degrees.items()}, sp_backend="torch", **handlers
        )
    return Accelerator(
        cpu=cpu,
        gradient_accumulation_steps=2,
        fsdp_plugin=None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp),
        parallelism_config=config,
        **arguments,
    )


def prepared(run: Accelerator, *, updates: int = NUM_UPDATES, double: bool = False, **shape: bool) -> Any:
    """Model, optimizer, schedule and loader of the run."""
    torch.manual_seed(0)
    model = LanguageModel(**shape).to(torch.float64 if double else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shares = run.mesh.data_share().count
    per_update = 1 if run.scheduler_mode == "updates" else shares
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 0.95 ** (count // per_update))
    loader = DataLoader(samples(BATCH * 2 * updates), batch_size=BATCH // shares)
    return run.prepare(model, optimizer, schedule, loader)


def mean_loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Of the words that follow."""
    return cross_entropy(scores.flatten(0, 1), following.flatten())


def steps(run: Accelerator, objects: Any, *, weighted: bool = False) -> dict[str, list[float]]:
    """One pass with accumulation, clipping and a schedule: losses and norms."""
    model, optimizer, schedule, loader = objects
    losses: list[float] = []
    norms: list[float] = []
    for words, following in loader:
        places = torch.arange(LENGTH, device=words.device).repeat(len(words), 1)
        buffers = [words, following, places]
        with (
            run.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)),
            run.accumulate(model),
        ):
            if run.mesh.size("pp") > 1:
                loss = run.pipeline_step(model, ((words, places), following), mean_loss)
            else:
                scores = model(words, places).flatten(0, 1)
                loss = cross_entropy(scores, following.flatten(), reduction="sum" if weighted else "mean")
                run.backward(loss, weight=following.numel()) if weighted else run.backward(loss)
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(float(run.reduce(loss.detach() / (following.numel() if weighted else 1), "mean")))
    return {"losses": losses, "norms": norms}


def second_pass(run: Accelerator, objects: Any, folder: Path | None) -> dict[str, Any]:
    """The pass after the one that was saved in ``folder``, by a run that loads it (None: that does both itself)."""
    if folder is None:
        steps(run, objects)
    else:
        with torch.no_grad():
            for parameter in objects[0].parameters():
                parameter.zero_()
        run.load_state(str(folder))
    found = steps(run, objects)
    return {**found, "weights": {name: value.tolist() for name, value in run.get_state_dict(objects[0]).items()}}


def train(
    degrees: dict[str, int] | None = None,
    fsdp: dict[str, Any] | None = None,
    *,
    tied: bool = False,
    causal: bool = True,
    mixture: bool = False,
    weighted: bool = False,
    double: bool = False,
    updates: int = NUM_UPDATES,
    **options: Any,
) -> dict[str, Any]:
    """The whole run: losses, norms and the weights at the end."""
    run = accelerator(degrees, fsdp, **options)
    objects = prepared(run, tied=tied, causal=causal, mixture=mixture, double=double, updates=updates)
    found = steps(run, objects, weighted=weighted)
    weights = run.get_state_dict(objects[0])
    return {**found, "weights": {name: value.tolist() for name, value in weights.items()}}
