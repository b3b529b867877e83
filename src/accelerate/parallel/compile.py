"""torch.compile, for a whole model or for its repeated blocks only.

A transformer repeats one block many times. Compiling that block once and reusing it ("regional compilation") starts
many times faster than compiling the whole model, and trains at nearly the same speed.
"""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..plugins.handlers import TorchDynamoPlugin
from ..settings.labels import DynamoBackend
from ..torch_private.modules import is_compiled, is_compiled_in_place


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin | None) -> nn.Module:
    """Compile ``model`` as ``plugin`` asks; return it unchanged without a backend or if it is compiled already."""
    if plugin is None or plugin.backend == DynamoBackend.NO or is_compiled_module(model) or has_compiled_regions(model):
        return model
    if not plugin.use_regional_compilation:
        return _compiled(model, plugin.to_kwargs())
    if isinstance(model, DistributedDataParallel):
        # Compile inside the DDP module: its own forward has the hooks that average gradients.
        model.module = compile_regions(model.module, **plugin.to_kwargs())
        return model
    return compile_regions(model, **plugin.to_kwargs())


def compile_regions(module: nn.Module, **compile_kwargs: object) -> nn.Module:
    """Return a module of the same class and with the same tensors, whose repeated blocks are compiled.

    Every other child is compiled as one region; without repeated blocks, the whole module is compiled. ``module``
    itself doesn't change and is kept as ``_orig_mod``. Methods bound to the instance are bound to the result, and so
    are hooks of :mod:`accelerate.hooks`. A plain function that replaced ``forward`` still runs the uncompiled layers
    of ``module``, and causes a warning.
    """
    if has_compiled_regions(module):
        return module
    regions = _regions_compiled(module, compile_kwargs)
    if "_orig_mod" not in regions._modules:  # torch.compile's own wrapper has it already
        # Not setattr: a registered submodule would list every parameter twice.
        regions.__dict__["_orig_mod"] = module
    return regions


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: object) -> None:
    """Compile the repeated blocks of ``module`` in place; the names in its state dict don't change."""
    _compile_in_place(module, compile_kwargs)


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: object) -> nn.Module:
    """Compile the repeated blocks of ``module`` in place and return it; the names of layers don't change."""
    _compile_in_place(module, compile_kwargs)
    return module


def is_compiled_module(module: object) -> bool:
    """Return True if torch.compile returned ``module``."""
    return is_compiled(module)


def has_compiled_regions(module: object) -> bool:
    """Return True if ``module`` or a module inside it is compiled."""
    return isinstance(module, nn.Module) and any(
        is_compiled_module(part) or is_compiled_in_place(part) for part in module.modules()
    )


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return True if ``module`` is a ModuleList of blocks of one class."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return True if ``module`` is, or holds at any depth, a ModuleList of blocks of one class."""
    return any(is_repeated_blocks(part) for part in module.modules())


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that was compiled, whole or by regions; an uncompiled ``module`` is returned unchanged."""
    original = module._modules.get("_orig_mod") if is_compiled_module(module) else module.__dict__.get("_orig_mod")
    return original if isinstance(original, nn.Module) else module


def _regions_compiled(module: nn.Module, compile_kwargs: dict[str, Any]) -> nn.Module:
    if not (has_repeated_blocks(module) or _is_container(module)):
        return _compiled(module, compile_kwargs)
    part = _compiled if is_repeated_blocks(module) else _regions_compiled
    copy = _same_module_again(module)
    done: dict[int, nn.Module] = {}  # a child that appears under two names stays one child
    for name, child in module._modules.items():
        if child is not None:
            if id(child) not in done:
                done[id(child)] = part(child, compile_kwargs)
            copy._modules[name] = done[id(child)]
    return copy


def _is_container(module: nn.Module) -> bool:
    """Return True if ``module`` is only indexed and iterated, never called."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _same_module_again(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with the same parameters, buffers and hooks, and its own dict of children."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_modules"] = dict(module._modules)
    for name, value in module.__dict__.items():
        if name != "_modules":
            copy.__dict__[name] = _bound_to(copy, module, value)
    forward = module.__dict__.get("forward")
    if forward is not None and copy.__dict__["forward"] is forward:
        warnings.warn(
            f"compile_regions: {type(module).__name__}.forward was replaced on the instance by {forward!r}, which "
            "isn't bound to the module, so it runs the uncompiled layers. Assign a method "
            "(types.MethodType(function, model)), use accelerate.hooks.add_hook_to_module, or replace it after "
            "compiling.",
            stacklevel=2,
        )
    return copy


def _bound_to(copy: nn.Module, module: nn.Module, value: object) -> object:
    """Return ``value``; rebind a method or partial call of ``module`` to ``copy``."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, copy)
    if isinstance(value, functools.partial) and any(each is module for each in value.args):
        arguments = [copy if each is module else each for each in value.args]
        function: Any = _bound_to(copy, module, value.func)
        again = functools.partial(function, *arguments, **value.keywords)
        again.__dict__.update({name: _bound_to(copy, module, held) for name, held in vars(value).items()})
        return again
    return value


def _compile_in_place(module: nn.Module, compile_kwargs: dict[str, Any]) -> None:
    if not (has_repeated_blocks(module) or _is_container(module)):
        module.compile(**compile_kwargs)
        return
    for child in module.children():
        if is_repeated_blocks(module):
            child.compile(**compile_kwargs)
        else:
            _compile_in_place(child, compile_kwargs)


def _compiled(module: nn.Module, compile_kwargs: dict[str, Any]) -> nn.Module:
    compiled = torch.compile(module, **compile_kwargs)
    assert isinstance(compiled, nn.Module), "torch.compile of a module is a module"
    return compiled
