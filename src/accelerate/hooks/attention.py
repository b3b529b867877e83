"""Attention hooks and checks for models with sequences sharded over ranks. Internal."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch

from ..errors import PreparationError

_WINDOWS = ("sliding_attention", "chunked_attention")


def refuse_recurrent_layers(model: torch.nn.Module) -> None:
    """Raise if ``model`` has layers that process the sequence step by step.

    Raises:
        PreparationError: the model has linear attention, a state space model or a recurrent network.
    """
    kinds = [kind for kind in _layer_types(model) if kind not in ("full_attention", *_WINDOWS)]
    modules = [type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    if kinds or modules:
        raise PreparationError(
            f"{type(model).__name__} has {[*kinds, *modules][0]} layers, which read a sequence from its beginning. "
            "Ranks can't compute parts of it: context and sequence parallelism need attention layers only. Set "
            "cp_size=1 and sp_size=1."
        )


def refuse_windows(model: torch.nn.Module) -> None:
    """Raise if ``model`` has attention over only a window of the sequence.

    Raises:
        PreparationError: the attention has sliding windows or chunks.
    """
    config = getattr(model, "config", None)
    kinds = [kind for kind in _layer_types(model) if kind in _WINDOWS]
    slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if kinds or (slides and not _layer_types(model)):
        raise PreparationError(
            f"{type(model).__name__} has {kinds[0] if kinds else 'sliding_attention'} layers, and context parallelism "
            "has full and causal attention only. Use sequence parallelism (sp_size) or tensor parallelism (tp_size)."
        )


def _layer_types(model: torch.nn.Module) -> list[str]:
    return list(getattr(getattr(model, "config", None), "layer_types", None) or ())


def attach_context_parallel_hooks(model: torch.nn.Module) -> None:
    """Run modules called ``self_attn`` without attention mask, and with ``is_causal=True`` if they accept it."""
    for name, module in model.named_modules():
        if not name.endswith("self_attn"):
            continue
        parameters = inspect.signature(module.forward).parameters
        knows = "is_causal" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        module.register_forward_pre_hook(_without_mask(knows), with_kwargs=True, prepend=True)


def _without_mask(knows_is_causal: bool) -> Callable[..., tuple[object, dict[str, object]]]:
    def drop_mask(module: torch.nn.Module, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
        if knows_is_causal:
            kwargs["is_causal"] = True
        return args, kwargs

    # Libraries recognise these hooks by their documented module, and remove them by it.
    drop_mask.__module__ = "accelerate.big_modeling"
    return drop_mask
