"""fp8 by torchao: linear layers that multiply matrices in dynamically scaled 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import distributed as dist

from ..errors import PreparationError
from ..modules import is_sharded
from ..optional import require, torchao_required
from ..torch_private.distributed import all_gather_single
from .base import HOLDS_OTHERS, OTHER_KIND, report_conversion
from .fp8 import Fp8Functions, Fp8Precision, why_linear_stays

if TYPE_CHECKING:
    from ..plugins.fp8 import AORecipeKwargs
    from ..plugins.handlers import AutocastKwargs

ModuleFilter = Callable[[torch.nn.Module, str], bool]


def find_first_last_linear_layers(model: torch.nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of ``model``; None if it has none."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: torch.nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Return whether torchao can convert the module ``fqn``, a linear layer that isn't in ``layers_to_filter``."""
    return not why_kept(fqn, module, layers_to_filter)


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """Return whether layer ``fqn`` of the model ``module`` is a linear layer but not the first or last."""
    return filter_linear_layers(module, fqn, layers_to_filter=find_first_last_linear_layers(module))


def why_kept(name: str, module: torch.nn.Module, layers_to_filter: Sequence[str | None]) -> str:
    """Return why torchao doesn't convert ``module``; empty if it does."""
    if not isinstance(module, torch.nn.Linear):
        return HOLDS_OTHERS if next(module.children(), None) is not None else OTHER_KIND
    if name in layers_to_filter:
        return "the first or last linear layer"
    return why_linear_stays(module)


@torchao_required
def convert_model_to_fp8_ao(
    model: torch.nn.Module, config: object = None, module_filter_func: ModuleFilter | None = None
) -> torch.nn.Module:
    """Replace linear layers of ``model`` by layers that compute in fp8.

    Args:
        config: a ``torchao.float8.Float8LinearConfig``.
        module_filter_func: ``(module, name) -> bool``; by default all linear layers but the first and the last whose
            sizes are multiples of 16.
    """
    float8 = require("torchao.float8", "fp8", purpose="convert_model_to_fp8_ao")
    if module_filter_func is None:
        ends = find_first_last_linear_layers(model)
        module_filter_func = partial(filter_linear_layers, layers_to_filter=ends)
    return float8.convert_to_float8_training(model, module_filter_fn=module_filter_func, config=config)


@torchao_required
def has_ao_layers(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has linear layers that torchao converted."""
    return any(map(_is_converted, model.modules()))


def _is_converted(module: torch.nn.Module) -> bool:
    linear = require("torchao.float8.float8_linear", "fp8").Float8Linear
    return isinstance(module, linear)


@final
class AoPrecision(Fp8Precision):
    """The precision fp8 with torchao's linear layers; everything else runs under autocast in bf16.

    Args:
        recipe: AORecipeKwargs.
        gathers: whether ``fully_shard`` gathers parameters for each use; it can then gather them in fp8.
        functions: returns the conversion at every use, because libraries on top replace it.
    """

    backend: str | None = "AO"

    def __init__(
        self,
        device_type: str,
        recipe: AORecipeKwargs,
        functions: Fp8Functions,
        *,
        gathers: bool,
        handler: AutocastKwargs | None = None,
    ) -> None:
        super().__init__(device_type, handler=handler)
        config: Any = recipe.config
        if config.enable_fsdp_float8_all_gather and not gathers:
            # Without shards it would only turn weights into a tensor subclass that DDP can't broadcast.
            config = replace(config, enable_fsdp_float8_all_gather=False)
        self.config: Any = config
        self._filter: ModuleFilter | None = recipe.module_filter_func
        self._functions = functions

    def check(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise if linear layers to convert are already sharded."""
        for model in models:
            self._refuse_sharded(model)

    def _refuse_sharded(self, model: torch.nn.Module) -> None:
        """Raise if a layer to convert is sharded: conversion would replace the layer that FSDP gathers.

        Raises:
            PreparationError: names the first of these layers.
        """
        if has_ao_layers(model):
            return
        ends = find_first_last_linear_layers(model)
        takes = self._filter or partial(filter_linear_layers, layers_to_filter=ends)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and is_sharded(module.weight) and takes(module, name):
                raise PreparationError(
                    f"mixed_precision='fp8': the linear layer {name!r} of {type(model).__name__} came sharded, and "
                    "can't be converted to fp8 any more. Call torchao.float8.convert_to_float8_training(model) before "
                    "fully_shard or parallelize_module, or let Accelerator(fsdp_plugin="
                    "FullyShardedDataParallelPlugin(fsdp_version=2)) shard the whole model."
                )

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Replace linear layers of ``model`` by Float8Linear, unless it already has some."""
        if has_ao_layers(model):
            return model
        self._refuse_sharded(model)
        convert = partial(
            self._functions("convert_model_to_fp8_ao"), config=self.config, module_filter_func=self._filter
        )
        ends = find_first_last_linear_layers(model)
        model, report = report_conversion(
            model, "fp8 by torchao", convert, partial(self._why_kept, ends), _is_converted
        )
        self.record(report)
        return model

    def _why_kept(self, ends: tuple[str | None, str | None], name: str, module: torch.nn.Module) -> str:
        if self._filter is None or not isinstance(module, torch.nn.Linear):
            return why_kept(name, module, ends)
        return "left out by module_filter_func"

    def patch_wrapped(self, model: torch.nn.Module) -> None:
        """Gather sharded parameters as bytes if the backend can't send 8-bit floats (gloo)."""
        if not self.config.enable_fsdp_float8_all_gather or self._device_type != torch.device("cpu").type:
            return
        for module in model.modules():
            choose = getattr(module, "set_custom_all_gather", None)  # torch 2.8 and later
            if choose is not None:
                choose(_ByteGather())

    def follow(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Compute the scales of all sharded weights together after each update, instead of one by one in forward."""
        if not self.config.enable_fsdp_float8_all_gather:
            return
        for model in models:
            ours = {id(parameter) for parameter in model.parameters()}
            training = [one for one in optimizers if any(id(p) in ours for g in one.param_groups for p in g["params"])]
            if training and has_ao_layers(model):
                training[-1].register_step_post_hook(partial(_precompute_scales, model))


@final
class _ByteGather:
    """A custom all-gather for FSDP that sends bytes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty tensor to gather into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """All-gather ``input_tensor`` into ``output_tensor``; with ``async_op``, return the work to wait for."""
        return all_gather_single(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group, async_op)


def _precompute_scales(model: torch.nn.Module, *_: object) -> None:
    require("torchao.float8", "fp8").precompute_float8_dynamic_scale_for_fsdp(model)
