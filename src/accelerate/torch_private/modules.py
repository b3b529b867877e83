"""Private names of torch.nn, torch.utils.data, torch.optim and torch.amp.

Other files use the dicts ``_parameters``, ``_buffers`` and ``_modules`` of modules directly to replace entries, because
torch's pickles and state dicts depend on them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import RandomSampler
from torch.utils.data._utils import fetch

from .names import declare, uses

#: The hooks of an optimizer's step, by their key.
StepHooks = dict[int, Callable[..., Any]]

_MODULE = "torch.nn.modules.module"
declare(__name__, f"{_MODULE}:._parameters", f"{_MODULE}:._buffers", f"{_MODULE}:._modules")


@uses(f"{_MODULE}:._non_persistent_buffers_set")
def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that aren't in its state dict."""
    return set(module._non_persistent_buffers_set)


@uses("torch._tensor:._backward_hooks", "torch._tensor:._post_accumulate_grad_hooks")
def gradient_hooks(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """Return the parameter's gradient hooks and its post-accumulate hooks."""
    kept = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return [hook for hooks in kept for hook in (hooks or {}).values()]


@uses("torch._C:._version")
def num_changes(tensor: torch.Tensor) -> int:
    """Return autograd's count of in-place changes to ``tensor``; changes through ``.data`` don't count."""
    return tensor._version


@uses("torch._C:_current_graph_task_id")
def current_backward() -> int:
    """Return the number of the backward pass that runs in this thread; -1 if none does."""
    return torch._C._current_graph_task_id()


@uses("torch.autograd.variable:Variable._execution_engine")
def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` at the end of the backward pass that runs in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # pyright: ignore[reportAttributeAccessIssue]


@uses("torch._ops:._schema")
def draws_numbers(operator: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether ``operator`` draws random numbers for these arguments; attention without dropout doesn't."""
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    arguments = operator._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given != 0.0
    # Some operators that take a generator lack the tag (random_, binomial).
    return torch.Tag.nondeterministic_seeded in operator.tags or any(each.name == "generator" for each in arguments)


@uses("torch:_has_compatible_shallow_copy_type")
def takes_data_of(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether ``tensor.data`` can be set to a tensor on ``device``; extension devices don't allow it."""
    there = torch.empty(0, dtype=tensor.dtype, device=device)
    return torch._has_compatible_shallow_copy_type(tensor, there)  # pyright: ignore[reportPrivateImportUsage]


@uses((f"{_MODULE}:Module._save_to_state_dict", "self, destination, prefix, keep_vars"))
def save_own(module: nn.Module, state: dict[str, object], prefix: str) -> None:
    """Save the state of ``module`` itself, without its children, into ``state``."""
    module._save_to_state_dict(state, prefix, keep_vars=False)


@uses(f"{_MODULE}:_IncompatibleKeys")
def loaded(missing: Sequence[str], unexpected: Sequence[str]) -> nn.modules.module._IncompatibleKeys:
    """Return the result of ``load_state_dict`` for these missing and unexpected keys."""
    return nn.modules.module._IncompatibleKeys(list(missing), list(unexpected))


@uses("torch._dynamo.eval_frame:OptimizedModule")
def is_compiled(module: object) -> bool:
    """Return whether ``module`` is the result of torch.compile."""
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")  # slow to import; if missing, nothing is compiled
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


@uses("torch._dynamo.utils:compilation_time_metrics")
def compile_seconds() -> float:
    """Return the seconds that torch.compile has spent in this process."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")  # if missing, nothing is compiled
    metrics: Any = getattr(compiler, "compilation_time_metrics", {})  # nor while another thread imports it
    return sum(metrics.get("_compile.compile_inner", ()))


@uses("torch._dynamo.eval_frame:._orig_mod")
def original_module(compiled: Any) -> nn.Module:
    """Return the module given to torch.compile."""
    return compiled._orig_mod


@uses("torch._dynamo.eval_frame:._orig_mod", "torch._dynamo.eval_frame:.dynamo_ctx")
def compile_like(compiled: Any, module: nn.Module) -> nn.Module:
    """Return ``module`` compiled like ``compiled``."""
    return type(compiled)(module, compiled.dynamo_ctx)


@uses(f"{_MODULE}:._compiled_call_impl")
def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


# -- torch.utils.data --------------------------------------------------------------------------------------


@uses("torch.utils.data.dataloader:._iterator")
def has_running_iterator(loader: object) -> bool:
    """Return whether ``loader`` keeps an iterator: torch's with persistent workers, or torchdata's."""
    return getattr(loader, "_iterator", None) is not None


@uses("torch.utils.data._utils.fetch:_MapDatasetFetcher", "torch.utils.data._utils.fetch:_IterableDatasetFetcher")
def batch_fetchers() -> tuple[type, type]:
    """Return the classes whose ``fetch`` reads a batch: of a map-style dataset, and of an iterable one."""
    return fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher


@uses("torch.utils.data.sampler:._num_samples")
def requested_num_samples(sampler: RandomSampler) -> int | None:
    """Return the number of samples requested of ``sampler``; None if it draws all samples."""
    return sampler._num_samples


# -- torch.optim, torch.amp and operations on lists of tensors ----------------------------------------------


@uses(("torch:_foreach_copy_", "self, src, non_blocking"))
def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source tensor into its target."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]


@uses(("torch:_foreach_mul_", "self, scalars"))
def scale_each(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by a factor, in place."""
    torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateImportUsage]


@uses(("torch:_foreach_lerp_", "self, tensors1, weights"))
def move_each(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Interpolate each tensor towards its end by ``weight``, in place."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)  # pyright: ignore[reportPrivateImportUsage]


@uses(("torch:_foreach_norm", "self, ord, dtype"))
def norm_of_each(tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """Return the norm of each tensor in ``dtype``."""
    return torch._foreach_norm(tensors, norm_type, dtype)  # pyright: ignore[reportArgumentType, reportPrivateImportUsage]


@uses(("torch:_amp_foreach_non_finite_check_and_unscale_", "self, found_inf, inv_scale"))
def unscale_each(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply each gradient by ``inv_scale``; set ``found_inf`` to 1 if one isn't finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
        gradients,  # pyright: ignore[reportArgumentType]
        found_inf,
        inv_scale,
    )


@uses("torch.ops.aten:_indices", "torch.ops.aten:_values")
def sparse_components(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored indices and values of a sparse tensor, without coalescing."""
    return torch.ops.aten._indices.default(gradient), torch.ops.aten._values.default(gradient)


@uses("torch.amp.grad_scaler:OptState.READY", "torch.amp.grad_scaler:._per_optimizer_states")
def has_scaled_gradients(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of ``optimizer`` are still scaled since the last update of ``scaler``."""
    from torch.amp.grad_scaler import OptState

    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@uses("torch.amp.grad_scaler:OptState.STEPPED", "torch.amp.grad_scaler:._per_optimizer_states")
def has_stepped(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``scaler.step(optimizer)`` has been called since the last update."""
    from torch.amp.grad_scaler import OptState

    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED


@uses("torch.amp.grad_scaler:._per_optimizer_states")
def step_again(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Make ``scaler`` treat further gradients of ``optimizer`` as scaled; its next update keeps the found overflow."""
    states: Any = scaler._per_optimizer_states
    states[object()] = states.pop(id(optimizer))


@uses("torch.amp.grad_scaler:._scale")
def loss_scale(scaler: torch.amp.GradScaler) -> torch.Tensor:
    """Return a copy of the scale, without waiting for the device; a loss must have been scaled before."""
    assert scaler._scale is not None, "a loss was scaled"
    return scaler._scale.clone()


@uses(("torch.amp.grad_scaler:GradScaler._found_inf_per_device", "self, optimizer"))
def found_inf_by_device(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
) -> dict[torch.device, torch.Tensor]:
    """Return the ``found_inf`` of the last ``scaler.step(optimizer)`` by device, until ``scaler.update()``."""
    return scaler._found_inf_per_device(optimizer)  # pyright: ignore[reportReturnType]


@uses("torch.amp.grad_scaler:._step_supports_amp_scaling")
def scaler_decides(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a scaler itself reads the overflow flags, and skips ``optimizer.step`` on overflow."""
    return not getattr(optimizer, "_step_supports_amp_scaling", False)


@uses("torch.optim.optimizer:._optimizer_step_pre_hooks", "torch.optim.optimizer:._optimizer_step_post_hooks")
def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[StepHooks, StepHooks]:
    """Return the hooks before and after each step of ``optimizer``."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def set_step_hooks(optimizer: torch.optim.Optimizer, before: StepHooks, after: StepHooks) -> None:
    """Replace the hooks of :func:`step_hooks`."""
    optimizer._optimizer_step_pre_hooks = before
    optimizer._optimizer_step_post_hooks = after


@uses("torch.optim.optimizer:._optimizer_load_state_dict_pre_hooks")
def adapts_state(optimizer: object) -> bool:
    """Return whether ``optimizer`` may change the state dicts that it loads, by its own method or by hooks."""
    is_plain = getattr(type(optimizer), "load_state_dict", None) is torch.optim.Optimizer.load_state_dict
    return not is_plain or bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


@uses("torch.optim.lr_scheduler:._step_count")
def step_count(scheduler: LRScheduler) -> int:
    """Return how often ``scheduler`` has stepped, including its initial step."""
    return scheduler._step_count


@uses("torch.optim.lr_scheduler:._step_count")
def count_step(scheduler: LRScheduler) -> None:
    """Count a step that ``scheduler`` skipped."""
    scheduler._step_count += 1
