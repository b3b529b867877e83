"""The options of parallelism: the mesh axes over which a model and its data are split."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..distributed.mesh import AXES, Mesh, build, equation
from ..errors import SettingError
from ..settings.option import OptionGroup, option
from ..settings.parallelism import (
    ContextParallelOptions,
    ParallelismOptions,
    SequenceParallelOptions,
    TensorParallelOptions,
)
from ..torch_private.distributed import flattened
from .handlers import LaunchedOptions, canonicalize

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed.world import World
    from ..settings.fsdp import FsdpOptions

SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass(repr=False, eq=False)
class PipelineParallelConfig(OptionGroup, title="Parallelism"):
    """The options with which pipeline parallelism splits a model and a batch.

    Args:
        schedule: ``"1f1b"`` (a stage keeps at most as many activations as there are stages), ``"gpipe"`` (all
            forwards, then all backwards) or ``"interleaved"`` (several stages per rank: smaller bubbles, more
            messages).
        num_micro_batches: the number of micro-batches in a batch; by default, the number of stages. A batch whose
            size isn't a multiple of it is split into fewer.
        split_points: names of the modules at which a new stage begins; by default, stages have about equal parameters.
        stages_per_rank: the number of stages on each rank; by default 2 if interleaved, else 1.
        example_inputs: the model's positional inputs for one micro-batch, for a forward that depends on values:
            it is traced with them (by torch.export), and its batches have this shape.
        reshard_between_parts: with ``dp_shard_size``, gather parameters for each micro-batch, as the FSDP plugin
            says, instead of once per batch: less memory, more communication.
    """

    schedule: Literal["1f1b", "gpipe", "interleaved"] = option("1f1b", "In which order stages work.", choices=SCHEDULES)
    num_micro_batches: int | None = option(None, "Into how many micro-batches a batch is split.", minimum=1)
    split_points: Any = option(None, "At which modules a new stage begins.", kind="object")
    stages_per_rank: int | None = option(None, "How many stages each rank has.", minimum=1)
    example_inputs: Any = option(None, "The model's inputs for one micro-batch.", kind="object")
    reshard_between_parts: bool = option(False, "Shards are gathered for each part of a batch.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise SettingError(
                f"PipelineParallelConfig(schedule={self.schedule!r}): choose one of {', '.join(map(repr, SCHEDULES))}."
            )
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if self.schedule == "interleaved" else 1
        for name in ("num_micro_batches", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise SettingError(f"PipelineParallelConfig({name}={value!r}): a whole number of at least 1.")
        if (self.stages_per_rank > 1) != (self.schedule == "interleaved"):
            raise SettingError(
                f"PipelineParallelConfig(schedule={self.schedule!r}, stages_per_rank={self.stages_per_rank}): several "
                "stages per rank are what 'interleaved' means. Set both, or neither."
            )
        if isinstance(self.split_points, str):
            self.split_points = [self.split_points]
        if self.example_inputs is not None and not isinstance(self.example_inputs, (tuple, list)):
            self.example_inputs = (self.example_inputs,)


# --------------------------------------------------------------------------------------------------
# The axes

_ATTENTIONS_WITHOUT_SEQUENCE_PARALLELISM = ("eager", "flex_attention")


class _Accelerated(Protocol):
    """The attributes of an Accelerator that the last check reads."""

    @property
    def num_processes(self) -> int: ...
    @property
    def state(self) -> object: ...


@dataclass(repr=False, eq=False)
class TorchTensorParallelConfig(TensorParallelOptions):
    """The options of tensor parallelism through torch.

    Args:
        enable_async_tp: overlap communication with matrix products in compiled layers, on devices where torch can.
        plan: patterns of module names (``*`` matches one part of a name) -> a style: "colwise", "rowwise", ...
            (``STYLES`` of ``accelerate.parallel.tensor_parallel``), or an object of torch.distributed.tensor.parallel.
            It replaces the model's own ``tp_plan``, if there is one.
    """


@dataclass
class TorchTensorParallelPlugin:
    """The deprecated spelling of ``ParallelismConfig(tp_size=...)``."""

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None


@dataclass(repr=False, eq=False)
class TorchContextParallelConfig(LaunchedOptions, ContextParallelOptions):
    """The options of context parallelism: exchange keys and values by ``allgather`` or ``alltoall``."""

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, "cp_comm_strategy")


@dataclass
class ExpertParallelConfig:
    """The options of expert parallelism: which modules hold experts.

    Args:
        plan: name patterns (``*`` matches one part) of the modules that hold experts. Their parameters are stacked,
            one row per expert. They are called with tokens sorted by expert, and the number of tokens of each expert:
            ``experts(tokens, counts)``.
    """

    plan: Sequence[str] = ()


@dataclass(repr=False, eq=False)
class DeepSpeedSequenceParallelConfig(LaunchedOptions, SequenceParallelOptions):
    """The options of DeepSpeed's sequence parallelism (Ulysses): how to split sequences and which attention to call."""

    def _resolve(self, given: Mapping[str, object]) -> None:
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise SettingError(
                "DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False): sequences of one length need that "
                "length: pass `sp_seq_length` or set PARALLELISM_CONFIG_SP_SEQ_LENGTH."
            )
        if self.sp_attn_implementation in _ATTENTIONS_WITHOUT_SEQUENCE_PARALLELISM:
            raise SettingError(
                f"Invalid sp_attn_implementation: {self.sp_attn_implementation}. 'eager' and "
                "'flex_attention' need the "
                "whole sequence on one rank: choose 'sdpa', 'flash_attention_2' or 'flash_attention_3'."
            )


_HANDLERS = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
    "ep": ExpertParallelConfig,
    "pp": PipelineParallelConfig,
}


@dataclass(repr=False, eq=False)
class ParallelismConfig(LaunchedOptions, ParallelismOptions):
    """The size of every axis of parallelism; their product is the number of processes.

    ``dp_replicate`` replicates the model, ``dp_shard`` shards it (FSDP), ``tp`` shards its matrices, ``cp`` and ``sp``
    shard its sequences (ring or all-gather attention; Ulysses), ``pp`` splits its layers into stages, ``ep`` shards the
    experts of its layers.
    """

    def _resolve(self, given: Mapping[str, object]) -> None:
        self.device_mesh: DeviceMesh | None = None
        #: The existing ones of ``dp``, ``dp_shard_cp`` and ``dp_cp``; newer torch requires its callers to keep them.
        self.flattened_meshes: dict[str, DeviceMesh] = {}
        self._check_sizes()
        canonicalize(self, "cp_backend", "sp_backend")
        for axis, kind in _HANDLERS.items():
            self._check_handler(axis, kind)

    def _check_sizes(self) -> None:
        for axis in AXES:
            size = getattr(self, f"{axis}_size")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise SettingError(
                    f"{axis}_size must be a whole number of at least 1, but got {size!r} ({self.equation()})."
                )
        if self.cp_size > 1 and self.sp_size > 1:
            raise SettingError(
                "Context parallelism (CP) and sequence parallelism (SP) both split the sequence and are mutually "
                f"exclusive: set cp_size=1 or sp_size=1 ({self.equation()})."
            )
        if (self.tp_size > 1 or self.cp_size > 1) and self.dp_replicate_size > 1 and self.dp_shard_size == 1:
            raise SettingError(
                "Tensor/context parallelism (tp_size or cp_size > 1) cannot be combined with pure replication "
                "(dp_replicate_size > 1, dp_shard_size == 1). Set dp_replicate_size=1 for FSDP + TP/CP, or "
                f"dp_shard_size > 1 for HSDP + TP/CP ({self.equation()})."
            )

    def _check_handler(self, axis: str, kind: type[object]) -> None:
        handler, size = getattr(self, f"{axis}_handler"), getattr(self, f"{axis}_size")
        if handler is not None and not isinstance(handler, kind):
            raise SettingError(
                f"ParallelismConfig({axis}_handler=...) requires a {kind.__name__}, but got a {type(handler).__name__}."
            )
        if handler is not None and size == 1:
            warnings.warn(
                f"ParallelismConfig: {axis}_handler is set but {axis}_size is 1, so it has no effect.",
                stacklevel=5,
            )
        if handler is None and size > 1 and axis != "ep":
            setattr(self, f"{axis}_handler", kind())

    def __repr__(self) -> str:
        lines = ",\n\t".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))
        return f"{type(self).__name__}(\n\t{lines},\n\ttotal_size={self.total_size})"

    def to_json(self) -> str:
        """Return the configuration as JSON text."""
        return json.dumps({field.name: _plain(getattr(self, field.name)) for field in fields(self)})

    def equation(self) -> str:
        """Return all sizes and their product, as error messages show them."""
        return equation({axis: getattr(self, f"{axis}_size") for axis in AXES})

    @property
    def _sizes(self) -> dict[str, int]:
        return {
            axis: getattr(self, f"{axis}_size") for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep")
        }

    def _set_size(self, parallelism: str, size: int) -> None:
        if parallelism not in self._sizes:
            raise SettingError(f"Parallelism must be one of {list(self._sizes)}, but got {parallelism!r}.")
        setattr(self, f"{parallelism}_size", size)

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._sizes[axis] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes that split the data, but not the computation of a sample."""
        return self._active("dp_replicate", "dp_shard", "ep")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes whose ranks share samples."""
        return self._active("tp", "cp", "sp", "pp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes over which FSDP shards parameters."""
        return self._active("dp_shard", "ep", "cp", *self._own_sequence_axes)

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes over which a loss is averaged."""
        return self._active("dp_replicate", "dp_shard", "ep", "cp", *self._own_sequence_axes)

    @property
    def _own_sequence_axes(self) -> tuple[str, ...]:
        """The sequence-parallel axis; empty if DeepSpeed itself averages over its ranks."""
        return ("sp",) if self.sp_backend == "torch" else ()

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The mesh axes for FSDP; the last one is flattened and shards parameters."""
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes with more than one process."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def total_size(self) -> int:
        """The number of processes in this configuration."""
        return math.prod(self._sizes.values())

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that share one sample."""
        return self.tp_size * self.cp_size * self.sp_size * self.pp_size

    @property
    def data_parallel_size(self) -> int:
        """The number of different parts of the data."""
        return self.dp_replicate_size * self.dp_shard_size * self.ep_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether the model is replicated."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether the model is sharded over the data-parallel ranks."""
        return self.dp_shard_size > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether matrices are split over ranks."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split with context parallelism."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split with sequence parallelism."""
        return self.sp_size > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether layers are split into pipeline stages."""
        return self.pp_size > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are sharded over ranks."""
        return self.ep_size > 1

    @property
    def _leaves_mesh_to_deepspeed(self) -> bool:
        return self.sp_enabled and self.sp_backend == "deepspeed"

    def mesh(self, world: World) -> Mesh:
        """Return the mesh of the ranks of ``world``; process groups are created when they are first used.

        Raises:
            SettingError: the product of the sizes isn't the size of ``world``.
        """
        if self._leaves_mesh_to_deepspeed:
            return Mesh.of(world)
        return Mesh.of(world, lambda: self.get_device_mesh(world.device.type), **self._sizes)

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names and sizes of the active axes, outermost first."""
        names = tuple(self._active(*AXES))
        return names, tuple(self._sizes[name] for name in names)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the mesh over all processes, and its flattened axes ``dp``, ``dp_shard_cp`` and ``dp_cp``.

        Return None if no axis is active, and with DeepSpeed's sequence parallelism, which creates its own groups.
        """
        names, sizes = self._get_mesh()
        mesh = None if self._leaves_mesh_to_deepspeed else build(device_type, names, sizes)
        if mesh is None:
            return None
        joined_axes = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        self.flattened_meshes = {name: flattened(mesh[tuple(axes)], name) for name, axes in joined_axes.items() if axes}
        self.device_mesh = mesh
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the existing mesh, or build one for ``device_type``."""
        if self.device_mesh is None:
            if device_type is None:
                raise SettingError("You need to pass a device_type, e.g. 'cpu', to build the device mesh.")
            return self.build_device_mesh(device_type)
        if device_type is not None and self.device_mesh.device_type != device_type:
            raise SettingError(
                f"The device mesh was built for device_type {self.device_mesh.device_type!r}, not {device_type!r}."
            )
        return self.device_mesh

    def _validate_accelerator(self, accelerator: _Accelerated) -> None:
        """Check that the sizes fit the processes and the strategy of ``accelerator``."""
        self.fit(accelerator.num_processes, getattr(accelerator.state, "fsdp_plugin", None))

    def fit(self, processes: int, fsdp: FsdpOptions | None) -> None:
        """Check that the sizes fit the number of processes and the FSDP plugin; if all are 1, use plain replication.

        Raises:
            SettingError: the product is another number, or FSDP can't shard over the axes.
        """
        if self.total_size == 1 and processes > 1:
            # All sizes are defaults: use plain replication.
            self._set_size("dp_replicate", processes)
        if self._leaves_mesh_to_deepspeed and processes % self.sp_size:
            raise SettingError(
                f"sp_size={self.sp_size} doesn't divide the {processes} processes into groups that compute one "
                "sequence together. Choose a divisor, or start another number of processes."
            )
        if self.total_size != processes and not self._leaves_mesh_to_deepspeed:
            raise SettingError(
                f"ParallelismConfig total_size ({self.total_size}) does not match num_processes ({processes}): "
                f"{self.equation()}. Change a size, or start {self.total_size} processes."
            )
        if fsdp is not None and fsdp.fsdp_version != 2 and self.total_size > 1:
            raise SettingError(
                f"ParallelismConfig needs FSDP2, but the FSDP plugin has fsdp_version={fsdp.fsdp_version}: set it to 2."
            )
        if fsdp is not None and self.total_size > 1 and not self.dp_shard_cp_dim_names:
            raise SettingError(
                "FSDP is enabled but dp_shard_size and cp_size are both 1, so there is no axis to shard over: "
                f"{self.equation()}. Give FSDP some of the ranks (dp_shard_size > 1), or launch without FSDP."
            )


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value
