"""Settings that can't work at the size of a job, but do on a few ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from ...distributed.mesh import SHARD_AXES, Mesh
from ...torch_private.pretended import local_part
from .samples import LoaderShare

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: Axes whose ranks communicate within each layer, for which only the links of one host are fast enough.
_WITHIN_A_HOST: Final = ("sp", "tp")


def find_contradictions(accelerator: Accelerator, mesh: Mesh, loaders: Sequence[LoaderShare]) -> list[str]:
    """Return one text for each setting that can't work at this size: the setting, the reason, and the remedy."""
    return [
        *_hosts(mesh),
        *_empty_shards(accelerator, mesh),
        *(text for number, loader in enumerate(loaders) for text in _data(number, loader)),
    ]


def _hosts(mesh: Mesh) -> list[str]:
    local, found = max(mesh.world.local_size, 1), list[str]()
    for axis in mesh.active(*_WITHIN_A_HOST):
        hosts = sorted({rank // local for rank in mesh.ranks(axis)})
        if len(hosts) > 1:
            found.append(
                f"{axis}_size={mesh.size(axis)}: the group of this rank lies on {len(hosts)} hosts of {local} "
                f"processes ({hosts[0]} to {hosts[-1]}), and communicates within each layer. Give a size that "
                f"divides {local}."
            )
    return found


def _empty_shards(accelerator: Accelerator, mesh: Mesh) -> list[str]:
    found: list[str] = []
    for model in accelerator._models:
        parameters = dict(model.named_parameters())
        empty = [name for name, each in parameters.items() if each.numel() and not _local(each).numel()]
        if empty:
            first = parameters[empty[0]]
            ranks = mesh.size(*SHARD_AXES)
            found.append(
                f"{len(empty)} of {len(parameters)} parameters have no shard on this rank: {empty[0]} has "
                f"{first.shape[0]} rows for the {ranks} ranks that shard it. This rank takes part in their "
                "collectives, and holds nothing of them. Give a smaller dp_shard_size, and replicate "
                "(dp_replicate_size)."
            )
    return found


def _local(parameter: torch.Tensor) -> torch.Tensor:
    part = local_part(parameter)
    assert isinstance(part, torch.Tensor)
    return part


def _data(number: int, loader: LoaderShare) -> list[str]:
    found: list[str] = []
    if loader.num_batches == 0:
        found.append(
            f"Loader {number}: this rank reads no sample in an epoch: there are {loader.num_samples}, and a step "
            f"of all ranks takes {loader.global_batch}. Give more data, a smaller batch_size, or fewer "
            "data-parallel ranks."
        )
    elif loader.num_samples is not None and loader.global_batch and loader.num_samples < loader.global_batch:
        found.append(
            f"Loader {number}: a step of all ranks takes {loader.global_batch} samples, and there are "
            f"{loader.num_samples}: every epoch is one step, in which samples are read several times. Give more data, "
            "a smaller batch_size, or fewer data-parallel ranks."
        )
    return found
