"""Hooks attached to all modules of a model, layer-wise casting, and attention over sharded sequences. Internal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, final

import torch
from torch import nn

from ..big_models.offload import PrefixedDataset
from ..big_models.placement import TiedCopies, set_module_tensor_to_device
from ..big_models.sizes import Device, named_module_tensors
from ..errors import PreparationError
from .align import AlignDevicesHook
from .base import ModelHook, add_hook_to_module

SkipKeys = str | list[str] | None


def _path(module_name: str, own: str) -> str:
    return f"{module_name}.{own}" if module_name else own


def _holds_tensors(module: nn.Module) -> bool:
    return next(named_module_tensors(module), None) is not None


def _is_hooked(module: nn.Module) -> bool:
    return "_hf_hook" in module.__dict__


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device | None,
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Attach hooks that move inputs to ``execution_device`` to all modules with tensors and without a hook.

    Submodules of a module are skipped if its class is in ``preload_module_classes``.
    """
    if not _is_hooked(module) and next(named_module_tensors(module, recurse=True), None) is not None:
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Attach hooks to all modules with their own tensors, which load the tensors while the module runs.

    If a module's class is in ``preload_module_classes``, it loads the tensors of all its submodules at once.
    """
    hooks = _ModelHooks(
        execution_device, offload, weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map
    )
    hooks.attach_to_tensors(module, module_name, execution_device, offload=offload)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, object] | None = None,
    offload: bool | dict[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedCopies | None = None,
) -> None:
    """Attach hooks that run each block on its device, and load offloaded blocks for it.

    ``execution_device`` and ``offload`` are one value for all blocks, or one for each block by name. A block may also
    be a single tensor.
    """
    hooks = _ModelHooks(
        execution_device, offload, weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map
    )
    if isinstance(execution_device, Mapping) or isinstance(offload, Mapping):
        hooks.attach(module, module_name)
    elif offload:
        hooks.attach_to_tensors(module, module_name, execution_device, offload=True)
    else:
        hook = hooks.hook(execution_device, io_same_device=True, place_submodules=True)
        add_hook_to_module(module, hook)


@final
class _SelectedEntries(PrefixedDataset):
    """The entries of a module with the given names."""

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str, names: frozenset[str]) -> None:
        super().__init__(dataset, prefix)
        self.names = names

    def __contains__(self, key: object) -> bool:
        return key in self.names and super().__contains__(key)


@final
@dataclass(frozen=True)
class _ModelHooks:
    """The hooks of one model, and their options: one value for all blocks, or one for each block by name."""

    execution_device: Device | Mapping[str, object] | None
    offload: bool | dict[str, bool]
    weights_map: Mapping[str, torch.Tensor] | None
    offload_buffers: bool
    skip_keys: SkipKeys
    preload_module_classes: list[str] | None
    tied_params_map: TiedCopies | None

    def hook(self, device: Device | None, **options: Any) -> AlignDevicesHook:
        """Return a hook that moves inputs, and with ``options`` also loads weights."""
        return AlignDevicesHook(device, skip_keys=self.skip_keys, tied_params_map=self.tied_params_map, **options)

    def device(self, name: str) -> Device | None:
        """Return the device on which the block runs."""
        found = self.execution_device
        return cast("Device | None", found.get(name)) if isinstance(found, Mapping) else found

    def is_offloaded(self, name: str) -> bool:
        """Return whether the block's weights are offloaded."""
        return self.offload[name] if isinstance(self.offload, Mapping) else self.offload

    def is_block(self, name: str) -> bool:
        """Return whether ``name`` is the name of a block."""
        return all(name in each for each in (self.execution_device, self.offload) if isinstance(each, Mapping))

    def attach(self, module: nn.Module, name: str) -> None:
        """Attach the hooks of the module and all its submodules."""
        is_root = name == ""
        if self.is_block(name):
            self._attach_to_block(module, name)
        elif is_root:
            add_hook_to_module(module, self.hook(None, io_same_device=True), append=True)
        if not self.is_block(name):
            self._attach_to_own_tensors(module, name)
        for own, child in module.named_children():
            self.attach(child, _path(name, own))

    def _attach_to_block(self, module: nn.Module, name: str) -> None:
        device, is_root = self.device(name), name == ""
        if self.is_offloaded(name):
            holds = _holds_tensors(module)
            if is_root or not holds:
                # Runs before the hook that moves the inputs, because it records their device.
                hook = self.hook(None if holds else device, io_same_device=is_root)
                add_hook_to_module(module, hook, append=True)
            self.attach_to_tensors(module, name, device, offload=True)
        else:
            hook = self.hook(
                device, offload_buffers=self.offload_buffers, io_same_device=is_root, place_submodules=True
            )
            add_hook_to_module(module, hook)
        attach_execution_device_hook(module, device, self.skip_keys, self.preload_module_classes, self.tied_params_map)

    def attach_to_tensors(self, module: nn.Module, name: str, device: Device | None, *, offload: bool) -> None:
        """Attach hooks to the module and all its submodules that have their own tensors."""
        whole = offload and type(module).__name__ in (self.preload_module_classes or ())
        if _holds_tensors(module) or whole:
            hook = self.hook(
                device,
                offload=offload,
                weights_map=None if self.weights_map is None else PrefixedDataset(self.weights_map, _path(name, "")),
                offload_buffers=self.offload_buffers,
                place_submodules=whole,
            )
            add_hook_to_module(module, hook, append=True)
        if not whole:
            for own, child in module.named_children():
                self.attach_to_tensors(child, _path(name, own), device, offload=offload)

    def _attach_to_own_tensors(self, module: nn.Module, name: str) -> None:
        """Place a split module's own tensors, or attach a hook that loads them."""
        offloaded: dict[Device | None, list[str]] = {}
        for own, tensor in list(named_module_tensors(module)):
            path = _path(name, own)
            if not self.is_block(path):
                continue
            if self.is_offloaded(path):
                offloaded.setdefault(self.device(path), []).append(own)
            elif not tensor.is_meta and (device := self.device(path)) is not None:
                set_module_tensor_to_device(
                    module, own, device, tied_params_map=self.tied_params_map, clear_cache=False
                )
        for device, tensors in offloaded.items():
            weights = None
            if self.weights_map is not None:
                weights = _SelectedEntries(self.weights_map, _path(name, ""), frozenset(tensors))
            hook = self.hook(device, offload=True, weights_map=weights, offload_buffers=self.offload_buffers)
            add_hook_to_module(module, hook, append=True)


# --------------------------------------------------------------------------------------------------
# Layer-wise casting: weights are stored in a small dtype, and computed with in a larger one

#: Layers that compute in the dtype of their weights, so that a cast around them has no other effect.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING: Final = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """A hook that stores weights in ``storage_dtype`` and casts them to ``compute_dtype`` for the forward."""

    runs_compiled = False

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(
        self, module: nn.Module, *args: object, **kwargs: object
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Cast the weights to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: object) -> object:
        """Cast the weights to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


# --------------------------------------------------------------------------------------------------
# Attention hooks and checks for models with sequences sharded over ranks

_WINDOWS = ("sliding_attention", "chunked_attention")


def refuse_recurrent_layers(model: nn.Module) -> None:
    """Raise if ``model`` has layers that process the sequence step by step.

    Raises:
        PreparationError: the model has linear attention, a state space model or a recurrent network.
    """
    kinds = [kind for kind in _layer_types(model) if kind not in ("full_attention", *_WINDOWS)]
    modules = [type(module).__name__ for module in model.modules() if isinstance(module, nn.RNNBase)]
    if kinds or modules:
        raise PreparationError(
            f"{type(model).__name__} has {[*kinds, *modules][0]} layers, which read a sequence from its beginning. "
            "Ranks can't compute parts of it: context and sequence parallelism need attention layers only. Set "
            "cp_size=1 and sp_size=1."
        )


def refuse_windows(model: nn.Module) -> None:
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


def _layer_types(model: nn.Module) -> list[str]:
    return list(getattr(getattr(model, "config", None), "layer_types", None) or ())


def attach_context_parallel_hooks(model: nn.Module) -> None:
    """Run modules called ``self_attn`` without attention mask, and with ``is_causal=True`` if they accept it."""
    for name, module in model.named_modules():
        if not name.endswith("self_attn"):
            continue
        parameters = inspect.signature(module.forward).parameters
        knows = "is_causal" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        module.register_forward_pre_hook(_without_mask(knows), with_kwargs=True, prepend=True)


def _without_mask(knows_is_causal: bool) -> Callable[..., tuple[object, dict[str, object]]]:
    def drop_mask(module: nn.Module, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
        if knows_is_causal:
            kwargs["is_causal"] = True
        return args, kwargs

    # Libraries recognise these hooks by their documented module, and remove them by it.
    drop_mask.__module__ = "accelerate.big_modeling"
    return drop_mask
