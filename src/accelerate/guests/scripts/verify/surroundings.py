"""The conditions of a run, made in its processes: equal for all runs that are compared."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sized
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from ....accelerator import Accelerator
from ....data_loader import PreparedLoader
from ....distributed.random import set_seed
from ....nested import recursively_apply
from ....plugins.handlers import ActivationCheckpointing, DataLoaderConfiguration
from ....plugins.parallelism import ParallelismConfig
from ....settings.env import read
from ....torch_private.modules import batch_fetchers
from .kept_files import keep_files
from .record import Conditions
from .wrapping import Call, caller, is_of_script, trainer_of, wrap

#: Layers that almost every model has; others may have no block that is repeated.
_LAYERS: Final = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Embedding, torch.nn.LayerNorm)
_DROPOUTS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def apply(conditions: Conditions, folder: Path, script: Path, datasets: list[object]) -> None:
    """Give this process the conditions of the run: seeds, no dropout, shared batches, the CPU, and no files.

    Args:
        datasets: those of the script's loaders, in the order of their creation; others add to it.
    """
    set_seed(0)
    if not conditions.batch_parts:  # else all ranks draw the masks of the parts
        _leave_out_dropout()
    if conditions.splits_batches:
        wrap(DataLoader, "__init__", partial(_with_full_batches, conditions, datasets))
    wrap(Accelerator, "__init__", partial(_under, conditions, folder))
    if conditions.num_parts > 1:
        _accumulate_more(conditions.num_parts)
    for loader in (DataLoader, PreparedLoader) if conditions.counts_updates else ():
        wrap(loader, "__len__", partial(_in_updates, conditions.num_parts))
    if conditions.dtype:
        _compute_in(getattr(torch, conditions.dtype))
    if conditions.noise:
        wrap(Accelerator, "prepare_model", partial(_with_noise, conditions.noise, torch.Generator().manual_seed(0)))
    keep_files(folder)
    _without_cuda(script)


def _leave_out_dropout() -> None:
    for name in _DROPOUTS:
        # Ranks draw different masks. A function for each name, since TorchDynamo knows functions by their identity.
        wrap(torch.nn.functional, name, lambda _, input, *__, **___: input)
    wrap(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda attention, query, key, value, attn_mask=None, dropout_p=0.0, *rest, **kwargs: attention(
            query, key, value, attn_mask, 0.0, *rest, **kwargs
        ),
    )
    wrap(torch.nn.RNNBase, "__init__", _without_layer_dropout)  # its own, between layers


def _without_layer_dropout(make: Call, layers: torch.nn.RNNBase, *args: object, **kwargs: object) -> None:
    make(layers, *args, **kwargs)
    layers.dropout = 0.0


def _with_full_batches(
    conditions: Conditions,
    datasets: list[object],
    make: Call,
    loader: object,
    dataset: Sized,
    batch_size: int | None = 1,
    *args: object,
    **kwargs: object,
) -> None:
    """Make a loader with batches that can be shared, without the incomplete last one of a pass.

    Loaders for evaluation keep the last batch, and aren't divided into micro-batches.
    """
    evaluates = any(datasets[number] is dataset for number in conditions.evaluated if number < len(datasets))
    is_given = is_of_script(caller())  # prepare() makes others from it, whose batches are divided already
    num_used = 0
    if is_given and batch_size is not None and kwargs.get("batch_sampler") is None and len(args) < 3:
        own = conditions.num_shares if conditions.divides_itself else 1
        batch_size += -batch_size % (conditions.multiple // own)
        with contextlib.suppress(TypeError):  # a stream has no length
            if len(dataset) >= batch_size and not evaluates:
                kwargs["drop_last"], num_used = True, len(dataset) // batch_size * batch_size
        batch_size //= (1 if evaluates else conditions.num_parts) * conditions.num_shares // own
    if (conditions.keeps_tensors or conditions.evaluates) and len(args) < 4:  # samples are noted in this process
        kwargs.update(num_workers=0, prefetch_factor=None, persistent_workers=False)
    make(loader, dataset, batch_size, *args, **kwargs)
    if num_used:
        _use_first(getattr(loader, "sampler", None), num_used)


def _use_first(sampler: object, num_samples: int) -> None:
    """Let a sampler give so many samples in a pass: divided batches would leave out others at its end."""
    if type(sampler) is SequentialSampler:
        sampler.data_source = range(num_samples)
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples > num_samples:
        RandomSampler.__init__(sampler, sampler.data_source, num_samples=num_samples, generator=sampler.generator)


def _in_updates(num_parts: int, length: Call, loader: object) -> int:
    """Return the length of a loader, which is for the script the number of updates."""
    return length(loader) // (num_parts if is_of_script(caller()) else 1)


def _under(conditions: Conditions, folder: Path, make: Call, accelerator: object, *args: object, **kwargs: Any) -> None:
    """Make an Accelerator with the conditions, whose project is in `folder`."""
    if conditions.splits_batches:
        given = kwargs.get("dataloader_config")
        configuration = given if isinstance(given, DataLoaderConfiguration) else DataLoaderConfiguration()
        configuration.split_batches = conditions.num_shares == 1 and read("WORLD_SIZE", "1") != "1"
        kwargs["dataloader_config"] = configuration
    if conditions.num_parts > 1:
        plugin, trainer = kwargs.get("gradient_accumulation_plugin"), trainer_of(sys._getframe(1))
        if trainer is not None:  # it counts its micro-batches, and divides by their number, itself
            trainer.args.gradient_accumulation_steps *= conditions.num_parts
        elif plugin is not None:
            plugin.num_steps *= conditions.num_parts
        else:
            name = "gradient_accumulation_steps"
            kwargs[name] = kwargs.get(name, 1) * conditions.num_parts
    if conditions.recomputes:
        own = kwargs.get("kwargs_handlers") or ()
        kwargs["kwargs_handlers"] = [*own, ActivationCheckpointing(modules=list(_LAYERS))]
    if conditions.dtype or conditions.mixed_precision:
        kwargs["mixed_precision"] = conditions.mixed_precision or "no"
    if conditions.batch_parts:
        kwargs["batch_parts"] = conditions.batch_parts
    if conditions.keeps_tensors:
        kwargs["parallelism_config"] = _mesh_of(conditions, kwargs.get("parallelism_config"))
        if not conditions.shards:
            kwargs.pop("fsdp_plugin", None)
        if kwargs.get("project_dir") is not None:
            kwargs["project_dir"] = str(folder / "project")
        if kwargs.get("project_config") is not None:
            kwargs["project_config"].set_directories(str(folder / "project"))
    make(accelerator, *args, **kwargs)


def _accumulate_more(num_parts: int) -> None:
    """Let a script that sets the number of micro-batches later set the one of the run."""
    steps: Any = Accelerator.gradient_accumulation_steps

    def set_steps(accelerator: Accelerator, value: int) -> None:
        steps.fset(accelerator, value * num_parts)

    Accelerator.gradient_accumulation_steps = property(steps.fget, set_steps)  # type: ignore[assignment]


def _mesh_of(conditions: Conditions, given: ParallelismConfig | None) -> ParallelismConfig | None:
    """Return the mesh of the run, with the script's own handlers of its axes; None without one."""
    options: dict[str, Any] = {f"{axis}_size": size for axis, size in conditions.mesh.items()}
    for axis in conditions.mesh:
        handler = getattr(given, f"{axis}_handler", None)
        if handler is not None:
            options[f"{axis}_handler"] = handler
    return ParallelismConfig(**options) if options else None


def _compute_in(dtype: torch.dtype) -> None:
    """Make parameters, and what loaders return, of `dtype`, and leave autocast without effect."""
    torch.set_default_dtype(dtype)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for fetcher in batch_fetchers():
        wrap(fetcher, "fetch", lambda fetch, *args: recursively_apply(cast, fetch(*args)))
    wrap(
        Accelerator,
        "prepare_model",
        lambda prepare, self, model, *args, **kwargs: prepare(self, model.to(dtype), *args, **kwargs),
    )
    wrap(torch.autocast, "__init__", lambda make, *args, **kwargs: make(*args, **{**kwargs, "enabled": False}))


@torch.no_grad()
def _with_noise(
    noise: float,
    generator: torch.Generator,
    prepare: Call,
    accelerator: object,
    model: torch.nn.Module,
    *args: object,
    **kwargs: object,
) -> object:
    """Prepare a model, after a change of each parameter by a random part of its value, at most `noise`."""
    for parameter in model.parameters():
        parameter.mul_(1 + noise * (2 * torch.rand(parameter.shape, generator=generator) - 1))
    return prepare(accelerator, model, *args, **kwargs)


@final
class _OnHost(TorchFunctionMode):
    """A mode that computes on the CPU, for scripts with the name or the number of a missing GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = _options_on_host(kwargs or {})
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_host, args[1:]))
        return func(*args, **kwargs)


def _options_on_host(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _on_host(value) if name == "device" or not _is_number(value) else value
            for name, value in options.items()}  # fmt: skip


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _on_host(value: object) -> object:
    is_named = isinstance(value, (torch.device, str)) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_named or _is_number(value) else value


def _without_cuda(script: Path) -> None:
    """Let a script that uses GPUs run without one."""
    if torch.cuda.is_available():
        return
    _OnHost().__enter__()
    for name in ("set_device", "synchronize"):
        wrap(torch.cuda, name, lambda *_, **__: None)
    wrap(torch.cuda, "current_device", lambda _: 0)
    wrap(torch.nn.Module, "cuda", lambda _, module, *__, **___: module)
    wrap(  # also the number of a GPU
        torch.nn.Module,
        "to",
        lambda move, module, *args, **kwargs: move(module, *map(_on_host, args), **_options_on_host(kwargs)),
    )
    wrap(torch, "load", lambda load, *args, **kwargs: load(*args[:1], **{**kwargs, "map_location": "cpu"}))
    wrap(torch.distributed, "init_process_group", _through_gloo)
    wrap(
        torch.nn.parallel.DistributedDataParallel,
        "__init__",
        lambda make, ddp, module, device_ids=None, output_device=None, *rest, **options: make(
            ddp, module, None, None, *rest, **options
        ),
    )
    if "torch.device(" in script.read_text(encoding="utf-8", errors="replace"):
        setattr(torch, "device", _host_devices(torch.device))  # noqa: B010  (a type in its declaration)


def _host_devices(device: type[torch.device]) -> type:
    """Return a type of devices for which each number is the CPU: torch refuses numbers without a GPU."""

    @final
    class OnHost(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, device)

        def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
            numbered = args[:1] and _is_number(args[0])
            return device("cpu") if numbered else device(*args, **kwargs)

    return OnHost("device", (), {})


def _through_gloo(begin: Call, backend: str | None = None, *args: object, **kwargs: object) -> object:
    return begin("gloo" if backend == "nccl" else backend, *args, **{**kwargs, "device_id": None})
