"""The mesh of ranks: the axes of parallelism, each rank's coordinates, and the process groups along the axes.

A :class:`Mesh` computes every rank's coordinates, neighbours and data shard from the degrees and the world, without
communication. So one process can check a plan for thousands of ranks. Process groups are made when they are first used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, final

from ..errors import SettingError
from ..torch_private.distributed import flattened
from .world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: Outermost first: ranks that differ in a later axis only are neighbours, and communicate the most.
AXES: Final[tuple[str, ...]] = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "sp", "tp")
#: Along these, ranks read different samples.
DATA_AXES: Final[tuple[str, ...]] = ("dp_replicate", "dp_shard", "ep")
#: Along these, ranks compute the loss of different tokens, and gradients are averaged.
TOKEN_AXES: Final[tuple[str, ...]] = (*DATA_AXES, "cp", "sp")
#: Over these, FSDP shards the parameters of each stage and tensor-parallel rank.
SHARD_AXES: Final[tuple[str, ...]] = ("dp_shard", "ep", "cp", "sp")


@final
@dataclass(frozen=True)
class DataParallelRank:
    """The data-parallel rank and size of a process; ranks that differ only in model-parallel axes share them."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ValueError(f"A data-parallel rank needs 0 <= index < count, got index {self.index} of {self.count}.")


def equation(degrees: Mapping[str, Any]) -> str:
    """Format all degrees and their product, as every error shows them."""
    factors = " * ".join(f"{axis}_size {degrees[axis]}" for axis in AXES if axis in degrees)
    sizes = [degrees[axis] for axis in AXES if axis in degrees]
    return f"{factors} = {math.prod(sizes)}" if all(type(size) is int for size in sizes) else factors


@final
@dataclass(frozen=True)
class Mesh:
    """A world whose ranks have a coordinate along each axis of parallelism."""

    world: World
    degrees: tuple[int, ...]  # by AXES
    #: Makes torch's mesh of the active axes; by default :func:`build`.
    builder: Callable[[], DeviceMesh | None] | None = field(default=None, repr=False, compare=False)
    _built: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, world: World, /, builder: Callable[[], DeviceMesh | None] | None = None, **degrees: int) -> Mesh:
        """Make the mesh of ``world`` with these ``degrees``; without degrees, all ranks are replicas.

        Raises:
            SettingError: an unknown axis, an invalid degree, or a product that differs from the world size.
        """
        unknown = [axis for axis in degrees if axis not in AXES]
        if unknown:
            raise SettingError(f"{unknown[0]!r} is no axis of a mesh. The axes are {', '.join(AXES)}.")
        chosen = {axis: degrees.get(axis, 1) for axis in AXES} if degrees else {**_ONES, "dp_replicate": world.size}
        for axis, size in chosen.items():
            if type(size) is not int or size < 1:
                raise SettingError(
                    f"{axis}_size must be a whole number of at least 1, but got {size!r} ({equation(chosen)})."
                )
        if math.prod(chosen.values()) != world.size:
            raise SettingError(
                f"The degrees of parallelism don't fit the {world.size} processes: {equation(chosen)}. Change a "
                f"degree, or start {math.prod(chosen.values())} processes."
            )
        return cls(world, tuple(chosen.values()), builder)

    # -- arithmetic ----------------------------------------------------------------------------------------

    def size(self, *axes: str) -> int:
        """Return the number of ranks along ``axes`` together."""
        return math.prod(self._degrees_of(axes))

    def place(self, *axes: str) -> int:
        """Return this rank's coordinate along ``axes``: its index among the ranks that differ only along these."""
        stride, factor, number = 1, 1, 0
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            if axis in axes:
                number += self.world.rank // stride % degree * factor
                factor *= degree
            stride *= degree
        return number

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks of the world that differ from this one along ``axes`` only, this one included, in order."""
        strides = self._strides()
        chosen = [axis for axis in AXES if axis in axes]
        base = self.world.rank - sum(self.place(axis) * strides[axis] for axis in chosen)
        steps = [range(0, self.size(axis) * strides[axis], strides[axis]) for axis in chosen]
        return tuple(base + sum(step) for step in itertools.product(*steps))

    def active(self, *axes: str) -> tuple[str, ...]:
        """Return the axes with more than one rank, outermost first; only those of ``axes``, if any are given."""
        return tuple(axis for axis in AXES if (not axes or axis in axes) and self.size(axis) > 1)

    def data_share(self) -> DataParallelRank:
        """Return the data-parallel rank and size: which shard of the data this rank reads."""
        return DataParallelRank(self.place(*DATA_AXES), self.size(*DATA_AXES))

    def equation(self) -> str:
        """Format all degrees and their product."""
        return equation(dict(zip(AXES, self.degrees, strict=True)))

    def _degrees_of(self, axes: Iterable[str]) -> list[int]:
        known: dict[str, int] = dict(zip(AXES, self.degrees, strict=True))
        return [known[axis] for axis in axes]

    def _strides(self) -> dict[str, int]:
        return {axis: math.prod(self.degrees[number + 1 :]) for number, axis in enumerate(AXES)}

    # -- torch's mesh --------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The active axes as a DeviceMesh; None without a process group. The first access is a collective."""
        if self.world.backend is None:
            return None
        if "root" not in self._built:
            self._built["root"] = self.builder() if self.builder is not None else self._build()
        return self._built["root"]

    def _build(self) -> DeviceMesh | None:
        names = self.active()
        return build(self.world.device.type, names, tuple(self._degrees_of(names)))

    def over(self, *axes: str) -> DeviceMesh:
        """Return the submesh of ``axes``, one dimension each; they must be active."""
        root = self.device_mesh
        assert root is not None and axes, "a mesh without processes or axes has no parts"
        return root[tuple(axis for axis in AXES if axis in axes)]

    def flat(self, name: str, *axes: str) -> DeviceMesh:
        """Flatten ``axes`` into one mesh dimension ``name``; a single active axis keeps its name.

        The first call is a collective.
        """
        active = self.active(*axes)
        if len(active) == 1:
            return self.over(*active)
        key = (name, active)
        if key not in self._built:
            self._built[key] = flattened(self.over(*active), name)
        return self._built[key]

    def group(self, *axes: str) -> ProcessGroup | None:
        """Return the process group along ``axes`` together; None if this rank is alone there.

        The first call is a collective.
        """
        from torch import distributed

        active = self.active(*axes)
        if not active or self.world.backend is None:
            return None
        if active == self.active():
            return self.world.group or distributed.group.WORLD
        return self.flat("_".join(active), *active).get_group()

    def within(self, *axes: str) -> World:
        """Return the world of the ranks along ``axes``, numbered by :meth:`place`."""
        found = self._built.get(axes)
        if found is None:
            if self.active(*axes) == self.active():
                found = self.world
            else:
                size, place, group = self.size(*axes), self.place(*axes), self.group(*axes)
                found = replace(self.world, rank=place, size=size, group=group)
            self._built[axes] = found
        return found


_ONES: Final = dict.fromkeys(AXES, 1)


def build(device_type: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh | None:
    """Make torch's DeviceMesh of the axes ``names``; None if there are none. This is a collective."""
    if not names:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, sizes, mesh_dim_names=names)
