"""What DistributedDataParallel is told, and how it compresses gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from ..settings.ddp import DdpOptions
from ..settings.labels import DDPCommunicationHookType
from ..torch_private.distributed import GradBucket
from .base import KwargsHandler, settle
from .comm_hooks import Hook, average_hook, batched_power_sgd_hook, sent_as

_NO = DDPCommunicationHookType.NO
_HALF = {DDPCommunicationHookType.FP16: torch.float16, DDPCommunicationHookType.BF16: torch.bfloat16}
_LOW_RANK = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)


@dataclass
class DistributedDataParallelKwargs(DdpOptions, KwargsHandler):
    """Arguments of ``DistributedDataParallel``, and a communication hook that is registered after the wrap.

    ``comm_hook`` sends gradients in half precision (``fp16``, ``bf16``) or as low-rank factors
    (``power_sgd``, ``batched_power_sgd``); ``comm_wrapper`` puts half precision around low-rank factors;
    ``comm_state_option`` are arguments of torch's ``PowerSGDState``, such as
    ``matrix_approximation_rank``.
    """

    own_fields: ClassVar[frozenset[str]] = frozenset({"comm_hook", "comm_wrapper", "comm_state_option"})

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, "comm_hook", "comm_wrapper")
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        self.comm_wrapper = DDPCommunicationHookType(self.comm_wrapper)

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The arguments of ``DistributedDataParallel`` by name."""
        ignored = frozenset(ignore_keys)
        everything = {name: getattr(self, name) for name in self.own_fields} | super().to_dict()
        return {name: value for name, value in everything.items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """``model`` averages its gradients the way ``comm_hook`` says; with ``no`` it stays as it was."""
        kind, wrapper = DDPCommunicationHookType(self.comm_hook), DDPCommunicationHookType(self.comm_wrapper)
        if kind is _NO:
            return
        state: Any = model.process_group
        if kind in _LOW_RANK:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            hook = powerSGD_hook if kind is DDPCommunicationHookType.POWER_SGD else batched_power_sgd_hook
            state = PowerSGDState(process_group=model.process_group, **(self.comm_state_option or {}))
        else:
            hook = sent_as(_HALF[kind], average_hook)
        if wrapper is not _NO:
            hook = sent_as(_HALF[wrapper], hook)
        model.register_comm_hook(state, _as_torch_wants(hook))


def _as_torch_wants(hook: Hook) -> Hook:
    # torch compares a hook's annotations with its own classes: those that Python keeps as text don't pass.
    def registered(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    registered.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return cast("Hook", registered)
