"""Tensor parallelism by a plan: layers sharded over ranks that share samples.

A plan maps patterns of layer names to parallel styles::

    TorchTensorParallelConfig(plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019;
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Works on CPU ranks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, final

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..distributed.mesh import Mesh
from ..distributed.world import World
from ..errors import PreparationError, SettingError
from ..logging import MultiProcessAdapter, get_logger
from ..modules import Place, get_model_tp_size, is_sharded, parameter_places, put_parameter
from ..plugins.parallelism import ParallelismConfig, TorchTensorParallelConfig
from ..settings.option import nearest
from ..torch_private.distributed import overlap_tensor_parallel
from ..training.oom_retry import Retryable, RetryMode
from ..training.open_window import GradientHolder
from .base import StrategyOptions
from .gradients import PlainGradients
from .rebind import canonical_name
from .replicas import broadcast, synchronize_streams_of_torch
from .sharded_strategy import ShardedState, ShardedStrategy, outer_units
from .state import ModelState

logger: MultiProcessAdapter = get_logger(__name__)

_SEQUENCE = Shard(1)

#: The styles of plans, among them those of transformers' plans for dense layers.
STYLES: Final[dict[str, Callable[[], ParallelStyle]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # Between these, activations are sharded along the sequence (dimension 1).
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "colwise_from_sequence": lambda: ColwiseParallel(input_layouts=_SEQUENCE),
    "rowwise_to_sequence": lambda: RowwiseParallel(output_layouts=_SEQUENCE),
    "embedding_to_sequence": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE),
    "colwise_gather_from_sequence": lambda: ColwiseParallel(input_layouts=_SEQUENCE, output_layouts=Replicate()),
}
_OTHER_SPELLINGS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "sequence_parallel": "sequence",
}

Plan = Mapping[str, "str | ParallelStyle"]


def parallelize(model: torch.nn.Module, mesh: Mesh, parallelism: ParallelismConfig | None) -> None:
    """Shard the layers of ``model`` over the ``tp`` axis of ``mesh``, by the configured plan or the model's own.

    Layers that the plan doesn't name are replicated. A model that was loaded in shards stays unchanged.

    Raises:
        PreparationError: the model has no plan, or was loaded for another number of ranks.
        SettingError: the plan names layers that don't exist or can't be sharded.
    """
    size = mesh.size("tp")
    if size == 1:
        return
    config = None if parallelism is None else parallelism.tp_handler
    if any(is_sharded(parameter) for parameter in model.parameters()):
        check_size(model, size)
    else:
        _apply(model, mesh, _plan_of(model, config))
    _broadcast_replicated(model, mesh.within("tp"))
    if config is not None and config.enable_async_tp:
        _overlap(mesh)


def check_size(model: torch.nn.Module, size: int) -> None:
    """Raise if ``model`` was loaded in shards for another number of tensor-parallel ranks than ``size``.

    Raises:
        PreparationError: the numbers differ.
    """
    loaded = get_model_tp_size(model)
    if loaded is not None and loaded not in (1, size):  # 1: it was loaded whole
        raise PreparationError(
            f"{type(model).__name__} was loaded for tp_size={loaded}, but ParallelismConfig says tp_size={size}. Load "
            "it whole (without tp_plan): prepare() shards it by the model's own plan."
        )


# -- the plan ----------------------------------------------------------------------------------------------


def _plan_of(model: torch.nn.Module, config: TorchTensorParallelConfig | None) -> Plan:
    plan = getattr(config, "plan", None) or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise PreparationError(
            f"{type(model).__name__} has no plan of how its layers are sharded over tensor-parallel ranks. Give "
            'ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan={"layers.*.up": "colwise", ...})), or the '
            "model an attribute `tp_plan`."
        )
    return plan


def _style_of(pattern: str, word: str | ParallelStyle) -> ParallelStyle:
    if isinstance(word, ParallelStyle):
        return word
    name = _OTHER_SPELLINGS.get(word, word)
    if name not in STYLES:
        near = nearest(str(word), STYLES)
        raise SettingError(
            f"Tensor-parallel plan: {pattern!r}: {word!r} is no style that this version has. Give one of "
            f"{', '.join(STYLES)}, or an object of torch.distributed.tensor.parallel."
            f"{f' Did you mean {near!r}?' if near else ''} A model of transformers whose plan has other words can be "
            'loaded with from_pretrained(..., tp_plan="auto").'
        )
    return STYLES[name]()


def matching(model: torch.nn.Module, pattern: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Iterate over the modules whose name matches ``pattern``, part by part."""
    parts = pattern.split(".")
    for name, module in model.named_modules():
        own = canonical_name(name).split(".")
        if len(own) == len(parts) and all(map(fnmatchcase, own, parts)):
            yield name, module


def _apply(model: torch.nn.Module, mesh: Mesh, plan: Plan) -> None:
    chosen = [entry for pattern, word in plan.items() for entry in _chosen(model, pattern, word, mesh)]
    tied = [places for places in parameter_places(model).values() if len(places) > 1]
    for module, style in chosen:
        parallelize_module(module, mesh.over("tp"), style)
    _retie(tied)


def _chosen(
    model: torch.nn.Module, pattern: str, word: str | ParallelStyle, mesh: Mesh
) -> Iterator[tuple[torch.nn.Module, ParallelStyle]]:
    """Iterate over the modules that match ``pattern``, each with its style."""
    found = list(matching(model, pattern))
    if not found:
        near = nearest(pattern, [canonical_name(name) for name, _ in model.named_modules()])
        raise SettingError(
            f"Tensor-parallel plan: {pattern!r} is no module of {type(model).__name__}."
            f"{f' Did you mean {near!r}?' if near else ''} Names are those of model.named_modules(); * stands for "
            "any one part."
        )
    for name, module in found:
        style = _style_of(pattern, word)
        _check_divides(name, module, style, mesh)
        if isinstance(module, torch.nn.Embedding) and isinstance(style, RowwiseParallel):
            style.input_layouts = (Replicate(),)
        if word == "embedding_to_sequence":
            module.register_forward_pre_hook(_refuse_odd_lengths(mesh.size("tp")))
        yield module, style


def _refuse_odd_lengths(size: int) -> Callable[..., None]:
    """Return a hook that raises unless ``size`` divides the sequence length, as torch assumes."""

    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs and inputs[0].ndim > 1 and inputs[0].shape[1] % size:
            raise PreparationError(
                f"This plan shards sequences over tp_size={size} ranks, and got one of length {inputs[0].shape[1]}. "
                f"Pad it to a multiple of {size}, or use a plan without `..._to_sequence` (to generate, for example)."
            )

    return check


def _check_divides(name: str, module: torch.nn.Module, style: ParallelStyle, mesh: Mesh) -> None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    is_linear = isinstance(module, torch.nn.Linear)
    dim = 0 if isinstance(style, ColwiseParallel) == is_linear else 1
    size = mesh.size("tp")
    if weight.ndim > dim and weight.shape[dim] % size:
        raise SettingError(
            f"Tensor-parallel plan: {name!r} has a weight of shape {list(weight.shape)}, and tp_size={size} doesn't "
            f"divide its {weight.shape[dim]}. Choose another degree ({mesh.equation()}), or leave the layer out."
        )


def _retie(tied: list[list[Place]]) -> None:
    for shared in tied:
        parameters = [module.get_parameter(name) for module, name in shared]
        if len({placements_of(parameter) for parameter in parameters}) > 1:
            owners = " and ".join(f"{type(module).__name__}.{name}" for module, name in shared)
            raise SettingError(
                f"Tensor-parallel plan: {owners} share one weight, but are sharded in different ways. Shard both alike "
                "(an embedding by 'embedding_rowwise' is as a linear by 'colwise'), or neither."
            )
        put_parameter(shared, parameters[0])


def placements_of(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """Return the placements of a DTensor; none for any other tensor."""
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else ()


# -- replicated tensors ------------------------------------------------------------------------------------


def _broadcast_replicated(model: torch.nn.Module, world: World) -> None:
    """Make replicated parameters, buffers, their gradients and random states equal on all tensor-parallel ranks."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, DTensor):
            if not tensor.is_meta:
                broadcast(tensor.detach(), world.group, world.device)
        elif tensor.requires_grad and all(placement.is_replicate() for placement in tensor.placements):
            tensor.register_post_accumulate_grad_hook(_reduce_partial_gradient)
    synchronize_streams_of_torch(world)


def _reduce_partial_gradient(parameter: torch.Tensor) -> None:
    """Sum the partial gradients of a replicated parameter that was used on parts of the sequence."""
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor) and not all(placement.is_replicate() for placement in gradient.placements):
        parameter.grad = gradient.redistribute(placements=[Replicate()] * len(gradient.placements))


def _overlap(mesh: Mesh) -> None:
    """Let compiled layers overlap communication with computation, if torch can."""
    world = mesh.world
    if not world.kind.binds_group:
        logger.warning(
            "enable_async_tp=True has no effect on %s: torch overlaps tensor-parallel communication on devices with "
            "symmetric memory only. Leave it out to silence this.",
            world.kind.name,
        )
        return
    overlap_tensor_parallel(mesh.group("tp"))


# -- the strategy ------------------------------------------------------------------------------------------


@final
class TensorParallel(ShardedStrategy):
    """Layers sharded over all ranks, which share samples; there is no other sharding or replication."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        self.retry = Retryable(world, RetryMode.TOGETHER)

    def adopts(self, model: torch.nn.Module) -> bool:
        """Return True if ``model`` came under ``fully_shard``, because this mesh has no axis for it."""
        return bool(outer_units(model))

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Shard the layers of ``model`` in place, and return it."""
        parallelize(model, self.mesh, self.options.plugins.parallelism)
        return model

    @property
    def state(self) -> ModelState[TensorParallel]:
        """The state of models whose layers are sharded."""
        return _TensorParallelState(self)


@final
class _TensorParallelState(ShardedState[TensorParallel]):
    """The state of models whose layers are sharded."""

    @property
    def gradients(self) -> GradientHolder | None:
        """The gradients in ``.grad``."""
        return PlainGradients(self.layout, self.named_parameters)
