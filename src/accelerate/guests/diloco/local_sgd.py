"""Local SGD: replicas train independently for some steps, then average their parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

import torch
from torch.nn.parallel import DistributedDataParallel

from ...accelerator import Accelerator
from ...errors import NotBuilt
from .fragments import average_optimizer_states
from .islands import GroupIslands


class LocalSGD:
    """A context in which gradients stay on each process, and parameters are averaged every ``local_sgd_steps``.

    ::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                ...
                optimizer.step()
                local_sgd.step()

    The parameters are averaged once more at the end of the context, and the optimizer's states with them, so that the
    replicas are equal. It has no effect on one process, or with ``enabled=False``.

    Raises:
        NotBuilt: the processes don't have full replicas of the model (it is sharded, or wasn't prepared).
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        self.enabled: bool = enabled and accelerator.num_processes > 1
        if self.enabled and not isinstance(model, DistributedDataParallel):
            raise NotBuilt(
                f"LocalSGD averages whole replicas, but this model is a {type(model).__name__} on "
                f"{accelerator.num_processes} processes. Prepare it for plain data-parallel training "
                "(`model = accelerator.prepare(model)`, no sharding or batch_parts), or pass enabled=False."
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps: int = 0
        self._no_sync: AbstractContextManager[object] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._no_sync is None:
            return
        if error is None:  # after an error the other processes may not reach this collective
            self._average_parameters()
            world, mesh = self.accelerator.world, self.accelerator.strategy.mesh
            replicas = GroupIslands(world.rank, world.size, mesh, world.group, None, True)
            average_optimizer_states(self.accelerator, self.model, replicas)
        self._no_sync.__exit__(kind, error, traceback)
        self._no_sync = None

    def step(self) -> None:
        """Count one step; average the parameters at every ``local_sgd_steps``-th one."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average_parameters()

    def _average_parameters(self) -> None:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with torch.no_grad():
            means = self.accelerator.reduce([parameter.detach() for parameter in parameters], reduction="mean")
            for parameter, mean in zip(parameters, means, strict=True):
                parameter.copy_(mean)
