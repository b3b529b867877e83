"""The collectives of a simulated rank: counted, and answered as if all other ranks had the same values.

The gradient reduction of DistributedDataParallel is simulated too, because torch's own needs the other ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final
from unittest.mock import patch

import torch
import torch.distributed as dist

from ...distributed.mesh import AXES, Mesh
from ...distributed.world import World
from ...torch_private.tracing import (
    Chunks,
    Operator,
    fake_tensor_class,
    group_of_collective,
    operator_name,
    replicated_module,
    returns_work_only,
    sharded_module,
    tree_leaves,
    work_done,
)

#: Prefix of an operator's name -> the collective; the first match counts.
_NAMES: Final = (
    ("allgather", "all-gather"),
    ("all_gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("allreduce", "all-reduce"),
    ("all_reduce", "all-reduce"),
    ("alltoall", "all-to-all"),
    ("all_to_all", "all-to-all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "receive"),
    ("barrier", "barrier"),
)


@final
@dataclass(frozen=True)
class Traffic:
    """One kind of collective over the same ranks.

    Attributes:
        axes: the mesh axes along which these ranks differ.
        count: the average number per step.
        num_bytes: the bytes of whole tensors: the outputs of all-gathers, the inputs of reduce-scatters and
            all-reduces.
    """

    name: str
    axes: tuple[str, ...]
    num_ranks: int
    num_hosts: int
    count: float
    num_bytes: float


@final
class CollectiveCounter:
    """The counts of this rank's collectives, by name and ranks, with their bytes."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._num_bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._groups: dict[str, tuple[int, ...]] = {}

    def record(self, func: Operator, args: Sequence[object]) -> str | None:
        """Count the collective of this operator, and return its name."""
        name = _name_of(func)
        group = None if name is None else group_of_collective(args)
        if name is None or group is None:
            return None
        ranks = self._groups.get(group.group_name)
        if ranks is None:
            ranks = self._groups[group.group_name] = tuple(dist.get_process_group_ranks(group))
        self._counts[name, ranks] += 1
        self._num_bytes[name, ranks] += _bytes_of(name, args, len(ranks))
        return name

    def take(self, other: CollectiveCounter) -> None:
        """Add the counts of another counter, and reset that."""
        self._counts.update(other._counts)
        self._num_bytes.update(other._num_bytes)
        other._counts.clear()
        other._num_bytes.clear()

    def traffic(self, mesh: Mesh, steps: int = 1) -> list[Traffic]:
        """Return the counts per step, for this number of steps, sorted by bytes in descending order."""
        found = [
            Traffic(
                name,
                axes_of(mesh, ranks),
                len(ranks),
                len(hosts_of(mesh.world, ranks)),
                count / steps,
                self._num_bytes[name, ranks] / steps,
            )
            for (name, ranks), count in self._counts.items()
        ]
        return sorted(found, key=lambda each: (-each.num_bytes, each.name, each.axes))


def hosts_of(world: World, ranks: Sequence[int]) -> list[int]:
    """Return the numbers of the hosts of these ranks, in ascending order."""
    return sorted({rank // max(world.local_size, 1) for rank in ranks})


def axes_of(mesh: Mesh, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the mesh axes along which these ranks differ, outermost first."""
    found: list[str] = []
    stride = mesh.world.size
    for axis in AXES:
        degree = mesh.size(axis)
        stride //= degree
        if degree > 1 and len({rank // stride % degree for rank in ranks}) > 1:
            found.append(axis)
    return tuple(found)


def _name_of(func: Operator) -> str | None:
    text = operator_name(func).lstrip("_")
    return next((name for beginning, name in _NAMES if text.startswith(beginning)), None)


def _bytes_of(name: str, args: Sequence[object], size: int) -> int:
    sides = [sum(each.numel() * each.element_size() for each in _tensors(arg)) for arg in args[:2]]
    largest = max(sides, default=0)
    is_part = name == "all-gather" and not all(sides)  # this operator allocates the whole tensor itself
    return largest * size if is_part else largest


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# -- answers -----------------------------------------------------------------------------------------------


def answer(func: Operator, args: Sequence[object]) -> object:
    """Return the result of a collective as if all other ranks had this rank's inputs."""
    fake_tensor = fake_tensor_class()
    outputs = _tensors(args[0])
    if not any(isinstance(tensor, fake_tensor) for tensor in _tensors(args[:2])):
        _fill(_name_of(func), args)
    else:  # the output is real, but the gathered values don't exist
        for tensor in outputs:
            if not isinstance(tensor, fake_tensor):
                tensor.fill_(1)
    return work_done() if returns_work_only(func) else (args[0], work_done())


@torch.no_grad()
def _fill(name: str | None, args: Sequence[object]) -> None:
    group = group_of_collective(args)
    outputs, inputs = _tensors(args[0]), _tensors(args[1])
    if group is None or not inputs:
        return
    size = group.size()
    if name in ("all-gather", "gather"):
        rows = outputs if len(outputs) >= size else [row for each in outputs for row in each.chunk(size)]
        for number, row in enumerate(rows):
            row.copy_(inputs[number % len(inputs)].reshape(row.shape))
    elif name in ("reduce-scatter", "scatter"):
        parts = inputs if len(inputs) >= size else list(inputs[0].chunk(size))
        outputs[0].copy_(parts[group.rank()].reshape(outputs[0].shape))


def _summing(all_reduce: Callable[..., object]) -> Callable[..., object]:
    """Return ``all_reduce`` with sums as if every rank had this rank's values."""

    def reduced(
        tensor: torch.Tensor,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> object:
        work = all_reduce(tensor, op, group, async_op)
        if op == dist.ReduceOp.SUM and not isinstance(tensor, fake_tensor_class()):
            with torch.no_grad():
                tensor.mul_(dist.get_world_size(group))
        return work

    return reduced


def _all_gather_object(object_list: list[object], obj: object, *_: object, **__: object) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(obj: object, object_gather_list: list[object] | None = None, *_: object, **__: object) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    output: list[object], input_list: list[object] | None = None, *_: object, **__: object
) -> None:
    if input_list:
        output[0] = input_list[dist.get_rank() % len(input_list)]


def _keep(*_: object, **__: object) -> None:
    """Do nothing, because the result of the other ranks equals the present value."""


@contextmanager
def without_others(make_reducer: Callable[..., object]) -> Iterator[None]:
    """Enter a context in which torch's object collectives and its DDP get their answers from this rank."""
    with (
        patch.multiple(
            dist,
            all_reduce=_summing(dist.all_reduce),
            all_gather_object=_all_gather_object,
            gather_object=_gather_object,
            broadcast_object_list=_keep,
            scatter_object_list=_scatter_object_list,
            monitored_barrier=_keep,
            Reducer=make_reducer,
            Logger=PretendedLogger,
        ),
        patch.object(replicated_module(), "_verify_param_shape_across_processes", _keep),
        patch.object(sharded_module(), "_chunk_with_empty", Chunks),
    ):
        yield


# --------------------------------------------------------------------------------------------------
# The gradient reduction of DistributedDataParallel


@final
class PretendedReducer:
    """A reducer like torch's: it averages a bucket when all of its parameters have gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], buckets: Sequence[Sequence[int]], *args: Any) -> None:
        self._parameters, self._buckets = list(parameters), [list(bucket) for bucket in buckets]
        self._group: dist.ProcessGroup = next(arg for arg in args if isinstance(arg, dist.ProcessGroup))
        self._bucket_of = {number: index for index, bucket in enumerate(self._buckets) for number in bucket}
        self._waiting: dict[int, set[int]] = {}  # by bucket: the parameters that have no gradient yet
        self.buffers = [self._allocated(bucket) for bucket in self._buckets]
        for number, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(number))

    def _allocated(self, bucket: Sequence[int]) -> torch.Tensor:
        first = self._parameters[bucket[0]]
        return first.new_empty(sum(self._parameters[number].numel() for number in bucket), requires_grad=False)

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            del parameter
            index = self._bucket_of[number]
            if index not in self._waiting:
                return  # inside of no_sync
            self._waiting[index].discard(number)
            if not self._waiting[index]:
                del self._waiting[index]
                dist.all_reduce(self.buffers[index], group=self._group)

        return ready

    def prepare_for_backward(self, outputs: object) -> None:
        """Expect a gradient of every parameter in the next backward."""
        del outputs
        self._waiting = {index: set(bucket) for index, bucket in enumerate(self._buckets)}

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a no-op function, for the reducer's methods on other ranks and measurements."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _keep


@final
class PretendedLogger:
    """A logger of a reducer that logs nothing."""

    def __init__(self, reducer: object) -> None:
        del reducer

    def _get_ddp_logging_data(self) -> dict[str, object]:
        return {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that does nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _keep
