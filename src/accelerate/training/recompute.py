"""Activation checkpointing: the modules to recompute in the backward, and the results to keep.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, keep what is expensive to compute and small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import SettingError
from ..torch_private.modules import draws_numbers

if TYPE_CHECKING:
    from ..plugins.handlers import ActivationCheckpointing, SavePolicy

#: Called in every forward; returns the contexts of the forward and of its recomputation.
Contexts: TypeAlias = Callable[[], Any]

#: Kept results stay on their device, independent of a forward's saved-tensor hooks. From 2.15 on, torch warns without
#: this option.
_KEPT_ON_DEVICE: Final[dict[str, bool]] = dict.fromkeys(
    {"respect_saved_tensors_hooks"} & signature(checkpoint).parameters.keys(), False
)
_RECOMPUTES: Final = "_recomputes_activations"
#: The arguments of transformers' layers for their cache.
_CACHES: Final = ("past_key_values", "past_key_value")

#: Short names of operations whose results are worth keeping: each stands for torch's kernels of one operation.
OPERATIONS: Final[dict[str, tuple[str, ...]]] = {
    "mm": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "sdpa": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "conv": ("convolution",),
}


def recompute_activations(
    modules: Iterable[torch.nn.Module], *, offload: bool = False, save_ops: Sequence[object] | SavePolicy = ()
) -> None:
    """Make each module recompute its activations in the backward from its inputs (in CPU memory with ``offload``).

    Names and classes stay the same; only ``forward`` of the instances changes.

    Args:
        save_ops: operators whose results are kept, or a policy for torch's selective checkpointing.

    Raises:
        SettingError: ``save_ops`` has an unknown name.
    """
    contexts = _contexts(save_ops)
    options = {} if contexts is None else {"context_fn": contexts, **_KEPT_ON_DEVICE}
    for module in modules:
        if module.__dict__.get(_RECOMPUTES, False):
            continue
        module.forward = _recomputing(module, offload, options)
        module.__dict__[_RECOMPUTES] = True


def chosen_modules(
    model: torch.nn.Module, options: ActivationCheckpointing, units: Sequence[torch.nn.Module] = ()
) -> list[torch.nn.Module]:
    """Return the modules of ``model`` that ``options`` choose.

    Args:
        units: the modules to choose if ``options`` name none; if empty, the repeated blocks of the model.

    Raises:
        SettingError: no module is chosen.
    """
    if options.modules is not None:
        chosen = _outermost(model, _named(model, options.modules))
    else:
        chosen = list(units) or _outermost(model, repeated_blocks(model))
    if not chosen:
        raise SettingError(
            f"ActivationCheckpointing(modules={options.modules!r}) chooses no module of {type(model).__name__}: give "
            "a regular expression for whole names as model.named_modules() gives them, or classes of its layers."
        )
    return chosen


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated blocks of a model: those in ``_no_split_modules``, else its longest module list."""
    named: Any = getattr(model, "_no_split_modules", None)
    if named:
        return [module for module in model.modules() if type(module).__name__ in named]
    lists = [module for module in model.modules() if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))]
    longest = max(lists, key=lambda each: (len(each), sum(p.numel() for p in each.parameters())), default=None)
    return [] if longest is None else [block for block in longest if any(True for _ in block.parameters())]


def _named(model: torch.nn.Module, wanted: str | Iterable[object]) -> list[torch.nn.Module]:
    """Return the modules whose full name matches ``wanted``, or that it lists (as modules, classes or class names).

    Raises:
        SettingError: the text isn't a regular expression.
    """
    if isinstance(wanted, str):
        try:
            pattern = re.compile(wanted)
        except re.error as error:
            raise SettingError(f"modules={wanted!r} is no regular expression: {error}.") from error
        return [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    listed = list(wanted)
    return [part for part in model.modules() if any(each in listed for each in (part, type(part), type(part).__name__))]


def _outermost(model: torch.nn.Module, chosen: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the outermost of ``chosen``, because a module inside another one is recomputed with it."""
    kept, inside = list(dict.fromkeys(chosen)), set[torch.nn.Module]()
    for module in kept:
        inside.update(part for part in module.modules() if part is not module)
    return [module for module in kept if module not in inside]


def _recomputing(module: torch.nn.Module, offload: bool, options: dict[str, Any]) -> Callable[..., object]:
    original = module.forward
    function = original.__func__ if isinstance(original, MethodType) else original
    has_statistics = any(True for _ in _with_statistics(module))

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        _leave_out_empty_cache(kwargs)
        given = options
        if has_statistics and not torch.compiler.is_compiling():  # a compiled block updates them once
            owner = args[0] if isinstance(original, MethodType) else module
            given = {**options, "context_fn": partial(_keeping_statistics, owner, options.get("context_fn"))}
        # Inside, the checkpoint's own hooks handle the activations; this context saves only its inputs.
        with save_on_cpu(pin_memory=torch.accelerator.is_available()) if offload else nullcontext():
            return checkpoint(function, *args, use_reentrant=False, **given, **kwargs)

    # A method stays one, so that a deep copy of the module runs the copy's own forward.
    return MethodType(forward, original.__self__) if isinstance(original, MethodType) else forward


def _with_statistics(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor | None]]:
    """Iterate over the buffers of the layers that have running statistics."""
    return (part._buffers for part in module.modules() if part._buffers.get("running_mean") is not None)


def _keeping_statistics(module: torch.nn.Module, contexts: Contexts | None) -> tuple[Any, Any]:
    """Return ``contexts`` of a forward and its recomputation, which leaves running statistics as they are."""
    first, again = (nullcontext(), nullcontext()) if contexts is None else contexts()

    @contextmanager
    def recomputation() -> Iterator[None]:
        held = [(buffers, dict(buffers)) for buffers in _with_statistics(module)]
        for buffers, own in held:
            buffers.update({name: one if one is None else one.clone() for name, one in own.items()})
        try:
            with again:
                yield
        finally:
            for buffers, own in held:
                buffers.update(own)

    return first, recomputation()


def _leave_out_empty_cache(kwargs: dict[str, Any]) -> None:
    """Replace an empty key-value cache by None, because the recomputation would find the first forward's entries."""
    for name in _CACHES:
        length = getattr(kwargs.get(name), "get_seq_length", None)
        if length is not None and length() == 0:
            kwargs[name] = None


# --------------------------------------------------------------------------------------------------
# The operators whose results are kept


def _contexts(save_ops: Sequence[object] | SavePolicy) -> Contexts | None:
    """Return the context function of a forward that keeps the results of ``save_ops``; None without any."""
    if callable(save_ops):
        return partial(create_selective_checkpoint_contexts, save_ops)
    operators = frozenset(found for wanted in save_ops for found in _operators(wanted))
    return partial(create_selective_checkpoint_contexts, _keeping(operators)) if operators else None


def _keeping(operators: frozenset[object]) -> SavePolicy:
    def policy(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        # A kept result isn't computed again, so it draws no random numbers, and later draws would differ.
        if operator in operators and not draws_numbers(operator, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _operators(wanted: object) -> list[object]:
    """Return the operators of ``wanted``, one for each overload.

    Raises:
        SettingError: there is no such operator.
    """
    if not isinstance(wanted, str):
        overloads: Any = getattr(wanted, "overloads", None)  # of an operator packet
        return [wanted] if overloads is None else [getattr(wanted, name) for name in overloads()]
    if wanted in OPERATIONS:
        return [found for name in OPERATIONS[wanted] for found in _registered(f"aten::{name}")]
    found = _registered(wanted if "::" in wanted else wanted.replace(".", "::", 1))
    if not found:
        raise SettingError(
            f"ActivationCheckpointing(save_ops=...): there is no operator {wanted!r}. Give {', '.join(OPERATIONS)}, "
            "a registered operator ('aten.mm', 'mylib::attention'), or the operator itself (torch.ops.aten.mm)."
        )
    return found


def _registered(name: str) -> list[object]:
    """Return the overloads of the operator ``namespace::name`` or ``namespace::name.overload``; empty if unknown."""
    namespace, _, rest = name.partition("::")
    own, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), own, None) if own else None
    if packet is None:
        return []
    return [getattr(packet, each) for each in packet.overloads() if overload in ("", each)]
