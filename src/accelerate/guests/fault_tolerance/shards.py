"""The ranks that hold a copy of the model together: their process group, and their shards without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from ...distributed.rendezvous import form_group
from ...distributed.store_client import Coordinator
from ...distributed.world import DEFAULT_TIMEOUT, World, release_before_leaving
from ...modules import is_sharded
from ...torch_private.distributed import shard_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ...devices.table import DeviceKind
    from ...distributed.environment import ProcessIdentity

#: The first item of what stands for a DTensor outside of its process group.
_SHARD: Final = "accelerate.shard"


def form_replica(identity: ProcessIdentity, size: int, meeting: str, device: torch.device, kind: DeviceKind) -> World:
    """Form the process group of the ``size`` ranks of this replica, which meet at a URL; return their world."""
    rank = identity.rank % size
    here = identity.rank - identity.local_rank  # the first rank of this machine; replicas may begin before it
    first = identity.rank - rank
    local_size = min(first + size, here + identity.local_size) - max(first, here)
    own = replace(identity, rank=rank, size=size, local_rank=identity.rank - max(first, here), local_size=local_size)
    backend = str(kind.backend or "gloo")
    before = sys.excepthook
    store = form_group(own, backend, init_method=meeting, device_id=device if kind.binds_group else None)
    sys.excepthook = before  # torch's would name the rank inside of the replica
    coordinator = Coordinator(store, rank, size, DEFAULT_TIMEOUT)

    def release() -> None:
        coordinator.leave(*dist.distributed_c10d._world.pg_map)
        coordinator.close()

    release_before_leaving(release)
    return World(rank, size, own.local_rank, local_size, device, kind, backend, coordinator=coordinator)


def without_meshes(state: Any) -> Any:
    """Return ``state`` with this rank's shard, its layout and its whole shape in place of each DTensor."""

    def packed(found: Any) -> object:
        if not is_sharded(found):
            return found
        # Shards by dimension; two axes may cut the same one.
        layout = [
            None if place.is_replicate() else (place.dim, getattr(place, "split_factor", 1))
            for place in found.placements
        ]
        axes = found.device_mesh.mesh_dim_names
        return (_SHARD, found.to_local().detach(), axes, layout, [*found.shape], [*found.stride()])

    return _mapped(state, packed)


def with_mesh(state: Any, meshes: Mapping[tuple[str, ...], DeviceMesh]) -> Any:
    """Return ``state`` with a DTensor on one of ``meshes`` in place of each shard of `without_meshes`."""

    def unpacked(found: Any) -> object:
        if not (isinstance(found, tuple) and found and isinstance(found[0], str) and found[0] == _SHARD):
            return found
        from torch.distributed.tensor import DTensor, Replicate

        _, local, axes, layout, shape, stride = found
        places = [Replicate() if fields is None else shard_of(*fields) for fields in layout]
        whole = {"shape": torch.Size(shape), "stride": tuple(stride)}
        return DTensor.from_local(local, meshes[axes], places, run_check=False, **whole)

    return _mapped(state, unpacked)


def _mapped(state: Any, change: Callable[[Any], object]) -> Any:
    """Return ``state`` with ``change`` applied to what is no container; containers without changes are kept."""
    changed = change(state)
    if changed is not state:
        return changed
    if isinstance(state, Mapping):
        found = {key: _mapped(value, change) for key, value in state.items()}
        return state if all(found[key] is state[key] for key in found) else found
    if type(state) in (list, tuple):
        items = [_mapped(value, change) for value in state]
        return state if all(map(lambda a, b: a is b, items, state)) else type(state)(items)
    return state
