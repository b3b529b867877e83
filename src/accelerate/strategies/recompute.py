"""Activation checkpointing: activations are computed again in the backward pass instead of being kept.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

_MARK = "_recomputes_activations"


def recompute_activations(modules: Iterable[torch.nn.Module], *, offload: bool = False) -> None:
    """Each module keeps only its inputs for the backward pass, in CPU memory with ``offload``.

    Names and classes stay: only the instances' ``forward`` changes.
    """
    for module in modules:
        if module.__dict__.get(_MARK, False):
            continue
        module.forward = _recomputing(module, module.forward, offload)
        module.__dict__[_MARK] = True


def _recomputing(module: torch.nn.Module, original: Callable[..., Any], offload: bool) -> Callable[..., Any]:
    is_method = isinstance(original, MethodType)
    function = original.__func__ if is_method else original

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if not offload:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        # Inside, the checkpoint's own hooks catch the activations; only its inputs reach this context.
        with save_on_cpu(pin_memory=torch.accelerator.is_available()):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)

    # A method stays one, so that a deep copy of the module runs the copy's own forward.
    return MethodType(forward, module) if is_method else forward
