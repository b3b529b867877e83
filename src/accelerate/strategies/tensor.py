"""Layers in pieces over ranks that work on the same samples: tensor parallelism by a plan.

A plan says of layers, by patterns of their names, how they are cut::

    TorchTensorParallelConfig(plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"})

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019;
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Real on CPU ranks too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, final

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ..errors import PreparationError, SettingError
from ..logging import get_logger
from ..mesh import Mesh
from ..modules import get_model_tp_size
from ..seeding import synchronize_rng_state
from ..settings.labels import DistributedType
from ..settings.option import nearest
from ..torch_private.distributed import overlap_tensor_parallel
from ..world import World
from .base import Strategy, is_sharded
from .norms import clamp_pieces, clip_pieces
from .rebind import canonical_name, inner_optimizer
from .shard_saving import gathered

logger = get_logger(__name__)

_SEQUENCE = Shard(1)

#: The words of plans. Those of transformers' plans for dense layers are among them.
STYLES: Final[dict[str, Callable[[], ParallelStyle]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # Between these, activations are cut along the sequence (dimension 1).
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
#: A parameter's places: (module, attribute), by parameter.
_Places = list[list[tuple[torch.nn.Module, str]]]


def parallelize(model: torch.nn.Module, mesh: Mesh, config: Any) -> None:
    """The layers of ``model`` are cut over the ``tp`` axis of ``mesh``, by the plan of ``config`` or its own.

    What the plan doesn't name is whole on every rank, and equal. A model that was loaded in pieces stays as it is.

    Raises:
        PreparationError: the model has no plan, or was loaded for another number of ranks.
        SettingError: the plan names what isn't there, or can't be cut.
    """
    size = mesh.size("tp")
    if size == 1:
        return
    if any(is_sharded(parameter) for parameter in model.parameters()):
        check_size(model, size)
    else:
        _apply(model, mesh, _plan_of(model, config))
    _make_equal(model, mesh.within("tp"))
    if config is not None and config.enable_async_tp:
        _overlap(mesh)


def check_size(model: torch.nn.Module, size: int) -> None:
    """Raises if ``model`` was loaded in pieces for another number of tensor-parallel ranks than ``size``.

    Raises:
        PreparationError: the numbers differ.
    """
    loaded = get_model_tp_size(model)
    if loaded is not None and loaded not in (1, size):  # 1: it was loaded whole
        raise PreparationError(
            f"{type(model).__name__} was loaded for tp_size={loaded}, but ParallelismConfig says tp_size={size}. Load "
            "it whole (without tp_plan): prepare() cuts it by the model's own plan."
        )


# -- the plan ----------------------------------------------------------------------------------------------


def _plan_of(model: torch.nn.Module, config: Any) -> Plan:
    plan = getattr(config, "plan", None) or getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise PreparationError(
            f"{type(model).__name__} has no plan of how its layers are cut over tensor-parallel ranks. Give "
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
    """The modules whose name, part by part, is like ``pattern``."""
    parts = pattern.split(".")
    for name, module in model.named_modules():
        own = canonical_name(name).split(".")
        if len(own) == len(parts) and all(map(fnmatchcase, own, parts)):
            yield name, module


def _apply(model: torch.nn.Module, mesh: Mesh, plan: Plan) -> None:
    chosen = [entry for pattern, word in plan.items() for entry in _chosen(model, pattern, word, mesh)]
    places = _tied_places(model)
    for module, style in chosen:
        parallelize_module(module, mesh.over("tp"), style)
    _tie_again(places)


def _chosen(
    model: torch.nn.Module, pattern: str, word: str | ParallelStyle, mesh: Mesh
) -> Iterator[tuple[torch.nn.Module, ParallelStyle]]:
    """The modules that ``pattern`` names, and how each is cut."""
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
    """A hook: where sequences begin to be cut, torch takes it for granted that the ranks divide them."""

    def check(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and inputs[0].ndim > 1 and inputs[0].shape[1] % size:
            raise PreparationError(
                f"This plan cuts sequences over tp_size={size} ranks, and got one of length {inputs[0].shape[1]}. Pad "
                f"it to a multiple of {size}, or use a plan without `..._to_sequence` (to generate, for example)."
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


def _tied_places(model: torch.nn.Module) -> _Places:
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [shared for shared in places.values() if len(shared) > 1]


def _tie_again(places: _Places) -> None:
    for shared in places:
        held = [module._parameters[name] for module, name in shared]
        laid = {placements_of(parameter) for parameter in held}
        if len(laid) > 1:
            owners = " and ".join(f"{type(module).__name__}.{name}" for module, name in shared)
            raise SettingError(
                f"Tensor-parallel plan: {owners} share one weight, but are cut in different ways. Cut both alike (an "
                "embedding by 'embedding_rowwise' is as a linear by 'colwise'), or neither."
            )
        for module, name in shared:
            module._parameters[name] = held[0]


def placements_of(tensor: Any) -> tuple[Any, ...]:
    """How a DTensor is cut; nothing for any other."""
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else ()


# -- what is not cut ---------------------------------------------------------------------------------------


def _make_equal(model: torch.nn.Module, world: World) -> None:
    """What every tensor-parallel rank has whole is equal, and stays equal: gradients, and what dropout draws."""
    source = dist.get_global_rank(world.group, 0) if world.group is not None else 0
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, DTensor):
            if tensor.numel() and not tensor.is_meta:
                moved = tensor.detach().to(world.device)
                dist.broadcast(moved, source, world.group)
                tensor.detach().copy_(moved)
        elif tensor.requires_grad and all(placement.is_replicate() for placement in tensor.placements):
            tensor.register_post_accumulate_grad_hook(_add_up)
    synchronize_rng_state("torch", world=world)
    if world.kind.name != "cpu":
        synchronize_rng_state(world.kind.name, world=world)


def _add_up(parameter: torch.Tensor) -> None:
    """The gradient of a whole parameter that saw parts of the sequence is that of the whole sequence."""
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor) and not all(placement.is_replicate() for placement in gradient.placements):
        parameter.grad = gradient.redistribute(placements=[Replicate()] * len(gradient.placements))


def _overlap(mesh: Mesh) -> None:
    """Compiled layers overlap their communication with their products, where torch can."""
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
class TensorParallel(Strategy):
    """All ranks work on the same samples; nothing is replicated or sharded beside."""

    communicates_in_forward = holds_gradients = True
    gives_up_together = True

    @property
    def label(self) -> DistributedType:
        """MULTI_CPU, MULTI_GPU, ...: the vendor's word."""
        return DistributedType(self.world.kind.label)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """``model`` in pieces; the object stays."""
        parallelize(model, self.mesh, self.options.plugins["parallelism_config"].tp_handler)
        return model

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """The norm of whole gradients is at most ``max_norm``; a collective."""
        return clip_pieces(parameters, max_norm, norm_type, self.world.device, error_if_nonfinite)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """No gradient element is larger than ``clip_value`` in size."""
        clamp_pieces(parameters, clip_value)

    def has_whole(self, model: torch.nn.Module) -> bool:
        """Whether none of its parameters is a piece."""
        return not any(map(is_sharded, model.parameters()))

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict on the main process, in CPU memory; an empty one elsewhere. A collective."""
        return self.access.whole_model(self.unwrap(model, keep_torch_compile=False), self.world.is_main)

    def saved(self, models: Sequence[Any], optimizers: Sequence[Any], *, model_only: bool = False) -> dict[str, Any]:
        """Gathered state: the same files as those of one process."""
        inner = [] if model_only else list(map(inner_optimizer, optimizers))
        return gathered(self.access, models, inner, self.world.is_local_main)
