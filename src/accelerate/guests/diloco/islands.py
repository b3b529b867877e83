"""The islands of a world: groups of ranks that reduce gradients among themselves, and not with others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast, final

import torch
from torch import distributed as dist
from torch import nn

from ...distributed.mesh import AXES, Mesh
from ...distributed.world import World
from ...errors import PreparationError, SettingError
from ...parallel.ddp import DataParallel, replica_in
from ...parallel.rebind import inner_optimizer
from ...torch_private.distributed import all_gather_single, set_process_group
from . import IslandOptions

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from ...seams import Members

#: The axis of the mesh along which islands differ.
BETWEEN: Final = "dp_replicate"
#: The axes inside of an island.
INSIDE: Final = tuple(axis for axis in AXES if axis != BETWEEN)


class Islands(ABC):
    """The island of this rank, and the ranks with its coordinates in the other islands.

    Attributes:
        index: the number of this rank's island.
        count: the number of islands that train.
        part: the number of this rank in its island.
        num_parts: the number of ranks in an island.
        holds_replicas: every rank of an island holds the whole model.
    """

    index: int
    count: int
    part: int
    num_parts: int
    holds_replicas: bool

    @property
    def saved(self) -> tuple[int, int]:
        """The number of this island in a checkpoint, and how many islands the checkpoint has."""
        return self.index, self.count

    @staticmethod
    def of(run: Accelerator, count: int | None) -> Islands:
        """Return the islands of ``run``; a collective.

        Args:
            count: the number of islands; None if the settings, the mesh or the launcher say it.

        Raises:
            SettingError: such islands don't fit the processes, or their layout.
        """
        asked = run.settings.find(IslandOptions)
        if asked is not None and asked.islands is not None and count is None:
            return GroupIslands.form(run, asked.islands, run.settings.quote("diloco.islands"))
        source = f"DiLoCo(islands={count!r})"
        return (GroupIslands if run.world.members is None else KeptIslands).form(run, count, source)

    @abstractmethod
    def gather(self, own: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to gather the flat ``own`` of all islands; return a function that waits for the rows."""

    @abstractmethod
    def gather_inside(self, own: torch.Tensor) -> torch.Tensor:
        """Return the flat ``own`` of all ranks of this island, as rows."""

    @abstractmethod
    def gather_object(self, own: object) -> list[Any]:
        """Return the objects of all islands."""

    @abstractmethod
    def average(self, own: Sequence[torch.Tensor], *, inside: bool = False) -> int:
        """Set tensors to their mean over the islands, others than of floating-point numbers to those of the first one.

        Args:
            inside: also over the ranks of an island, where these hold replicas.

        Returns: the bytes that leave this rank.
        """

    @abstractmethod
    def keep_inside(self, run: Accelerator, model: nn.Module) -> list[Callable[[], None]]:
        """Reduce gradients inside of islands only; return functions that undo it."""


@final
@dataclass
class GroupIslands(Islands):
    """Islands whose ranks share process groups.

    Attributes:
        mesh: the mesh of this rank's island alone.
        between: the group of the ranks at the same place of each island.
        inside: the group of the island's ranks.
    """

    index: int
    count: int
    mesh: Mesh
    between: dist.ProcessGroup | None
    inside: dist.ProcessGroup | None
    holds_replicas: bool

    def __post_init__(self) -> None:
        self.part, self.num_parts = self.mesh.world.rank, self.mesh.world.size

    @staticmethod
    def form(run: Accelerator, count: int | None, source: str) -> GroupIslands:
        """Return the islands of ``run``; a collective.

        Args:
            count: the number of islands; None if the replicating axis of the mesh says it.
            source: how the number was given, for messages.

        Raises:
            SettingError: such islands don't fit the processes, or their layout.
        """
        world, mesh = run.world, run.strategy.mesh
        layout = mesh.active(*INSIDE)
        if count is not None:
            if type(count) is not int or count < 1 or world.size % count:
                raise SettingError(
                    f"{source}: {world.size} processes can't be divided into {count!r} islands of one "
                    "size. Choose a divisor."
                )
            if layout and count != mesh.size(BETWEEN):
                raise SettingError(
                    f"{source}: the mesh has {mesh.equation()}. With {layout[0]} the islands are the "
                    "replicas: leave islands out, or change dp_replicate_size."
                )
            if not layout:
                mesh = Mesh.of(world, dp_replicate=count, dp_shard=world.size // count)
        is_replicated = isinstance(run.strategy, DataParallel)
        if mesh.size(BETWEEN) == 1 or not (layout or is_replicated):
            raise SettingError(
                f"{source if count else 'DiLoCo'} over {type(run.strategy).__name__}: all {world.size} processes are "
                "one island. Set ParallelismConfig(dp_replicate_size=...) to the number of islands, and dp_shard_size "
                "to the processes of each. With DDP give islands=, or nothing."
            )
        inside = mesh.group(*INSIDE)
        if inside is None:
            inside = cast("dist.ProcessGroup", dist.new_group([world.rank], use_local_synchronization=True))
        return GroupIslands(
            mesh.place(BETWEEN),
            mesh.size(BETWEEN),
            _island_of(mesh, world, inside),
            mesh.group(BETWEEN),
            inside,
            is_replicated,
        )

    def gather(self, own: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to gather the flat ``own`` of all islands; return a function that waits for the rows."""
        return self._gather(own, self.between, self.count)

    def gather_inside(self, own: torch.Tensor) -> torch.Tensor:
        """Return the flat ``own`` of all ranks of this island, as rows."""
        return self._gather(own, self.inside, self.num_parts)()

    def _gather(self, own: torch.Tensor, group: dist.ProcessGroup | None, count: int) -> Callable[[], torch.Tensor]:
        sent = own.to(self.mesh.world.device)
        arrived = sent.new_empty(count * sent.numel())
        work = all_gather_single(arrived, sent, group, True)

        def receive() -> torch.Tensor:
            if work is not None:
                work.wait()
            return arrived.view(count, -1).to(own.device)

        return receive

    def gather_object(self, own: object) -> list[Any]:
        """Return the objects of all islands."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, own, group=self.between)
        return found

    def average(self, own: Sequence[torch.Tensor], *, inside: bool = False) -> int:
        """Set tensors to their mean over the islands, and return the bytes that leave this rank."""
        num_bytes, groups = 0, [(self.between, self.count)]
        groups += [(self.inside, self.num_parts)] if inside and self.holds_replicas else []
        for tensor in own:
            sent = tensor.to(self.mesh.world.device)
            for group, size in groups:
                if sent.is_floating_point():
                    dist.all_reduce(sent, group=group)
                    sent.div_(size)
                else:
                    dist.broadcast(sent, dist.get_process_group_ranks(group)[0], group)
            tensor.copy_(sent)
            num_bytes += 2 * sent.nbytes * (self.count - 1) // self.count
        return num_bytes

    def keep_inside(self, run: Accelerator, model: nn.Module) -> list[Callable[[], None]]:
        """Reduce gradients inside of islands only; return functions that undo it."""
        from ...parallel.matrix_optimizer import exchange_among

        undo: list[Callable[[], None]] = []
        replica = replica_in(model)
        if replica is not None:
            before: Any = replica.process_group
            set_process_group(replica, cast("dist.ProcessGroup", self.inside))
            undo.append(lambda: set_process_group(replica, before))
        elif run.strategy.mesh.active(*INSIDE):
            from ...torch_private.fsdp import reduce_within_shards

            undo.append(reduce_within_shards(model))
        group, size = self.mesh.group("dp_shard", "ep", "cp", "sp"), self.mesh.size("dp_shard", "ep", "cp", "sp")
        for gradients in getattr(run.strategy, "_replicas", ()):  # of parameters beside shards
            undo.append(_setting(gradients, _group=group, _size=size))
        assert self.inside is not None, "an island has a group"
        for optimizer in sharded_optimizers(run):
            exchange_among(optimizer, dist.get_process_group_ranks(self.inside))
            undo.append(partial(exchange_among, optimizer, None))
        undo.append(_setting(run._weights, _mesh=self.mesh))  # divides by the weights of all ranks that reduce
        undo.append(_setting(run.strategy, averages_replicas=False))
        return undo


@final
class KeptIslands(Islands):
    """Islands of a world without a process group: the living replicas, any of which may be lost.

    A round has the changes of those that live. A new process begins with the outer weights.
    """

    def __init__(self, members: Members, rank: int) -> None:
        self._members = members
        inside = members.replica
        self.part, self.num_parts = (0, 1) if inside is None else (inside.rank, inside.size)
        self.index, self.holds_replicas = rank // self.num_parts, inside is None
        self.count = 1  # until the first exchange

    @property
    def saved(self) -> tuple[int, int]:
        """The only island of a checkpoint: the lowest one, which writes it."""
        return 0, 1

    @staticmethod
    def form(run: Accelerator, count: int | None, source: str) -> KeptIslands:
        """Return the islands of ``run``.

        Raises:
            SettingError: their number was given.
        """
        assert run.world.members is not None, "called only then"
        if count is not None:
            raise SettingError(
                f"{source} under `accelerate launch --keep_replicas`: each replica is an island. Leave islands out."
            )
        return KeptIslands(run.world.members, run.world.rank)

    def _exchange(self, own: object) -> list[Any]:
        found = self._members.exchange_apart("an exchange between islands", own)
        self.count = len(found)
        return found

    def gather(self, own: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Gather the flat ``own`` of all islands; the rows are there at once."""
        rows = torch.stack(self._exchange(own.cpu())).to(own.device)
        return lambda: rows

    def gather_inside(self, own: torch.Tensor) -> torch.Tensor:
        """Return ``own``: each rank has a part of its own."""
        return own.unsqueeze(0)

    def gather_object(self, own: object) -> list[Any]:
        """Return the objects of all islands."""
        return self._exchange(own)

    def average(self, own: Sequence[torch.Tensor], *, inside: bool = False) -> int:
        """Set tensors to their mean over the islands, and return the bytes that leave this rank."""
        found = self._exchange([tensor.cpu() for tensor in own])
        for tensor, each in zip(own, zip(*found, strict=True), strict=True):
            tensor.copy_(torch.stack(each).mean(0) if tensor.is_floating_point() else each[0])
        return sum(tensor.nbytes for tensor in own) * (self.count - 1)

    def keep_inside(self, run: Accelerator, model: nn.Module) -> list[Callable[[], None]]:
        """Let the replicas train without each other's gradients; return functions that undo it."""
        return [_setting(self._members, trains_apart=True), _setting(run.strategy, averages_replicas=False)]


def sharded_optimizers(run: Accelerator) -> list[torch.optim.Optimizer]:
    """Return the optimizers of ``run``, with all state in shards; a collective.

    In place of an optimizer that only steps others, these are returned.
    """
    from ...parallel.matrix_optimizer import shard_state, stepping

    found = [one for prepared in run._optimizers for one in stepping(inner_optimizer(prepared))]
    for optimizer in found:
        shard_state(optimizer)
    return found


def _island_of(mesh: Mesh, world: World, inside: dist.ProcessGroup) -> Mesh:
    """Return the mesh of one island of ``mesh``."""
    within = replace(world, rank=mesh.place(*INSIDE), size=mesh.size(*INSIDE), group=inside)
    degrees = tuple(1 if axis == BETWEEN else mesh.size(axis) for axis in AXES)
    active = mesh.active(*INSIDE)
    return Mesh(within, degrees, lambda: mesh.over(*active) if active else None)


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
        "batch_parts": strategy.reduction.is_sum,
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
    if run.world.members is not None:
        is_known = model in run._models
    elif isinstance(strategy, DataParallel):
        is_known = replica_in(model) is not None
    else:
        from ...parallel.sharded_strategy import ShardedStrategy

        shards = isinstance(strategy, ShardedStrategy) and not strategy.mesh.active("ep")
        is_known = shards or bool(strategy.mesh.active("pp"))
    if not is_known:
        raise PreparationError(
            f"DiLoCo over {type(strategy).__name__} ({type(model).__name__}) isn't built. Prepare the model for DDP, "
            "FSDP2, tensor or pipeline parallelism: `model, optimizer = accelerator.prepare(model, optimizer)`."
        )
