"""XLA devices: TPUs, and all devices of PJRT. Operations are recorded, compiled, and run once per step.

There are two ways to use several devices. With one process per device (`accelerate launch --tpu`), gradients are summed
before the update. With one process for all devices (SPMD, after `torch_xla.runtime.use_spmd()`), the program is written
for one device, and the compiler splits the batch, and under FSDP the parameters, over all devices.

Xu et al., "GSPMD: General and Scalable Parallelization for ML Computation Graphs", 2021.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

import torch

from ...checkpointing.sharded import StateAccess
from ...distributed.world import World
from ...errors import SettingError
from ...modules import moved
from ...nested import recursively_apply, send_to_device
from ...parallel.base import Clipping, Strategy, StrategyOptions
from ...parallel.compile import compile_model
from ...parallel.fsdp.wrapping import find_ignored, find_wrap_units
from ...parallel.state import ModelState
from ...precision import Precision
from ...settings import env
from ...settings.labels import DistributedType
from ...training.recompute import recompute_activations

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from ...data_loader.loader import PreparedLoader

#: The mesh axis over which the batch and the parameters are sharded, by torch_xla's name.
AXIS = "fsdp"


def _runtime() -> ModuleType:
    return importlib.import_module("torch_xla.runtime")


def _sync() -> None:
    """Run the operations recorded so far, as one program."""
    importlib.import_module("torch_xla").sync()


def cast_everything(run: Accelerator) -> None:
    """Make XLA cast all floating-point tensors to bfloat16, for bf16 on TPUs, as long as ``run`` lives.

    With ACCELERATE_DOWNCAST_BF16 (`--downcast_bf16`), float32 becomes bfloat16 and float64 becomes float32.
    """
    if run.precision.label == "bf16" and _runtime().device_type() == "TPU":
        run.precision.is_autocast = False  # the device has no float32 to cast from
        name = "XLA_DOWNCAST_BF16" if env.flag("ACCELERATE_DOWNCAST_BF16") else "XLA_USE_BF16"
        env.set_variables_for(run, {name: 1})


@final
class XlaDevices(Strategy):
    """One program per step: replicas in one process each, or one process with tensors sharded over all devices."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        is_one_program = _runtime().is_spmd()
        if options.plugins.fsdp is not None and not is_one_program:
            raise SettingError(
                f"FSDP on {world.kind.name} devices takes one process for all of them, and there are {world.size}. "
                "Start the script with `python`, or with `accelerate launch --num_processes 1`."
            )
        self._device_mesh = _mesh_of_all() if is_one_program else None

    @property
    def label(self) -> DistributedType:
        """The distributed type: XLA."""
        return DistributedType.XLA

    # -- placing -------------------------------------------------------------------------------------------

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Cast ``model``, move it to the device and shard its parameters under FSDP."""
        model = precision.convert(model)
        plugin = None if evaluation_mode else self.options.plugins.fsdp
        units: list[torch.nn.Module] = []
        if plugin is not None:
            plugin.set_auto_wrap_policy(model)
            units = find_wrap_units(model, plugin.auto_wrap_policy, find_ignored(plugin.ignored_modules, model))
        if self.options.plugins.recompute is not None and not evaluation_mode:
            self.recompute(model, units)
        elif plugin is not None and plugin.activation_checkpointing:
            recompute_activations(units)
        precision.patch_forward(model)
        if device_placement or plugin is not None:
            model = moved(model, self.world.device)
        if plugin is not None:
            self._shard(model, units)
        elif self.world.size > 1 and not evaluation_mode:
            importlib.import_module("torch_xla.core.xla_model").broadcast_master_param(model)
        precision.patch_wrapped(model)
        dynamo = self.options.plugins.dynamo
        return model if dynamo is None else compile_model(model, dynamo)

    def _shard(self, model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> None:
        """Shard parameters over all devices; outputs of wrap units stay split by rows, so weights are gathered."""
        self._annotate(model.parameters())
        split = importlib.import_module("torch_xla.distributed.spmd.xla_sharding").apply_backward_optimization_barrier
        for unit in units:  # not around the model: the gradients of its inputs aren't needed
            split(unit)
            unit.register_forward_hook(self._keep_split)
        model.register_forward_hook(self._keep_split)

    def _keep_split(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        del module, inputs
        recursively_apply(self._split_batch, output)

    def _annotate(self, parameters: Iterable[torch.Tensor]) -> None:
        """Shard each of ``parameters`` along its longest dimension, unless it is already sharded."""
        for parameter in parameters:
            if parameter.ndim and not _is_annotated(parameter):
                dims: list[str | None] = [None] * parameter.ndim
                dims[parameter.shape.index(max(parameter.shape))] = AXIS
                _mark(parameter, self._device_mesh, dims)

    def _split_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Split the rows of ``tensor`` over all devices, if their number divides the rows, and return it."""
        mesh = self._device_mesh
        if mesh is not None and tensor.ndim and tensor.shape[0] % mesh.size() == 0 and not _is_annotated(tensor):
            _mark(tensor, mesh, [AXIS, *[None] * (tensor.ndim - 1)])
        return tensor

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Sum gradients over the processes before ``optimizer`` steps, and run the program after it."""
        if self.world.size > 1:

            def reduce(stepped: torch.optim.Optimizer, *_: object) -> None:
                self._reduce(parameter for group in stepped.param_groups for parameter in group["params"])

            optimizer.register_step_pre_hook(reduce)
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        gradient_state = self.options.gradient_state
        if gradient_state is not None:
            gradient_state.is_xla_gradients_synced = False
        _sync()

    def configure_loader(self, loader: PreparedLoader) -> None:
        """Run the previous batch's program when a new batch is read; split batches over this process's devices."""
        loader.device_prefetch = XlaPrefetch(self)

    # -- training ------------------------------------------------------------------------------------------

    def _reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average the gradients of ``parameters`` over the processes, once per update."""
        gradient_state = self.options.gradient_state
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if (
            self.world.size == 1
            or (gradient_state is not None and gradient_state.is_xla_gradients_synced)
            or not gradients
        ):
            return
        model = importlib.import_module("torch_xla.core.xla_model")
        model.all_reduce(model.REDUCE_SUM, gradients, scale=1.0 / self.world.size)
        if gradient_state is not None:
            gradient_state.is_xla_gradients_synced = True

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the averaged gradients to a global norm of at most ``clipping.max_norm``; return the norm before."""
        self._reduce(parameters)
        return super().clip_grad_norm(parameters, clipping)

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clamp every element of the averaged gradients to [-``clip_value``, ``clip_value``]."""
        self._reduce(parameters)
        super().clip_grad_value(parameters, clip_value)

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState[XlaDevices]:
        """The state of models on XLA devices."""
        return _XlaState(self)


@final
class _XlaState(ModelState[XlaDevices]):
    """The state of models that each process holds in full: only a single process shards.

    Gradients between two updates are recorded operations, which a checkpoint can't read.
    """

    def is_whole(self, model: torch.nn.Module | None = None) -> bool:
        """Return True."""
        return True

    def full_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, object]:
        """Return the full state dict of ``model`` in CPU memory, in which tied names share one tensor."""
        inner = self.strategy.unwrap(model, keep_torch_compile=False) if unwrap else model
        state = self.access.model_shards(inner)
        moved = {id(value): send_to_device(value, torch.device("cpu")) for value in state.values()}
        return {name: moved[id(value)] for name, value in state.items()}

    @property
    def access(self) -> StateAccess:
        """The direct access, as for one device: sharded tensors are returned whole."""
        _sync()
        return super().access


@final
class XlaPrefetch:
    """The transfer of batches to the device; it runs the recorded program while the next batch is copied."""

    def __init__(self, strategy: XlaDevices) -> None:
        self._strategy = strategy

    def send(self, batch: object) -> object:
        """Copy a batch to the device, with its rows split over all devices of an SPMD program."""
        sent = send_to_device(batch, self._strategy.world.device)
        return recursively_apply(self._strategy._split_batch, sent)

    def receive(self, sent: object) -> object:
        """Return the batch sent before, for a new program."""
        _sync()
        return sent


def _mesh_of_all() -> Any:
    spmd = importlib.import_module("torch_xla.distributed.spmd")
    count = _runtime().global_runtime_device_count()
    return spmd.Mesh(list(range(count)), (count,), (AXIS,))


def _is_annotated(tensor: torch.Tensor) -> bool:
    return bool(importlib.import_module("torch_xla")._XLAC._get_xla_sharding_spec(tensor))


def _mark(tensor: torch.Tensor, mesh: object, dims: Sequence[str | None]) -> None:
    importlib.import_module("torch_xla.distributed.spmd").mark_sharding(tensor, mesh, tuple(dims))
