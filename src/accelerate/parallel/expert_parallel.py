"""Expert parallelism: the experts of a layer sharded over ranks, with dispatch and combine of tokens by all-to-all.

A module of experts keeps the parameters of all of them stacked (``[experts, ...]``) and is called with tokens sorted by
expert and the number of tokens of each: ``experts(tokens, counts)`` returns one row per token, in the same order. Each
rank then calls it with its own experts' parameters and the tokens of all ranks.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, final

import torch
from torch import distributed as dist
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..distributed.mesh import Mesh
from ..errors import PreparationError, SettingError
from ..modules import replace_tensors
from ..plugins.parallelism import ParallelismConfig
from .tensor_parallel import matching

_IS_EXPERT_PARALLEL = "_is_expert_parallel"


def shard_experts(model: torch.nn.Module, mesh: Mesh, parallelism: ParallelismConfig | None) -> list[torch.nn.Module]:
    """Shard the experts of ``model`` over the ``ep`` axis, if there is one; return the modules that hold them.

    Raises:
        PreparationError: neither the model nor the config names the experts.
        SettingError: a named module doesn't exist, or the number of ranks doesn't divide the number of experts.
    """
    size = mesh.size("ep")
    if size == 1:
        return []
    config = None if parallelism is None else parallelism.ep_handler
    patterns = getattr(config, "plan", None) or getattr(model, "ep_plan", None)
    if not patterns:
        raise PreparationError(
            f"{type(model).__name__} doesn't say which of its modules hold experts. Give ParallelismConfig(ep_handler="
            'ExpertParallelConfig(plan=["layers.*.experts"])), or the model an attribute `ep_plan`.'
        )
    found: list[torch.nn.Module] = []
    for pattern in patterns:
        modules = list(matching(model, pattern))
        if not modules:
            raise SettingError(
                f"Expert-parallel plan: {pattern!r} is no module of {type(model).__name__}. Names are those of "
                "model.named_modules(); * stands for any one part."
            )
        for name, module in modules:
            _check_divides(name, module, size)
            found.append(module)
    for module in found:
        _shard(module, mesh)
    return found


def _check_divides(name: str, module: torch.nn.Module, size: int) -> None:
    counts = {parameter.shape[0] if parameter.ndim else 0 for parameter in module.parameters()}
    if len(counts) != 1 or any(count % size or not count for count in counts):
        raise SettingError(
            f"Expert-parallel plan: the parameters of {name!r} have {sorted(counts)} rows. Each needs one row per "
            f"expert, of a number that ep_size={size} divides. Stack the experts' parameters, or change ep_size."
        )


def _shard(module: torch.nn.Module, mesh: Mesh) -> None:
    if module.__dict__.get(_IS_EXPERT_PARALLEL, False):
        return
    axis = mesh.over("ep")

    def shard(parameter: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(distribute_tensor(parameter.detach(), axis, [Shard(0)]), parameter.requires_grad)

    replace_tensors(module, shard)
    module.forward = _with_token_dispatch(module, module.forward, TokenDispatcher(mesh.group("ep"), mesh.size("ep")))
    module.__dict__[_IS_EXPERT_PARALLEL] = True


def _with_token_dispatch(
    module: torch.nn.Module, original: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dispatcher: TokenDispatcher
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    @wraps(original)
    def forward(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        own, own_counts, combine = dispatcher.dispatch(tokens, counts)
        with _local_experts(module, dispatcher.size):
            found = original(own, own_counts)
        return combine(found)

    return forward


@contextmanager
def _local_experts(module: torch.nn.Module, size: int) -> Iterator[None]:
    """Replace the parameters by this rank's shards as plain tensors; average gradients over the ``size`` ranks."""
    own_parameters = [(part, dict(part._parameters)) for part in module.modules()]
    for part, parameters in own_parameters:
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                del part._parameters[name]
                part.__dict__[name] = _Averaged.apply(parameter.to_local(), size)
    try:
        yield
    finally:
        for part, parameters in own_parameters:
            for name in parameters:
                part.__dict__.pop(name, None)
            part._parameters.update(parameters)


@final
class _Averaged(Function):
    """The identity; its backward divides the gradient, a sum over the ranks that sent tokens, by their number."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / ctx.size, None


# -- dispatch and combine ----------------------------------------------------------------------------------


@final
class TokenDispatcher:
    """The all-to-all exchange of tokens between ranks, each of which has some of the experts."""

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self.group = group
        self.size: int = size

    def dispatch(
        self, tokens: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Send tokens to their experts' ranks; return received tokens by expert, their counts, and ``combine``."""
        sent_counts = counts.to(torch.int64).view(self.size, -1).contiguous()  # [ranks, experts of a rank]
        counts_received = torch.empty_like(sent_counts)
        dist.all_to_all_single(counts_received, sent_counts, group=self.group)
        sent, received = sent_counts.sum(1).tolist(), counts_received.sum(1).tolist()
        arrived: Any = _SendTokens.apply(tokens, self, received, sent)
        experts = torch.arange(counts_received.shape[1], device=counts_received.device).repeat(self.size)
        order = torch.repeat_interleave(experts, counts_received.flatten()).argsort(stable=True)

        def combine(rows: torch.Tensor) -> torch.Tensor:
            places = torch.empty_like(order)
            places[order] = torch.arange(len(order), device=order.device)
            combined: Any = _SendTokens.apply(rows[places], self, sent, received)
            return combined

        return arrived[order], counts_received.sum(0), combine

    def exchange(self, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> torch.Tensor:
        """Exchange rows by all-to-all; ``leaving`` and ``arriving`` count the rows to and from each rank."""
        arrived = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), arriving, leaving, group=self.group)
        return arrived


@final
class _SendTokens(Function):
    """An all-to-all of rows; the gradients are exchanged the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, dispatcher: TokenDispatcher, arriving: list[int], leaving: list[int]
    ) -> torch.Tensor:
        ctx.rest = dispatcher, arriving, leaving
        return dispatcher.exchange(rows, arriving, leaving)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dispatcher, arriving, leaving = ctx.rest
        return dispatcher.exchange(gradients[0], leaving, arriving), None, None, None
