"""The user's own model, out of everything that was put around it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..precision.autocast import restore_forward
from ..torch_private.modules import compiled_alike, original_of
from .compile import is_compiled_module, uncompiled


def _wrapper_classes() -> tuple[type, ...]:
    classes: list[type] = [DistributedDataParallel, DataParallel]
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        classes.append(FullyShardedDataParallel)
    import sys

    # An engine can only be there if its package was imported, so the package isn't imported to look.
    deepspeed: Any = sys.modules.get("deepspeed")
    engine = getattr(deepspeed, "DeepSpeedEngine", None)
    return (*classes, engine) if engine is not None else tuple(classes)


def unwrap(model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
    """The model inside data-parallel, sharding and engine wrappers.

    A compiled model stays compiled unless ``keep_torch_compile`` is False; the mixed-precision forward stays
    unless ``keep_fp32_wrapper`` is False. An object without wrappers comes back as it is.
    """
    compiled = model if is_compiled_module(model) else None
    if compiled is not None:
        model = original_of(compiled)
    classes = _wrapper_classes()
    while isinstance(model, classes):
        model = model.module
    if is_compiled_module(model):  # compiled first, wrapped after
        compiled, model = model, original_of(model)
    if not keep_fp32_wrapper and isinstance(model, torch.nn.Module):
        restore_forward(model)
    if not keep_torch_compile:
        return uncompiled(model) if isinstance(model, torch.nn.Module) else model
    if compiled is None or original_of(compiled) is model:
        return model if compiled is None else compiled
    # The user's compiled object goes on training through its wrapper, so the inner model gets one of its own.
    return compiled_alike(compiled, model)


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """The documented name of :func:`unwrap`; ``recursive`` also unwraps the submodules."""
    model = unwrap(model, keep_fp32_wrapper, keep_torch_compile)
    if recursive and isinstance(model, torch.nn.Module):
        for name, child in model.named_children():
            setattr(model, name, extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True))
    return model


def is_peft_model(model: Any) -> bool:
    """Whether ``model``, unwrapped, is a PeftModel; False when peft isn't imported."""
    import sys

    peft: Any = sys.modules.get("peft")
    if peft is None:
        return False
    inner = unwrap(model, keep_torch_compile=False) if isinstance(model, torch.nn.Module) else model
    return isinstance(inner, peft.PeftModel)
