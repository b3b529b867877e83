"""The options of DistributedDataParallel, and communication hooks that compress gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..settings.labels import DDPCommunicationHookType
from ..settings.training import DdpOptions
from ..torch_private.distributed import GradBucket
from .handlers import KwargsHandler, canonicalize

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

_NO = DDPCommunicationHookType.NO
_HALF = {DDPCommunicationHookType.FP16: torch.float16, DDPCommunicationHookType.BF16: torch.bfloat16}
_LOW_RANK = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


@dataclass(repr=False, eq=False)
class DistributedDataParallelKwargs(DdpOptions, KwargsHandler):
    """Arguments of ``DistributedDataParallel``, and a communication hook for it.

    ``comm_hook`` sends gradients in half precision (``fp16``, ``bf16``) or as low-rank factors (``power_sgd``,
    ``batched_power_sgd``). ``comm_wrapper`` sends those factors in half precision. ``comm_state_option`` are arguments
    of torch's ``PowerSGDState``, such as ``matrix_approximation_rank``.
    """

    own_fields: ClassVar[frozenset[str]] = frozenset({"comm_hook", "comm_wrapper", "comm_state_option"})

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(self, "comm_hook", "comm_wrapper")
        self.comm_hook: DDPCommunicationHookType = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType(self.comm_wrapper)

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the arguments of ``DistributedDataParallel`` by name."""
        ignored = frozenset(ignore_keys)
        everything = {name: getattr(self, name) for name in self.own_fields} | super().to_dict()
        return {name: value for name, value in everything.items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the ``comm_hook`` on ``model``; with ``no``, none."""
        kind, wrapper = DDPCommunicationHookType(self.comm_hook), DDPCommunicationHookType(self.comm_wrapper)
        if kind is _NO:
            return
        state: Any = model.process_group
        if kind in _LOW_RANK:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            hook = powerSGD_hook if kind is DDPCommunicationHookType.POWER_SGD else batched_power_sgd_hook
            state = PowerSGDState(process_group=model.process_group, **(self.comm_state_option or {}))
        else:
            hook = cast_bucket(_HALF[kind], average_hook)
        if wrapper is not _NO:
            hook = cast_bucket(_HALF[wrapper], hook)
        model.register_comm_hook(state, _as_torch_wants(hook))


def _as_torch_wants(hook: Hook) -> Hook:
    # torch compares a hook's annotations with its own classes, so annotations must not be strings.
    def registered(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    registered.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return cast("Hook", registered)


# --------------------------------------------------------------------------------------------------
# Gradient compression for DDP
#
# These hooks replace those of torch that fail: its bf16 hook refuses every backend but NCCL and XCCL, and its
# batched PowerSGD passes a 2-D matrix to a function for 3-D ones. The layer-wise PowerSGD is torch's own.

#: A DDP communication hook: (state, bucket) -> a future of the averaged gradients.
Hook = Callable[[Any, GradBucket], "torch.futures.Future[torch.Tensor]"]


def average_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket over the group in its own dtype."""
    return _average(_group_or_world(group), bucket.buffer())


def cast_bucket(dtype: torch.dtype, hook: Hook) -> Hook:
    """Wrap ``hook`` to get the bucket in ``dtype``, and cast its result back."""

    def compressed(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        original = bucket.buffer()
        bucket.set_buffer(original.to(dtype))

        def decompress(sent: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            original.copy_(sent.value())
            return original

        return hook(state, bucket).then(decompress)

    return compressed


def batched_power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the bucket as one square matrix, approximated by the product of two low-rank factors.

    It is cheaper and coarser than the layer-wise hook. Options of ``state`` add this step's error to the next one
    (error feedback), and start the next power iteration from the last factor (warm start).
    """
    group = _group_or_world(state.process_group)
    buffer = bucket.buffer()
    if state.iter < state.start_powerSGD_iter:  # pyright: ignore[reportAttributeAccessIssue]
        state.maybe_increase_iter(bucket)
        return _average(group, buffer)

    index, length = bucket.index(), buffer.numel()
    side = math.ceil(math.sqrt(length))
    rank = min(side, state.matrix_approximation_rank)
    matrix = buffer.new_zeros(side * side)
    matrix[:length].copy_(buffer)
    if state.use_error_feedback and index in state.error_dict:
        matrix.add_(state.error_dict[index])
    matrix = matrix.view(side, side)

    if state.warm_start and index in state.q_memory_dict:
        start = state.q_memory_dict[index]
    else:
        # Every rank must start from the same factor, and the user's random state must not change.
        generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
        start = torch.randn(side, rank, generator=generator).to(matrix)
    left = matrix @ _orthonormal(start)

    def right_factor(summed: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # Only the column space matters, so the sum can be used instead of the mean.
        left.copy_(_orthonormal(summed.value()[0]))
        right = matrix.t() @ left
        return _sum(right.div_(group.size()), group).wait()[0]

    def decompress(averaged: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        right = averaged.value()
        approximation = left @ right.t()
        if state.use_error_feedback:
            state.error_dict[index] = (matrix - approximation).flatten()
        if state.warm_start:
            state.q_memory_dict[index] = right
        buffer.copy_(approximation.flatten()[:length])
        if buffer.device.type != "cpu":
            # This runs on its own stream, which must not use memory any more when it is freed on return.
            torch.accelerator.synchronize(buffer.device.index)
        state.maybe_increase_iter(bucket)
        return buffer

    return _sum(left, group).then(right_factor).then(decompress)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the columns of ``matrix``, in its dtype."""
    # The factorisation exists for single and double precision only.
    wide = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
    return torch.linalg.qr(wide).Q.to(matrix.dtype)


def _average(group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    # Dividing before the sum keeps half-precision sums from overflowing.
    return _sum(tensor.div_(group.size()), group).then(lambda reduced: reduced.value()[0])


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[list[torch.Tensor]]:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None, "an asynchronous operation is handed back as work"
    return work.get_future()


def _group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    chosen = group if group is not None else dist.group.WORLD
    assert chosen is not None, "DDP exists, so a process group does"
    return chosen
