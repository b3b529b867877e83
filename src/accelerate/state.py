"""Global views of the run: PartialState for the world, AcceleratorState for world and settings.

All instances of a class share one dict, which is empty until the world is joined. `_reset_state()` empties it without
destroying the process group, which the next instance reuses.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch

from .devices.table import kind_of
from .distributed import process_control
from .distributed.process_control import Parameters, Result
from .distributed.world import World, current_world, expected_backend, forget_world, join_world, leave_group, set_debug
from .errors import SettingError
from .plugins import Engine, Plugins
from .precision import choose as choose_precision
from .settings.env import flag, restore_variables
from .settings.labels import DistributedType
from .training.accumulation import GradientState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .plugins.fsdp import FullyShardedDataParallelPlugin
    from .plugins.handlers import AutocastKwargs, TorchDynamoPlugin
    from .plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
    from .settings.run import Settings

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "ThreadLocalSharedDict",
    "deepspeed_required",
    "do_nothing",
    "get_mixed_precision_context_manager",
    "is_initialized",
]


def is_initialized() -> bool:
    """Return True if an Accelerator has initialised AcceleratorState."""
    return AcceleratorState._shared_state != {}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[object]:
    """Return the autocast context of this process's Accelerators; a null context without `native_amp`.

    Raises:
        SettingError: no Accelerator was created yet.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    return choose_precision(state.mixed_precision, state.device.type).autocast(autocast_kwargs)


def deepspeed_required(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wrap ``func`` so that it raises unless the Accelerator of this process is configured for DeepSpeed."""

    @functools.wraps(func)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if is_initialized() and AcceleratorState().deepspeed_plugins is None:
            raise SettingError(
                f"`{func.__name__}` needs DeepSpeed, and the Accelerator of this process isn't configured for it. Give "
                "it a `deepspeed_plugin`, or start with `accelerate launch --use_deepspeed`."
            )
        return func(*args, **kwargs)

    return guarded


def do_nothing(*args: object, **kwargs: object) -> None:
    """Do nothing."""
    return None


@final
class Flag(int):
    """A boolean that scripts may also call: ``accelerator.is_main_process`` and ``accelerator.is_main_process()``."""

    def __new__(cls, value: bool) -> Flag:
        return super().__new__(cls, bool(value))

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))

    __str__ = __repr__


@final
class ThreadLocalSharedDict(threading.local):
    """A class attribute that is one dict for all instances of the class, separately in each thread."""

    def __init__(self, thread_local: bool = False) -> None:
        del thread_local  # it always is
        self._storage: dict[str, Any] = {}

    def __get__(self, instance: object, owner: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, instance: object, value: dict[str, Any]) -> None:
        self._storage = value


class _View(ABC):
    """Attributes shared by all instances of a class, and the methods that need only the world."""

    _shared_state: ClassVar[dict[str, Any]]

    device: torch.device
    distributed_type: DistributedType
    backend: str | None
    num_processes: int
    process_index: int
    local_process_index: int

    def __getattr__(self, name: str) -> Any:
        owner = type(self).__name__
        if not type(self)._shared_state and not name.startswith("__"):
            raise AttributeError(
                f"`{owner}` object has no attribute `{name}`. This happens if `{owner}._reset_state()` was called and "
                "an `Accelerator` or `PartialState` was not reinitialized. Make the Accelerator anew."
            )
        from .settings.tree import ROWS  # here, because most programs don't need the tables

        engines = (row for row in ROWS if row.paradigm and name in row.arguments)
        paradigm = next((row.options.option_group.title for row in engines), "")
        why = f": this run doesn't use {paradigm}. Ask with `getattr(state, {name!r}, None)`." if paradigm else ""
        raise AttributeError(f"'{owner}' object has no attribute '{name}'{why}")

    @staticmethod
    @abstractmethod
    def _reset_state() -> None:
        """Empty the view."""

    def _bind(self) -> None:
        object.__setattr__(self, "__dict__", type(self)._shared_state)  # all instances are one

    def _world(self) -> World:
        world = current_world()
        return join_world() if world is None else world

    def _show(self, world: World) -> None:
        self._world_cpu = world.kind.name == "cpu"
        self.device = world.device
        self.backend = world.backend
        self.num_processes = world.size
        self.process_index = world.rank
        self.local_process_index = world.local_rank
        self.distributed_type = DistributedType(world.label)

    @property
    def initialized(self) -> bool:
        """Whether the view is filled."""
        return type(self)._shared_state != {}

    @property
    def debug(self) -> bool:
        """Whether collectives are checked before they run; it can be assigned at any time, in either view."""
        world = current_world() if self.initialized else None
        if world is None:
            raise AttributeError("debug")  # `__getattr__` gives the reason
        return world.debug

    @debug.setter
    def debug(self, value: bool) -> None:
        set_debug(value)

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook or debug launcher forked this process."""
        return flag("FORK_LAUNCHED")

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process calls this."""
        process_control.wait_for_everyone(self._world())

    def split_between_processes(self, inputs: object, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Enter a context whose value is this process's part of `inputs`."""
        return process_control.split_between_processes(inputs, apply_padding, world=self._world())

    def main_process_first(self) -> AbstractContextManager[None]:
        """Enter a context whose block runs on rank 0 first, then on the others."""
        return process_control.main_process_first(self._world())

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Enter a context whose block runs first on the first process of each host, then on the others."""
        return process_control.local_main_process_first(self._world())

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print once per host."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        """Destroy the given process group; without one, release its holders and leave the world."""
        if not (self.fork_launched and group is None):
            leave_group(group)


class PartialState(_View, process_control.ProcessGuards):
    """The rank, world size and device of this process; the first instance joins the world, and all others share it.

    Args:
        cpu: compute on the CPU even if there is an accelerator.
        kwargs: `backend`, `timeout`, `init_method` and other arguments of `torch.distributed.init_process_group`.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self._bind()
        if self.initialized:
            return
        sagemaker = kwargs.pop("_use_sagemaker_dp", None)
        cpu = cpu or flag("ACCELERATE_USE_CPU")
        backend, label = self._prepare_backend(cpu, bool(sagemaker), kwargs.pop("backend", None))
        world = join_world(cpu=cpu, backend=backend, alone=backend is None, **kwargs)
        self._cpu = cpu
        self._show(world)
        if world.backend is not None and world.backend == backend:
            self.distributed_type: DistributedType = DistributedType(label)  # a library may replace the method

    def __repr__(self) -> str:
        """Return the attributes, one per line."""
        return (
            f"Distributed environment: {self.distributed_type}{'  Backend: ' + self.backend if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """Return the backend of the process group (None: one process without a group) and the world's label.

        Libraries replace this method to keep a process out of the process group.
        """
        expected, kind = expected_backend(cpu=cpu, backend=backend)
        return expected, DistributedType(kind.label if expected is not None else "NO")

    @staticmethod
    def _reset_state() -> None:
        """Empty the view; the next instance reuses the process group, if there is one."""
        PartialState._shared_state.clear()
        forget_world()

    @property
    def default_device(self) -> torch.device:
        """The device that this process would use without other processes."""
        from .devices.table import available_kind

        return available_kind().device()

    def set_device(self) -> None:
        """Make `device` the default for new tensors on the accelerator."""
        kind_of(self.device).set_device(self.device)


class AcceleratorState(_View):
    """The settings of the first Accelerator, with the rank, world size and device of this process.

    An Accelerator fills it; after that, `AcceleratorState()` has the same values everywhere. Before any Accelerator,
    its constructor fills PartialState and raises. `fsdp_plugin` and `megatron_lm_plugin` exist only if the run uses
    them.

    Raises:
        SettingError: no Accelerator exists yet, or the arguments contradict its own.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    dynamo_plugin: TorchDynamoPlugin | None
    deepspeed_plugins: Mapping[str, Any] | None
    fsdp_plugin: FullyShardedDataParallelPlugin
    torch_tp_plugin: TorchTensorParallelPlugin | None
    megatron_lm_plugin: Any
    parallelism_config: ParallelismConfig | None
    device_mesh: DeviceMesh | None

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugin: Engine | Mapping[str, Engine] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: Engine | None = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self._bind()
        if self.initialized:
            PartialState()  # its view is filled whenever this one is
            self._check(mixed_precision, cpu)
            return
        if not _from_accelerator:
            PartialState(cpu, **kwargs)  # rank and device can be read all the same
            raise SettingError(
                "Please make sure to properly initialize your accelerator via `accelerator = Accelerator()` before "
                "using any functionality from the `accelerate` library."
            )
        from .settings.run import collect

        settings = collect(
            {
                "mixed_precision": mixed_precision,
                "use_cpu": cpu,
                "deepspeed_plugin": deepspeed_plugin,
                "fsdp_plugin": fsdp_plugin,
                "megatron_lm_plugin": megatron_lm_plugin,
                "parallelism_config": parallelism_config,
            }
        )
        world = join_world(cpu=settings.run.use_cpu, **kwargs)
        engines = {"deepspeed": deepspeed_plugin, "megatron": megatron_lm_plugin}
        plugins = Plugins(
            fsdp_plugin,
            {name: plugin for name, plugin in engines.items() if plugin is not None},
            parallelism_config,
            dynamo_plugin,
            torch_tp_plugin,
        )
        self._take(settings, world, plugins)

    @classmethod
    def _fill(cls, settings: Settings, world: World, plugins: Plugins) -> AcceleratorState:
        """Return the state for these settings; keep an earlier Accelerator's if nothing contradicts it."""
        state = object.__new__(cls)
        state._bind()
        if state.initialized:
            PartialState()
            is_argument = settings.source_of("run.mixed_precision").kind == "argument"
            state._check(str(settings.run.mixed_precision) if is_argument else None, settings.run.use_cpu)
        else:
            state._take(settings, world, plugins)
        return state

    def _take(self, settings: Settings, world: World, plugins: Plugins) -> None:
        PartialState()
        self._show(world)
        self._mixed_precision = str(settings.run.mixed_precision)
        self.dynamo_plugin = plugins.dynamo
        deepspeed = plugins.engines.get("deepspeed")
        if deepspeed is not None and not isinstance(deepspeed, Mapping):
            deepspeed = {"default": deepspeed}
        self.deepspeed_plugins = deepspeed
        self.torch_tp_plugin = plugins.torch_tp
        # Programs ask with `hasattr` whether a run uses these, and then read them.
        if plugins.fsdp is not None:
            self.fsdp_plugin = plugins.fsdp
        if "megatron" in plugins.engines:
            self.megatron_lm_plugin = plugins.engines["megatron"]
        self.parallelism_config = plugins.parallelism
        self.device_mesh = None
        self.downcast_bfloat: bool = flag("ACCELERATE_DOWNCAST_BF16")
        self.use_ipex: bool | None = None
        from .settings.tree import ROWS

        chosen = next((row.paradigm for row in ROWS if row.paradigm and getattr(settings, row.name)), None)
        is_xla = bool(world.kind.runtime)  # sharding is a way of compiling there
        if chosen is not None and not is_xla and (world.backend is not None or settings.fsdp is None):
            self.distributed_type = DistributedType(chosen)

    def _check(self, mixed_precision: str | None, cpu: bool) -> None:
        wrong = made = ""
        if cpu and not self._world_cpu:
            wrong, made = "cpu=True", f"to compute on {self.device}"
        elif mixed_precision is not None and mixed_precision != self._mixed_precision and not self._is_deepspeed():
            wrong, made = f"mixed_precision={mixed_precision!r}", f"with mixed_precision={self._mixed_precision!r}"
        if wrong:
            raise SettingError(
                "AcceleratorState has already been initialized and cannot be changed, restart your runtime completely "
                f"and pass `{wrong}` to `Accelerator()`: the first Accelerator of this process was made {made}."
            )

    def __repr__(self) -> str:
        """Return the attributes, one per line."""
        lines = PartialState().__repr__() + f"\nMixed precision type: {self.mixed_precision}\n"
        if self._is_deepspeed() and self.deepspeed_plugin is not None:
            lines += f"ds_config: {self.deepspeed_plugin.deepspeed_config}\n"
        return lines

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Empty the view (on request also PartialState's), without destroying the process group.

        Existing Accelerators have to be created anew; variables that they set in the environment are removed.
        """
        AcceleratorState._shared_state.clear()
        restore_variables()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """The precision: no, fp16, bf16 or fp8; under DeepSpeed, that of its configuration."""
        plugin = self.deepspeed_plugin if self._is_deepspeed() else None
        if plugin is None or self._mixed_precision == "fp8":
            return self._mixed_precision
        config = plugin.deepspeed_config
        enabled = (name for name in ("fp16", "bf16") if config.get(name, {}).get("enabled", False))
        return next(enabled, "no")

    def _is_deepspeed(self) -> bool:
        return self.deepspeed_plugins is not None

    @property
    def is_fsdp2(self) -> bool:
        """Whether `fully_shard` (FSDP 2) shards parameters."""
        plugin: FullyShardedDataParallelPlugin | None = getattr(self, "fsdp_plugin", None)
        return plugin is not None and plugin.fsdp_version == 2

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeedPlugin in use, or None."""
        plugins = self.deepspeed_plugins
        return next(plugin for plugin in plugins.values() if plugin.selected) if plugins else None

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed plugin called `name`."""
        return (self.deepspeed_plugins or {})[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Make the DeepSpeed plugin called `name` the active one; raise SettingError without DeepSpeed."""
        if self.deepspeed_plugins is None:
            raise SettingError(f"select_deepspeed_plugin({name!r}): this run doesn't use DeepSpeed.")
        for plugin in self.deepspeed_plugins.values():
            plugin._unselect()
        self.deepspeed_plugins[str(name)].select(_from_accelerator_state=True)
