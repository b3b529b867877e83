"""Private names of torch.distributed: stores, process groups, meshes, DistributedDataParallel."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

# torch documents these names in torch.distributed, but type checkers don't find them there.
from torch._C._distributed_c10d import FileStore, GradBucket, PrefixStore, Store, TCPStore

from .names import declare, uses

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

__all__ = [
    "FileStore", "GradBucket", "PrefixStore", "Store", "TCPStore",
    "KEYS_PER_REQUEST", "all_gather_single", "second_connection", "tcp_store", "set_keys", "get_keys", "shard_locally",
    "shard_offset", "default_store", "flattened", "find_tensors", "forget_comm_hooks", "concatenated",
    "gradient_order", "has_stateful_comm_hook", "flight_records", "ranks_of_group", "overlap_tensor_parallel",
    "set_process_group", "set_ring_rotation", "synchronize_buffers",
]  # fmt: skip

KEYS_PER_REQUEST: Final = 1024
_C10D = "torch._C._distributed_c10d"
declare(__name__, *(f"{_C10D}:{name}" for name in ("FileStore", "GradBucket", "PrefixStore", "Store", "TCPStore")))


@uses(("torch.distributed.distributed_c10d:_get_default_store", ""))
def default_store() -> Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def flight_records() -> list[str]:
    """Return torch's records of this rank's collectives as JSON, for the host's backend and the device's.

    A backend without a recorder has none.
    """
    found: list[str] = []
    for recorder in ("fr", "nccl"):  # not registered: nothing is lost where a torch lacks one
        dump = getattr(sys.modules[_C10D], f"_dump_{recorder}_trace_json", None)
        if dump is not None:
            with contextlib.suppress(RuntimeError):
                found.append(dump(True, False).decode(errors="replace"))
    return found


@uses(("torch.distributed.distributed_c10d:_resolve_process_group", "group_name"))
def ranks_of_group(name: str) -> list[int]:
    """Return the ranks of the process group of this name; empty if it is unknown."""
    try:
        resolve: Any = dist.distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
        return dist.get_process_group_ranks(resolve(name))
    except (RuntimeError, ValueError, KeyError):
        return []


def all_gather_single(
    output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool
) -> dist.Work | None:
    """Gather ``part`` of all ranks into ``output``; a collective.

    torch 2.13 renamed ``all_gather_into_tensor``, and warns about the old name.
    """
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, part, group=group, async_op=async_op)


def second_connection(store: Store) -> Store:
    """Return the same store over another connection.

    Raises:
        AttributeError: this torch doesn't support that.
        NotImplementedError: this store, written in Python, doesn't support it.
    """
    try:
        return store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        if "pure virtual" in str(error):
            raise NotImplementedError("clone") from error
        raise


def tcp_store(store: Store) -> TCPStore | None:
    """Return the TCP store that ``store`` is or wraps; None for a store of another kind."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def set_keys(store: Store, values: Mapping[str, str]) -> None:
    """Set many keys, with one request per 1,024 keys if the store supports that."""
    for keys in _batches(list(values)):
        store.multi_set(keys, [values[key] for key in keys])  # pyright: ignore[reportAttributeAccessIssue]


def get_keys(store: Store, keys: Sequence[str]) -> list[str]:
    """Return the values of keys as soon as all are set, with one request per 1,024 keys."""
    if len(keys) == 1:
        return [store.get(keys[0]).decode()]
    return [value.decode() for batch in _batches(keys) for value in store.multi_get(batch)]


def _batches(keys: Sequence[str]) -> list[list[str]]:
    """Return the keys in batches, one per request, of a size that torch's server reads fast.

    If a request arrives in several pieces, the server reads it again from its start with each piece: 16,384 keys take
    1.2 s of CPU time in one request, and 0.04 s in sixteen.
    """
    return [list(keys[start : start + KEYS_PER_REQUEST]) for start in range(0, len(keys), KEYS_PER_REQUEST)]


@uses(("torch.distributed.device_mesh:DeviceMesh._flatten", "self, mesh_dim_name"))
def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return ``mesh`` with all axes flattened into one, called ``name``."""
    return mesh._flatten(name)


@uses(("torch.distributed.device_mesh:DeviceMesh._concatenate", "device_mesh_list", None, "2.10"))
def concatenated(meshes: Sequence[DeviceMesh], root: DeviceMesh | None) -> DeviceMesh:
    """Return one mesh with the axes of all ``meshes``, which are submeshes of ``root``."""
    join: Any = getattr(type(meshes[0]), "_concatenate", None)
    if join is not None:
        return join(list(meshes))
    assert root is not None  # before torch 2.10 a flattened axis is found under its name
    return root[tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())]


@uses("torch.distributed.tensor.placement_types:_StridedShard")
def shard_of(dim: int, split_factor: int) -> Placement:
    """Return the placement that shards dimension ``dim``, cut into ``split_factor`` parts by another axis."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def shard_locally(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Shard a tensor that every rank has in full, without communication."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    if "src_data_rank" in inspect.signature(distribute_tensor).parameters:
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    # torch 2.6 always sends from the first rank; here each rank shards a tensor that is the same everywhere
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(mesh, placements)


@uses(("torch.distributed.tensor._utils:compute_local_shape_and_global_offset", "global_shape, mesh, placements"))
def shard_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard of ``tensor``, and its offset in each dimension."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


@uses(("torch.nn.parallel.distributed:_find_tensors", "obj"))
def find_tensors(value: object) -> Iterable[torch.Tensor]:
    """Return the tensors in any structure, found as by DistributedDataParallel's search for unused parameters."""
    from torch.nn.parallel.distributed import _find_tensors

    return _find_tensors(value)


@uses(("torch.nn.parallel.distributed:DistributedDataParallel._sync_buffers", "self"))
def synchronize_buffers(replica: torch.nn.parallel.DistributedDataParallel) -> None:
    """Broadcast the main process's buffers to all ranks."""
    replica._sync_buffers()


@uses(("torch.nn.parallel.distributed:DistributedDataParallel._update_process_group", "self, new_process_group"))
def set_process_group(replica: torch.nn.parallel.DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Let ``replica`` reduce gradients and broadcast buffers over the ranks of ``group``."""
    replica._update_process_group(group)


@uses("torch.nn.parallel.distributed:._comm_hooks")
def forget_comm_hooks(replica: torch.nn.parallel.DistributedDataParallel) -> None:
    """Drop the states of the communication hooks of ``replica``."""
    replica._comm_hooks.clear()


@uses("torch.nn.parallel.distributed:._comm_hooks")
def has_stateful_comm_hook(replica: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a communication hook of ``replica`` has state, such as compression errors."""
    return any(not isinstance(state, (dist.ProcessGroup, type(None))) for _, state in replica._comm_hooks)


@uses(("torch.nn.parallel.distributed:DistributedDataParallel._get_ddp_logging_data", "self"))
def gradient_order(replica: torch.nn.parallel.DistributedDataParallel) -> list[int] | None:
    """Return the parameters' numbers in the order in which torch fills the buckets after the first backward.

    None before the first backward that reduces, and if torch keeps the first order.
    """
    data: Any = replica._get_ddp_logging_data()
    if not data.get("has_rebuilt_buckets"):  # recorded by the next forward, which may come after a save
        replica.logger.set_runtime_stats_and_log()  # pyright: ignore[reportOptionalMemberAccess]
        data = replica._get_ddp_logging_data()
    order = data.get("rebuilt_per_bucket_param_indices") or data.get("prev_iteration_grad_ready_order_indices") or ""
    return [int(number) for number in order.replace(",", " ").split()] or None


@uses(("torch.distributed.tensor.experimental._attention:set_rotate_method", "rotate_method"))
def set_ring_rotation(method: str) -> None:
    """Set how torch's ring attention exchanges keys and values."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)


@uses(
    "torch._inductor.config:_micro_pipeline_tp",
    ("torch.distributed._symmetric_memory:enable_symm_mem_for_group", "group_name"),
)
def overlap_tensor_parallel(group: dist.ProcessGroup | None) -> None:
    """Let compiled layers overlap communication over ``group`` with matrix products."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True  # pyright: ignore[reportPrivateUsage]
    assert group is not None, "tensor parallelism has a group"
    enable_symm_mem_for_group(group.group_name)
