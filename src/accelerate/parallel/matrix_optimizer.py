"""Optimizers of whole matrices (Muon, Shampoo, ...) under sharding: each matrix is updated once, on its owner.

Before the step of such an optimizer, every sharded parameter and its gradient are gathered on one rank, the owner. On
each rank, the optimizer's own step then updates the matrices of that rank. Afterwards the new parameters are scattered
to their shards. Optimizer state stays on the owner. An update is bit for bit the same as on one process.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable for LLM
Training", 2025.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .matrix_exchange import Matrix, MatrixExchange, Shard, gather, scatter

#: The attribute of an optimizer, and the key of a parameter group, that say whether it needs whole matrices.
DECLARATION: Final = "needs_whole_matrices"


def needs_whole_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` declares that it needs whole matrices; torch's Muon does by default."""
    muon = getattr(torch.optim, "Muon", None)  # since torch 2.9
    return bool(getattr(optimizer, DECLARATION, muon is not None and isinstance(optimizer, muon)))


def step_on_whole_matrices(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Register the hooks with which ``optimizer`` steps on whole matrices, if it needs them and trains shards.

    If ``optimizer`` only steps other optimizers, which it keeps as attributes, this applies to those instead.

    Args:
        device: the device on which this process communicates.
    """
    is_declared = needs_whole_matrices(optimizer)
    for one in stepping(optimizer):
        trained = [parameter for group in one.param_groups for parameter in group["params"]]
        if one not in _STEPS and (is_declared or needs_whole_matrices(one)) and any(map(_is_split, trained)):
            steps = _STEPS[one] = WholeMatrixSteps(device)
            one.register_step_pre_hook(steps.begin)
            one.register_step_post_hook(steps.end)


def shard_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard the optimizer state that owners hold whole, in the layout of its parameters; a collective."""
    for one in stepping(optimizer):
        steps = _STEPS.get(one)
        if steps is not None:
            steps.shard_state(one)


def exchange_among(optimizer: torch.optim.Optimizer, ranks: Collection[int] | None) -> None:
    """Let only ``ranks`` own matrices of ``optimizer``; None for all ranks with shards of them.

    Whole state that :func:`shard_state` hasn't sharded before is lost.
    """
    for one in stepping(optimizer):
        if one in _STEPS:
            _STEPS[one].restart(ranks)


def stepping(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``optimizer`` keeps as attributes, also in lists and dicts; if none, itself."""

    def values() -> Iterator[object]:
        for value in vars(optimizer).values():
            inside: Iterable[object] = value.values() if isinstance(value, dict) else [value]
            yield from value if isinstance(value, (list, tuple)) else inside

    return [value for value in values() if isinstance(value, torch.optim.Optimizer)] or [optimizer]


@final
class WholeMatrixSteps:
    """The hooks around the ``step`` of one optimizer of whole matrices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart(None)
        # During a step: the sharded parameters of each group, and their replacements by parameter.
        self._groups: list[list[torch.Tensor]] = []
        self._wholes: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._shards: list[tuple[DTensor, Shard]] = []

    def restart(self, ranks: Collection[int] | None) -> None:
        """Assign owners anew in the next step, among ``ranks`` only; None for all ranks that hold shards."""
        self._ranks = ranks
        self._exchanges: dict[DeviceMesh, MatrixExchange] = {}
        self._matrices: dict[torch.Tensor, Matrix] = {}
        # The same objects in every step: some optimizers keep values by parameter outside of their state.
        self._owned: dict[torch.Tensor, torch.nn.Parameter] = {}

    # -- around a step -------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the sharded parameters by the whole ones of this rank, with their gradients and state."""
        self._restore(optimizer)  # after a step that raised
        args, kwargs = _with_known_loss(args, kwargs)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        chosen = [p for group in optimizer.param_groups if group.get(DECLARATION, True) for p in group["params"]]
        sharded = [parameter for parameter in chosen if isinstance(parameter, DTensor)]
        trained = [parameter for parameter in sharded if parameter.grad is not None]
        self._gather([parameter for parameter in trained if _is_split(parameter)], optimizer)
        for parameter in trained:
            if not _is_split(parameter):  # every rank has the whole
                self._put(parameter, _local(parameter), _local(parameter.grad, parameter), optimizer)
        left_out = set(sharded)
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            # In place: some optimizers keep the list itself.
            group["params"][:] = [
                self._wholes.get(parameter, parameter)
                for parameter in parameters
                if parameter in self._wholes or parameter not in left_out
            ]
        return args, kwargs

    @torch.no_grad()
    def end(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Copy the updated matrices from their owners into all shards, and restore the optimizer's parameters."""
        for parameter, shard in self._shards:
            whole = self._wholes.get(parameter)
            shard.whole = None if whole is None else whole.detach()
        shards = [shard for _, shard in self._shards]
        self._restore(optimizer)
        scatter(shards)

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the sharded parameters back into the optimizer, with the state of the whole ones."""
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=False):
            group["params"][:] = parameters
        for parameter, whole in self._wholes.items():
            if whole in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(whole)
            whole.data, whole.grad = whole.data.new_empty(0), None
        self._groups, self._wholes, self._shards = [], {}, []

    def _gather(self, parameters: list[DTensor], optimizer: torch.optim.Optimizer) -> None:
        """Gather ``parameters``, their gradients, and state that was loaded in shards, on the owners."""
        matrices = self._matrices_of(parameters)
        values = [Shard(matrix, _local(p)) for p, matrix in zip(parameters, matrices, strict=True)]
        gradients = [Shard(matrix, _local(p.grad, p)) for p, matrix in zip(parameters, matrices, strict=True)]
        loaded: list[tuple[dict[str, Any], str, Shard]] = []
        for parameter, matrix in zip(parameters, matrices, strict=True):
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, DTensor):
                    loaded.append((state, name, Shard(matrix, _local(value, parameter))))
        gather([shard for pair in zip(values, gradients, strict=True) for shard in pair])
        gather(shard for _, _, shard in loaded)
        for state, name, shard in loaded:
            state[name] = shard.whole
        for parameter, value, gradient in zip(parameters, values, gradients, strict=True):
            if value.whole is not None and gradient.whole is not None:
                self._put(parameter, value.whole, gradient.whole, optimizer)
            else:
                optimizer.state.pop(parameter, None)
        self._shards = list(zip(parameters, values, strict=True))

    def _put(
        self, parameter: DTensor, value: torch.Tensor, gradient: torch.Tensor, optimizer: torch.optim.Optimizer
    ) -> None:
        """Replace ``parameter`` by a whole parameter with its state."""
        whole = self._owned.setdefault(parameter, torch.nn.Parameter(value, parameter.requires_grad))
        whole.data, whole.grad = value, gradient
        self._wholes[parameter] = whole
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[whole] = {
                name: _local(value) if isinstance(value, DTensor) else value for name, value in state.items()
            }

    def _matrices_of(self, parameters: list[DTensor]) -> list[Matrix]:
        """Return the matrices of ``parameters``; only new ones get an owner."""
        new: dict[DeviceMesh, list[DTensor]] = {}
        for parameter in parameters:
            if parameter not in self._matrices:
                new.setdefault(parameter.device_mesh, []).append(parameter)
        for mesh, same in new.items():
            if mesh not in self._exchanges:
                self._exchanges[mesh] = MatrixExchange(mesh, self._device, self._ranks)
            self._matrices.update(zip(same, self._exchanges[mesh].assign_owners(same), strict=True))
        return [self._matrices[parameter] for parameter in parameters]

    # -- state ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def shard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the owners' whole state by shards, and copy values of another shape to all ranks."""
        outlines = self._gather_outlines(optimizer)
        shards: list[Shard] = []
        for (parameter, matrix), outline in zip(self._matrices.items(), outlines, strict=True):
            assert isinstance(parameter, DTensor), "only sharded parameters have owners"
            for name, value in outline.items():
                state = optimizer.state[parameter]
                if isinstance(value, _Shaped):
                    shard = Shard(matrix, torch.empty_like(_local(parameter), dtype=value.dtype), state.get(name))
                    shards.append(shard)
                    state[name] = sharded_as(parameter, shard.local)
                elif not matrix.is_owned:
                    state[name] = value
        scatter(shards)
        for group in optimizer.param_groups:  # the order in which every rank gathers them
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)

    def _gather_outlines(self, optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
        """Return by parameter a description of the whole state on its owner."""
        own: dict[int, dict[str, object]] = {}
        for number, (parameter, matrix) in enumerate(self._matrices.items()):
            if matrix.is_owned and parameter in optimizer.state:
                state = optimizer.state[parameter].items()
                own[number] = {
                    name: _Shaped(value.dtype)
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                    else value
                    for name, value in state
                    if not isinstance(value, DTensor)
                }
        found: dict[MatrixExchange, list[dict[int, dict[str, object]]]] = {}
        for exchange in self._exchanges.values():
            found[exchange] = [{} for _ in range(exchange.size)]
            dist.all_gather_object(found[exchange], own, group=exchange.group)
        return [
            found[matrix.exchange][matrix.owner].get(number, {})
            for number, matrix in enumerate(self._matrices.values())
        ]


_STEPS: Final[WeakKeyDictionary[torch.optim.Optimizer, WholeMatrixSteps]] = WeakKeyDictionary()


@final
@dataclass(frozen=True)
class _Shaped:
    """The description of a tensor with its parameter's shape."""

    dtype: torch.dtype


def _is_split(parameter: torch.Tensor) -> bool:
    """Return whether this rank holds only a part of ``parameter``."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in parameter.placements)


def _local(tensor: torch.Tensor | None, like: DTensor | None = None) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, sharing its memory if it is sharded like ``like``."""
    assert isinstance(tensor, DTensor), "what belongs to a sharded parameter is sharded"
    if like is not None and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local().detach()


def sharded_as(parameter: DTensor, shard: torch.Tensor) -> DTensor:
    """Return ``shard`` as a DTensor that is sharded like ``parameter``."""
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def _with_known_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure in the arguments of ``step``, if any, and replace it by one that returns its loss."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
    if closure is None:
        return args, kwargs
    with torch.enable_grad():  # before gradients are gathered, because the closure computes them
        loss = closure()
    if len(args) > 1:
        return (args[0], lambda: loss, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}
