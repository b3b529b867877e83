"""The gradient reduction of DistributedDataParallel in a simulated job, because torch's own needs the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist


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
        return lambda *_, **__: None


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
        return lambda *_, **__: None
