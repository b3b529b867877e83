"""The islands of a world: groups of ranks that reduce gradients among themselves, and not with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast, final

from torch import distributed as dist
from torch import nn

from ...distributed.mesh import AXES, Mesh
from ...distributed.world import World
from ...errors import PreparationError, SettingError
from ...parallel.ddp import DataParallel, replica_in
from ...torch_private.distributed import set_process_group

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: The axis of the mesh along which islands differ.
BETWEEN: Final = "dp_replicate"
#: The axes inside of an island.
INSIDE: Final = tuple(axis for axis in AXES if axis != BETWEEN)


@final
@dataclass(frozen=True)
class Islands:
    """The island of this rank, and the ranks with its coordinates in the other islands.

    Attributes:
        index: the number of this rank's island.
        count: the number of islands.
        mesh: the mesh of this rank's island alone.
        between: the group of the ranks at the same place of each island.
        inside: the group of the island's ranks.
        holds_replicas: every rank of an island holds the whole model.
    """

    index: int
    count: int
    mesh: Mesh
    between: dist.ProcessGroup | None
    inside: dist.ProcessGroup
    holds_replicas: bool

    @classmethod
    def of(cls, run: Accelerator, count: int | None) -> Islands:
        """Return the islands of ``run``; a collective.

        Args:
            count: the number of islands; None if the replicating axis of the mesh says it.

        Raises:
            SettingError: such islands don't fit the processes, or their layout.
        """
        world, mesh = run.world, run.strategy.mesh
        layout = mesh.active(*INSIDE)
        if count is not None:
            if type(count) is not int or count < 1 or world.size % count:
                raise SettingError(
                    f"DiLoCo(islands={count!r}): {world.size} processes can't be divided into {count!r} islands of one "
                    "size. Choose a divisor."
                )
            if layout and count != mesh.size(BETWEEN):
                raise SettingError(
                    f"DiLoCo(islands={count}): the mesh has {mesh.equation()}. With {layout[0]} the islands are the "
                    "replicas: leave islands out, or change dp_replicate_size."
                )
            if not layout:
                mesh = Mesh.of(world, dp_replicate=count, dp_shard=world.size // count)
        is_replicated = isinstance(run.strategy, DataParallel)
        if mesh.size(BETWEEN) == 1 or not (layout or is_replicated):
            raise SettingError(
                f"DiLoCo over {type(run.strategy).__name__}: all {world.size} processes are one island. Set "
                "ParallelismConfig(dp_replicate_size=...) to the number of islands, and dp_shard_size to the processes "
                "of each. With DDP give islands=, or nothing."
            )
        inside = mesh.group(*INSIDE)
        if inside is None:
            inside = cast("dist.ProcessGroup", dist.new_group([world.rank], use_local_synchronization=True))
        return cls(
            mesh.place(BETWEEN),
            mesh.size(BETWEEN),
            _island_of(mesh, world, inside),
            mesh.group(BETWEEN),
            inside,
            is_replicated,
        )

    @property
    def part(self) -> int:
        """The number of this rank in its island."""
        return self.mesh.world.rank

    @property
    def num_parts(self) -> int:
        """The number of ranks in an island."""
        return self.mesh.world.size


def _island_of(mesh: Mesh, world: World, inside: dist.ProcessGroup) -> Mesh:
    """Return the mesh of one island of ``mesh``."""
    within = replace(world, rank=mesh.place(*INSIDE), size=mesh.size(*INSIDE), group=inside)
    degrees = tuple(1 if axis == BETWEEN else mesh.size(axis) for axis in AXES)
    active = mesh.active(*INSIDE)
    return Mesh(within, degrees, lambda: mesh.over(*active) if active else None)


def keep_inside(run: Accelerator, model: nn.Module, islands: Islands) -> Callable[[], None]:
    """Reduce gradients inside of islands only; return a function that undoes it."""
    undo: list[Callable[[], None]] = []
    replica = replica_in(model)
    if replica is not None:
        before: Any = replica.process_group
        set_process_group(replica, islands.inside)
        undo.append(lambda: set_process_group(replica, before))
    elif run.strategy.mesh.active(*INSIDE):
        from ...torch_private.fsdp import reduce_within_shards

        undo.append(reduce_within_shards(model))
    group, size = islands.mesh.group("dp_shard", "ep", "cp", "sp"), islands.mesh.size("dp_shard", "ep", "cp", "sp")
    for gradients in getattr(run.strategy, "_replicas", ()):  # of parameters beside shards
        undo.append(_setting(gradients, _group=group, _size=size))
    undo.append(_setting(run._weights, _mesh=islands.mesh))  # divides by the weights of all ranks that reduce
    undo.append(_setting(run.strategy, averages_replicas=False))

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _setting(owner: object, **values: object) -> Callable[[], None]:
    """Set attributes of ``owner``; return a function that restores them."""
    before = {name: getattr(owner, name) for name in values}

    def restore(values: dict[str, object] = before) -> None:
        for name, value in values.items():
            setattr(owner, name, value)

    restore(values)
    return restore


def check(run: Accelerator, model: nn.Module) -> None:
    """Raise if ``run`` can't keep gradients inside of islands.

    Raises:
        PreparationError: names what can't be combined, and the way out.
    """
    strategy = run.strategy
    handler = strategy.options.ddp_handler
    refused: dict[str, object] = {
        "batch_parts": strategy.sums_gradients,
        "--keep_replicas": run.world.members is not None,
        "balance": run.dataloader_config.balance,
        "fp16, with a loss scale of each island (bf16 works),": run.scaler is not None,
        "a communication hook of DistributedDataParallelKwargs": handler is not None
        and str(getattr(handler.comm_hook, "value", handler.comm_hook)) != "no",
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise PreparationError(
                f"{name} with DiLoCo isn't built: between islands only changes of weights are exchanged, and weights "
                "differ while islands train. Leave one of them out."
            )
    if isinstance(strategy, DataParallel):
        is_known = replica_in(model) is not None
    else:
        is_known = _keeps_shards(run)
    if not is_known:
        raise PreparationError(
            f"DiLoCo over {type(strategy).__name__} ({type(model).__name__}) isn't built. Prepare the model for DDP, "
            "FSDP2, tensor or pipeline parallelism: `model, optimizer = accelerator.prepare(model, optimizer)`."
        )


def _keeps_shards(run: Accelerator) -> bool:
    if run.strategy.mesh.active("pp"):
        return True
    from ...parallel.matrix_optimizer import needs_whole_matrices
    from ...parallel.sharded_strategy import ShardedStrategy

    for optimizer in run._optimizers:
        if needs_whole_matrices(optimizer.optimizer):
            raise PreparationError(
                f"{type(optimizer.optimizer).__name__} over shards, with DiLoCo, isn't built: the owner of a matrix "
                "may be in another island. Use it with DDP islands, or AdamW with shards."
            )
    return isinstance(run.strategy, ShardedStrategy) and not run.strategy.mesh.active("ep")
