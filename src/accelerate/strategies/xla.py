"""XLA devices: TPUs, and every device that PJRT drives. Work is recorded, compiled, and run when a step is cut off.

Two ways to use several devices. One process for each (what `accelerate launch --tpu` starts): gradients are summed
before the update. Or one process for all of them (SPMD, after `torch_xla.runtime.use_spmd()`): the program is written
for one device, and the compiler splits the batch, and under FSDP the parameters, over all.

Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch

from ..checkpointing.sharded import InPlace, StateAccess
from ..device_map.tied import find_tied_parameters, retie_parameters
from ..errors import SettingError
from ..nested import recursively_apply, send_to_device
from ..precision import Precision
from ..settings import env
from ..settings.labels import DistributedType
from ..world import World
from .base import Strategy
from .compile import compile_model
from .rebind import canonical_name
from .recompute import recompute_activations
from .units import find_ignored, find_units

#: The mesh axis over which the batch, and the parameters, are split; torch_xla's word.
AXIS = "fsdp"


def _runtime() -> Any:
    return importlib.import_module("torch_xla.runtime")


def _cut() -> None:
    """What was recorded runs, as one program."""
    importlib.import_module("torch_xla").sync()


def cast_everything(mixed_precision: str, owner: object) -> bool:
    """On TPUs bf16 means that all floating-point tensors are bfloat16; returns whether that was arranged.

    With ACCELERATE_DOWNCAST_BF16 (`--downcast_bf16`), float32 is bfloat16 and float64 is float32.

    Args:
        owner: the Accelerator; the compiler finds the setting in the environment while it lives.
    """
    if mixed_precision != "bf16" or _runtime().device_type() != "TPU":
        return False
    env.publish_for(owner, {"XLA_DOWNCAST_BF16" if env.flag("ACCELERATE_DOWNCAST_BF16") else "XLA_USE_BF16": 1})
    return True


@final
class XlaDevices(Strategy):
    """One program per step; replicas in processes of their own, or one process whose tensors lie over all devices."""

    is_replicated = True  # of several processes, each has the whole model: shards are one process's

    def __init__(self, world: World, options: Any) -> None:
        super().__init__(world, options)
        is_one_program = _runtime().is_spmd()
        if self.plugin is not None and not is_one_program:
            raise SettingError(
                f"FSDP on {world.kind.name} devices takes one process for all of them, and there are {world.size}. "
                "Start the script with `python`, or with `accelerate launch --num_processes 1`."
            )
        self._device_mesh = _mesh_of_all() if is_one_program else None

    @property
    def label(self) -> DistributedType:
        """XLA."""
        return DistributedType.XLA

    @property
    def plugin(self) -> Any:
        """The FullyShardedDataParallelPlugin, as it is now; None without one."""
        return self.options.plugins.get("fsdp_plugin")

    # -- placing -------------------------------------------------------------------------------------------

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """``model`` in its precision, on the device, its parameters over all devices where they are sharded."""
        model = precision.convert(model)
        plugin = None if evaluation_mode else self.plugin
        units: list[torch.nn.Module] = []
        if plugin is not None:
            plugin.set_auto_wrap_policy(model)
            units = find_units(model, plugin.auto_wrap_policy, find_ignored(plugin.ignored_modules, model))
            if plugin.activation_checkpointing:
                recompute_activations(units)
        precision.patch_forward(model)
        if device_placement or plugin is not None:
            model = _moved(model, self.world.device)
        if plugin is not None:
            self._shard(model, units)
        elif self.world.size > 1 and not evaluation_mode:
            importlib.import_module("torch_xla.core.xla_model").broadcast_master_param(model)
        precision.patch_wrapped(model)
        dynamo = self.options.dynamo_plugin
        return model if dynamo is None else compile_model(model, dynamo)

    def _shard(self, model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
        """Parameters lie over all devices; outputs of units keep the batch split, so that weights are gathered."""
        self._annotate(model.parameters())
        split = importlib.import_module("torch_xla.distributed.spmd.xla_sharding").apply_backward_optimization_barrier
        for unit in units:  # not around the model: nobody asks for the gradients of its inputs
            split(unit)
            unit.register_forward_hook(self._keep_split)
        model.register_forward_hook(self._keep_split)

    def _keep_split(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        recursively_apply(self._split_batch, output)

    def _annotate(self, parameters: Iterable[torch.Tensor]) -> None:
        """Each of ``parameters`` is cut along its longest dimension, unless it lies over the devices already."""
        for parameter in parameters:
            if parameter.ndim and not _is_annotated(parameter):
                dims: list[str | None] = [None] * parameter.ndim
                dims[parameter.shape.index(max(parameter.shape))] = AXIS
                _mark(parameter, self._device_mesh, dims)

    def _split_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` with its rows over all devices, where they can be dealt evenly."""
        mesh = self._device_mesh
        if mesh is not None and tensor.ndim and tensor.shape[0] % mesh.size() == 0 and not _is_annotated(tensor):
            _mark(tensor, mesh, [AXIS, *[None] * (tensor.ndim - 1)])
        return tensor

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are summed over the processes before ``optimizer`` steps, and the step ends the program."""
        if self.world.size > 1:
            optimizer.register_step_pre_hook(lambda *_: self._reduce(_gradients(optimizer)))
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        clock = self.options.clock
        if clock is not None:
            clock.is_xla_gradients_synced = False
        _cut()

    def adopt_loader(self, loader: Any) -> None:
        """Asking for a batch ends the program of the one before; a batch is split over the devices of this process."""
        loader.stage = XlaStage(self)

    # -- training ------------------------------------------------------------------------------------------

    def _reduce(self, gradients: list[torch.Tensor]) -> None:
        """The gradients are the mean over the processes, once in each update."""
        clock = self.options.clock
        if self.world.size == 1 or (clock is not None and clock.is_xla_gradients_synced) or not gradients:
            return
        model = importlib.import_module("torch_xla.core.xla_model")
        model.all_reduce(model.REDUCE_SUM, gradients, scale=1.0 / self.world.size)
        if clock is not None:
            clock.is_xla_gradients_synced = True

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """The norm of the gradients of all processes is at most ``max_norm``; returns what it was."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._reduce([parameter.grad for parameter in chosen if parameter.grad is not None])
        return super().clip_grad_norm(chosen, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """No element of the gradients of all processes is larger than ``clip_value`` in size."""
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._reduce([parameter.grad for parameter in chosen if parameter.grad is not None])
        super().clip_grad_value(chosen, clip_value)

    # -- state ---------------------------------------------------------------------------------------------

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of ``model``, in CPU memory; tied names share one tensor there too."""
        inner = self.unwrap(model, keep_torch_compile=False) if unwrap else model
        state = self.access.model_shards(inner)
        moved = {id(value): send_to_device(value, torch.device("cpu")) for value in state.values()}
        return {name: moved[id(value)] for name, value in state.items()}

    @property
    def access(self) -> StateAccess:
        """As for one device: a tensor that lies over several is handed over whole."""
        _cut()
        return InPlace(self.named_parameters, canonical_name)


@final
class XlaStage:
    """Batches on their way: what was recorded so far runs while the next one is copied."""

    def __init__(self, strategy: XlaDevices) -> None:
        self._strategy = strategy

    def send(self, batch: Any) -> Any:
        """The batch on the device, its rows over all devices of an SPMD program."""
        sent = send_to_device(batch, self._strategy.world.device)
        return recursively_apply(self._strategy._split_batch, sent)

    def receive(self, sent: Any) -> Any:
        """The batch, for a new program."""
        _cut()
        return sent


def _moved(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """``model`` on ``device``; weights that were tied are one parameter again, which moving to XLA undoes."""
    tied = find_tied_parameters(model)
    model = model.to(device)
    retie_parameters(model, tied)
    return model


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held: Iterator[torch.Tensor] = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in held if parameter.grad is not None]


def _mesh_of_all() -> Any:
    spmd = importlib.import_module("torch_xla.distributed.spmd")
    count = _runtime().global_runtime_device_count()
    return spmd.Mesh(list(range(count)), (count,), (AXIS,))


def _is_annotated(tensor: torch.Tensor) -> bool:
    return bool(importlib.import_module("torch_xla")._XLAC._get_xla_sharding_spec(tensor))


def _mark(tensor: torch.Tensor, mesh: Any, dims: Sequence[str | None]) -> None:
    importlib.import_module("torch_xla.distributed.spmd").mark_sharding(tensor, mesh, tuple(dims))
