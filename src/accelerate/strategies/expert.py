"""The experts of a layer dealt to ranks, which send each other the tokens that are routed to them.

A module of experts keeps the parameters of all of them stacked (``[experts, ...]``) and is called with tokens sorted by
expert and the number of tokens of each: ``experts(tokens, counts)`` gives one row per token, in the same order. That is
all that is asked of it; each rank then calls it with its own experts' parameters and the tokens of all ranks.

Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, final

import torch
from torch import distributed as dist
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..errors import PreparationError, SettingError
from ..mesh import TOKEN_AXES, Mesh
from .tensor import matching

_MARK = "_deals_its_experts"


def deal_experts(model: torch.nn.Module, mesh: Mesh, config: Any) -> list[torch.nn.Module]:
    """The modules of ``model`` whose experts are dealt over the ``ep`` axis now; none without that axis.

    Raises:
        PreparationError: nothing says where the experts are.
        SettingError: what is named isn't there, or the ranks don't divide the experts.
    """
    size = mesh.size("ep")
    if size == 1:
        return []
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
        _deal(module, mesh)
    return found


def _check_divides(name: str, module: torch.nn.Module, size: int) -> None:
    counts = {parameter.shape[0] if parameter.ndim else 0 for parameter in module.parameters()}
    if len(counts) != 1 or any(count % size or not count for count in counts):
        raise SettingError(
            f"Expert-parallel plan: the parameters of {name!r} have {sorted(counts)} rows. Each needs one row per "
            f"expert, of a number that ep_size={size} divides. Stack the experts' parameters, or change ep_size."
        )


def _deal(module: torch.nn.Module, mesh: Mesh) -> None:
    if module.__dict__.get(_MARK, False):
        return
    axis = mesh.over("ep")
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                piece = distribute_tensor(parameter.detach(), axis, [Shard(0)])
                part._parameters[name] = torch.nn.Parameter(piece, parameter.requires_grad)
    module.forward = _among_ranks(module, module.forward, Desk(mesh.group("ep"), mesh.size("ep")))
    module.__dict__[_MARK] = True


def _among_ranks(module: torch.nn.Module, original: Callable[..., Any], desk: Desk) -> Callable[..., Any]:
    @wraps(original)
    def forward(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        own, own_counts, way_back = desk.dispatch(tokens, counts)
        with _own_experts(module, desk.size):
            found = original(own, own_counts)
        return way_back(found)

    return forward


@contextmanager
def _own_experts(module: torch.nn.Module, size: int) -> Iterator[None]:
    """Inside, the parameters are this rank's pieces, as plain tensors; gradients are means over the ``size`` ranks."""
    held = [(part, dict(part._parameters)) for part in module.modules()]
    for part, parameters in held:
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                del part._parameters[name]
                part.__dict__[name] = _Averaged.apply(parameter.to_local(), size)
    try:
        yield
    finally:
        for part, parameters in held:
            for name in parameters:
                part.__dict__.pop(name, None)
            part._parameters.update(parameters)


@final
class _Averaged(Function):
    """A tensor whose gradient, the sum over the ranks that sent tokens, becomes their mean, as everybody else's is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / ctx.size, None


# -- tokens on their way -----------------------------------------------------------------------------------


@final
class Desk:
    """Where ranks hand over tokens to those that have the experts."""

    def __init__(self, group: Any, size: int) -> None:
        self.group, self.size = group, size

    def dispatch(
        self, tokens: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """The tokens of all ranks for this rank's experts, sorted by expert; their numbers; the way back."""
        asked = counts.to(torch.int64).view(self.size, -1).contiguous()  # by rank: how many for each of its experts
        given = torch.empty_like(asked)
        dist.all_to_all_single(given, asked, group=self.group)
        sent, received = asked.sum(1).tolist(), given.sum(1).tolist()
        arrived: Any = _Carried.apply(tokens, self, received, sent)
        experts = torch.arange(given.shape[1], device=given.device).repeat(self.size)
        order = torch.repeat_interleave(experts, given.flatten()).argsort(stable=True)

        def way_back(rows: torch.Tensor) -> torch.Tensor:
            places = torch.empty_like(order)
            places[order] = torch.arange(len(order), device=order.device)
            home: Any = _Carried.apply(rows[places], self, sent, received)
            return home

        return arrived[order], given.sum(0), way_back

    def carry(self, rows: torch.Tensor, arriving: list[int], leaving: list[int]) -> torch.Tensor:
        """The rows that the ranks have for this one; ``leaving`` says how many of ``rows`` go to each."""
        arrived = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), arriving, leaving, group=self.group)
        return arrived


@final
class _Carried(Function):
    """Rows, where they are needed; their gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, desk: Desk, arriving: list[int], leaving: list[int]) -> torch.Tensor:
        ctx.rest = desk, arriving, leaving
        return desk.carry(rows, arriving, leaving)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        desk, arriving, leaving = ctx.rest
        return desk.carry(gradients[0], leaving, arriving), None, None, None


# -- gradients ---------------------------------------------------------------------------------------------


def average_experts(modules: Iterable[torch.nn.Module], mesh: Mesh, reduces: Callable[[], bool]) -> None:
    """Gradients of experts that nothing shards are averaged over ranks with the same ones, when ``reduces()``."""
    others = [axis for axis in TOKEN_AXES if axis != "ep"]
    group, count = mesh.group(*others), mesh.size(*others)
    if group is None:
        return

    def average(parameter: torch.Tensor) -> None:
        gradient: Any = parameter.grad
        if gradient is not None and reduces():
            own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(own, group=group)
            own.div_(count)

    for module in modules:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)
