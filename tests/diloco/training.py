"""Training runs under DiLoCo, and the same computed in one process by a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from accelerate import Accelerator, DiLoCo, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.guests.diloco.compression import CODECS

BATCH = 4


class Both(torch.optim.Optimizer):
    """An optimizer that only steps its own two: Muon for matrices, and AdamW for the other parameters."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        self.optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step both."""
        for one in self.optimizers:
            one.step()


class Network(nn.Module):
    """Two layers of odd sizes, which no number of ranks divides."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 33, dtype=dtype)
        self.second = nn.Linear(33, 5, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of five classes."""
        return self.second(torch.tanh(self.first(inputs.to(self.first.weight.dtype)))).float()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, 6, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of ``model`` by name."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "muon":
        return torch.optim.Muon([parameter for parameter in model.parameters() if parameter.ndim == 2], lr=0.01)
    if kind == "both":
        return Both(model)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of one rank's samples in one step."""
    inputs, targets = batch(step, rank)
    return nn.functional.cross_entropy(model(inputs), targets)


def sharded(state_dict_type: str = "FULL_STATE_DICT", **axes: Any) -> Accelerator:
    """An Accelerator with FSDP 2 inside of islands, each parameter sharded by itself."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, state_dict_type=state_dict_type
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**axes))


def train(
    num_steps: int,
    accelerator: Accelerator | None = None,
    *,
    kind: str = "sgd",
    dtype: torch.dtype = torch.float32,
    after_step: Callable[[DiLoCo, int], None] | None = None,
    begin: Callable[[Accelerator], int] = lambda _: 0,
    **arguments: Any,
) -> dict[str, Any]:
    """Train on this rank: weights in the last step and after the context, and the bytes sent."""
    accelerator = accelerator or Accelerator(cpu=True)
    model = Network(dtype)
    model, optimizer = accelerator.prepare(model, optimizer_of(kind, model))
    with DiLoCo(accelerator, model, **arguments) as diloco:
        for step in range(begin(accelerator), num_steps):
            accelerator.backward(loss_of(model, step, accelerator.process_index))
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
            if after_step is not None:
                after_step(diloco, step)
        inside = weights_of(model)
    return {"inside": inside, "after": weights_of(model), "sent": diloco.bytes_sent}


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """Copies of the weights, whole."""
    parameters: list[Any] = list(model.parameters())
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in parameters]


def plain(
    num_steps: int,
    num_islands: int,
    *,
    size: int = 1,
    kind: str = "sgd",
    dtype: torch.dtype = torch.float32,
    inner_steps: int,
    compression: str = "none",
    fragments: int = 1,
    overlap: bool = False,
    overlap_steps: int = 5,
    kept: float = 0.5,
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = lambda outer: torch.optim.SGD(
        outer, lr=0.7, momentum=0.9, nesterov=True
    ),
) -> dict[str, Any]:
    """The same in one process: ``num_islands`` models, and DiLoCo written down parameter by parameter."""
    models = [Network(dtype) for _ in range(num_islands)]
    optimizers = [optimizer_of(kind, model) for model in models]
    parameters = [list(model.parameters()) for model in models]
    numbers = list(range(len(parameters[0])))
    outer = [nn.Parameter(p.detach().float().reshape(-1).clone()) for p in parameters[0]]
    errors = [[torch.zeros_like(one) for one in outer] for _ in range(num_islands)]
    totals = [0] * fragments
    groups: list[list[int]] = [[] for _ in range(fragments)]
    for number in numbers:
        smallest = totals.index(min(totals))
        groups[smallest].append(number)
        totals[smallest] += outer[number].numel()
    outer_optimizers = [make([outer[number] for number in group]) for group in groups]
    delay = overlap_steps if overlap else 0
    pending: dict[int, tuple[int, list[torch.Tensor]]] = {}
    codec = CODECS[compression]

    def apply(fragment: int) -> None:
        for number, mean in zip(groups[fragment], pending.pop(fragment)[1], strict=True):
            outer[number].grad = mean
        outer_optimizers[fragment].step()
        for number in groups[fragment]:
            for own in parameters:
                new = outer[number].detach().view(own[number].shape)
                own[number].copy_(own[number].float() * kept + new * (1 - kept) if delay else new)

    @torch.no_grad()
    def send(fragment: int, due: int) -> None:
        means = []
        for number in groups[fragment]:
            decoded = []
            for island, own in enumerate(parameters):
                begin = outer[number].detach().to(dtype).float()
                change = begin - own[number].float().reshape(-1) + errors[island][number]
                decoded.append(codec.decode(codec.encode(change), change.numel()))
                if compression != "none":
                    errors[island][number] = change - decoded[-1]
            means.append(mean_of(decoded))
        pending[fragment] = due, means

    for step in range(num_steps):
        for island, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for rank in range(island * size, (island + 1) * size):
                (loss_of(model, step, rank) / size).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for fragment in range(fragments):
                if fragment in pending and pending[fragment][0] == step + 1:
                    apply(fragment)
            for fragment in range(fragments):
                if (step + 1 - (fragment + 1) * inner_steps // fragments) % inner_steps == 0:
                    send(fragment, step + 1 + delay)
                    if not delay:
                        apply(fragment)
    inside = [weights_of(model) for model in models]
    with torch.no_grad():
        for fragment in list(pending):
            apply(fragment)
        for number in numbers:
            mean = mean_of(
                [own[number].float().reshape(-1) - errors[island][number] for island, own in enumerate(parameters)]
            )
            for own in parameters:
                own[number].copy_(mean.view(own[number].shape))
    return {"inside": inside, "after": weights_of(models[0])}


def mean_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean, added in order."""
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total / len(values)


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors hold the same bits."""
    return len(first) == len(second) and all(map(torch.equal, first, second))
