"""The mesh of a model that was sharded before ``prepare``, read from its DTensors.

Ranks read their own samples if ``fully_shard`` reduces gradients over them. Ranks share samples if layers are sharded
over them otherwise (tensor parallelism, experts that see all tokens). Ranks in no DTensor's mesh hold replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from ..distributed.mesh import DATA_AXES, SHARD_AXES, Mesh
from ..distributed.world import World
from ..errors import PreparationError
from ..torch_private.fsdp import meshes_of_shards
from ..wording import some_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Ranks in the order of an axis.
Ranks = tuple[int, ...]


@final
@dataclass(frozen=True)
class Layout:
    """The groups of ranks that hold the other shards of a model and its replicas, as this rank sees them."""

    shards: Ranks  # along the axis over which fully_shard shards
    replicas: Ranks  # along the axis over which it replicates shards
    data: frozenset[int]  # along both
    layers: frozenset[Ranks]  # along each of the other axes
    layer_size: int  # the number of ranks that share this rank's layers, itself included

    @classmethod
    def of(cls, model: torch.nn.Module, rank: int) -> Layout:
        """Read the layout of ``model`` as rank ``rank`` sees it."""
        shards, replicas, data = _data_ranks(model, rank)
        layers: set[Ranks] = set()
        layer_size = 1
        for parameter in model.parameters():
            own = {axis for axis in sharded_axes(parameter) if not data.issuperset(axis)}
            layers |= own
            layer_size = max(layer_size, math.prod(len(axis) // len(data.intersection(axis)) for axis in own))
        return cls(shards, replicas, data, frozenset(layers), layer_size)

    @property
    def is_reduced_by_fsdp(self) -> bool:
        """Whether ``fully_shard`` reduces gradients over several ranks."""
        return len(self.data) > 1

    def fits(self, mesh: Mesh) -> bool:
        """Return True if the axes of ``mesh`` have the same ranks as the model's."""
        if self.is_reduced_by_fsdp:
            if mesh.ranks(*SHARD_AXES) != self.shards or mesh.ranks("dp_replicate") != self.replicas:
                return False
        elif mesh.size(*SHARD_AXES) > 1:
            return False
        if mesh.size("tp") != self.layer_size:
            return False
        neighbours = set(mesh.ranks("tp"))
        return all(neighbours.issuperset(axis) for axis in self.layers if len(self.data.intersection(axis)) == 1)

    def mesh(self, world: World, name: str) -> Mesh:
        """Return the mesh of ``world`` for this layout; ``name`` is the model's name in messages.

        Raises:
            PreparationError: no mesh with this layout averages gradients over all ranks.
        """
        own = len(self.data) * self.layer_size
        if world.size % own or (self.is_reduced_by_fsdp and world.size != own):
            raise PreparationError(
                f"{name} is sharded over {own} of {world.size} ranks ({self}), and nothing says what the others are to "
                "it. Give fully_shard a mesh of all ranks: with replicas, init_device_mesh(..., (replicas, shards), "
                "mesh_dim_names=('dp_replicate', 'dp_shard'))."
            )
        replicas = len(self.replicas) * (world.size // own)
        mesh = Mesh.of(world, dp_replicate=replicas, dp_shard=len(self.shards), tp=self.layer_size)
        if not self.fits(mesh):
            raise PreparationError(
                f"{name} is {self}, as rank {world.rank} of {world.size} sees it: ranks that share samples have to be "
                "neighbours. Make its mesh with the axes of the data first: init_device_mesh(..., (2, 2), "
                "mesh_dim_names=('dp', 'tp'))."
            )
        return mesh

    def __str__(self) -> str:
        parts: list[str] = []
        if self.is_reduced_by_fsdp:
            parts.append(f"sharded by fully_shard over {some_ranks(self.shards)}")
        if len(self.replicas) > 1:
            parts.append(f"replicated by it over {some_ranks(self.replicas)}")
        parts += [f"sharded by layer over {some_ranks(axis)}" for axis in sorted(self.layers)]
        return ", ".join(parts) or "sharded over one rank"


def agreed_mesh(model: torch.nn.Module, known: Mesh, source: str, *, is_in_use: bool = False) -> Mesh:
    """Return the mesh of a sharded ``model``; ``source`` says where the ``known`` mesh was configured, if anywhere.

    A ``dp_shard_size`` without ``dp_replicate_size`` may include the replicas of shards.

    Args:
        is_in_use: prepared loaders or schedulers depend on the data-parallel rank and size under ``known``.

    Raises:
        PreparationError: the model's mesh is another one, or its layout fits no mesh.
    """
    layout, name = Layout.of(model, known.world.rank), type(model).__name__
    if source and layout.fits(known):
        return known
    mesh = layout.mesh(known.world, name)
    if source and not _shares_samples_alike(mesh, known):
        raise PreparationError(
            f"{name} came sharded, as {mesh.equation()} says ({layout}), but {source} says {known.equation()}. Leave "
            "the ParallelismConfig out, which the model's own mesh then replaces, or shard the model as it says; models"
            " that lie on different meshes need an Accelerator each."
        )
    share, before = mesh.data_share(), known.data_share()
    if is_in_use and share != before:
        raise PreparationError(
            f"A loader or a scheduler was prepared for share {before.index} of {before.count} of the data, but {name}, "
            f"which came sharded ({layout}), takes share {share.index} of {share.count} on this rank. Prepare the model"
            " first, or with them in one call."
        )
    return mesh


def _shares_samples_alike(mesh: Mesh, known: Mesh) -> bool:
    """Return True if ``known`` differs only in counting replicas of shards as shards."""
    only = not known.active("pp", "dp_replicate", "ep", "cp", "sp")
    return only and mesh.size("tp") == known.size("tp") and mesh.size(*DATA_AXES) == known.size(*DATA_AXES)


def _data_ranks(model: torch.nn.Module, rank: int) -> tuple[Ranks, Ranks, frozenset[int]]:
    """Return the ranks along ``fully_shard``'s sharding axis, along its replicating axis, and along both."""
    found = meshes_of_shards(model)
    if not found:
        return (rank,), (rank,), frozenset((rank,))
    mesh, shards, replicas = max(found, key=lambda entry: entry[0].size())  # experts may have a smaller mesh
    own = [(rank,) if axis is None else _ranks_along(mesh, axis) for axis in (shards, replicas)]
    return own[0], own[1], frozenset(mesh.mesh.flatten().tolist())


def sharded_axes(parameter: torch.Tensor) -> list[Ranks]:
    """Return the ranks along each axis over which ``parameter`` is sharded."""
    if not isinstance(parameter, DTensor):
        return []
    axes = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    return [ranks for axis in axes if len(ranks := _ranks_along(parameter.device_mesh, axis)) > 1]


def _ranks_along(mesh: DeviceMesh, axis: int) -> Ranks:
    return tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
