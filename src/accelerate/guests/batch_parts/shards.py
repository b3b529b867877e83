"""Parameters sharded by FSDP 2 over ranks that compute the parts of an update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from ...distributed.mesh import DATA_AXES, TOKEN_AXES
from ...distributed.world import World
from ...errors import PreparationError
from ...parallel.base import Clipping, StrategyOptions
from ...parallel.fsdp.fsdp2 import FullyShardStrategy
from ...parallel.gradient_norm import local_tensor, scale_to
from ...parallel.matrix_optimizer import DECLARATION
from ...precision import Precision
from ...training.oom_retry import Retryable
from .fixed_order import place_of, total_norm
from .parts import Parts
from .tree import Node, PartialSums

if TYPE_CHECKING:
    from ...data_loader.loader import PreparedLoader

#: Along these, ranks compute tokens of the same samples.
_TOKENS = tuple(axis for axis in TOKEN_AXES if axis not in DATA_AXES)


@final
class PartShards(FullyShardStrategy):
    """FSDP 2 whose gradients are summed in the order of the parts, after each of them."""

    sums_gradients = True

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        active = self.mesh.active("ep", "pp")
        if active:
            raise PreparationError(
                f"{', '.join(active)} with batch_parts isn't built: its ranks compute several parts at once, so the "
                "order of their sums depends on the number of ranks. Leave it out, or batch_parts."
            )
        self.retry: Retryable | None = None
        self.parts: Parts = Parts(world, self.mesh.within(*DATA_AXES))
        self.parts.is_open = lambda: self._number >= 0 and not self._is_last
        self.parts.drop = self._drop
        self._reductions: list[_Reduction] = []
        self._number = -1  # of this rank's part in the update
        self._micro_batch: object = None
        self._is_last = False

    @property
    def data_parallel_size(self) -> int:
        """The number of parts: as many ranks as that would get the same results."""
        return self.parts.division.count

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return ``model`` sharded; its gradients are summed in the order of the parts."""
        placed = super().place_model(model, precision, device_placement, evaluation_mode)
        if evaluation_mode:
            return placed
        if self._replicas:
            raise PreparationError("Parameters that FSDP ignores aren't summed in the order of the parts. Shard them.")
        mesh = self.shard_mesh()
        replicas = mesh.get_group(0) if mesh.ndim > 1 else None
        num_inner = self.mesh.size(*_TOKENS)
        for unit in placed.modules():
            if isinstance(unit, FSDPModule):
                reduction = _Reduction(self, mesh.get_group(mesh.ndim - 1), replicas, num_inner)
                unit.set_custom_reduce_scatter(cast("Any", reduction))  # it has the two methods of torch's class
                unit.set_gradient_divide_factor(1.0)
                unit.set_reduce_scatter_unused_params(True)
                if mesh.size(mesh.ndim - 1) == 1:  # torch scatters nothing there
                    unit.set_all_reduce_hook(reduction.sum_own)
                self._reductions.append(reduction)
        self.parts.take_model(placed)
        sequences = self.mesh.active(*_TOKENS)
        if sequences and self.parts.has_statistics:
            raise PreparationError(
                f"BatchNorm under {', '.join(sequences)} with batch_parts isn't built: each rank normalises over its "
                "own tokens of a part. Use LayerNorm, or leave batch_parts out."
            )
        return placed

    def register_step_hooks(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer`` update whole tensors where its update mixes their elements."""
        self.parts.check_optimizer(optimizer)
        if isinstance(optimizer, torch.optim.Adafactor) and getattr(optimizer, DECLARATION, None) is None:
            setattr(optimizer, DECLARATION, True)
        super().register_step_hooks(optimizer)

    def configure_loader(self, loader: PreparedLoader) -> None:
        """Let ``loader`` read this rank's parts."""
        super().configure_loader(loader)
        self.parts.divide_loader(loader)

    def release(self) -> None:
        """Drop all references to prepared models."""
        super().release()
        self.parts.release()
        self._reductions.clear()

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes reduce gradients as elsewhere: each is one part's."""
        return nullcontext()

    @property
    def number(self) -> int:
        """The number of the part that this rank computes, among its parts of the update."""
        return self._number

    @property
    def is_last(self) -> bool:
        """Whether it is the last one."""
        return self._is_last

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float | None = None, **kwargs: Any
    ) -> None:
        """Accumulate the gradients of ``loss``; at the end of the window they are those of all parts.

        Args:
            num_steps: the micro-batches of an update on this rank, if the loss is a mean; None if it is a sum.
        """
        self.parts.check_backward()
        run = self.parts.run
        state, key = run.gradient_state, run._windows.current.key
        micro_batch = (key, state.windows.get(key), state.num_step_calls)
        if micro_batch == self._micro_batch:
            raise PreparationError(
                "A second backward pass of one micro-batch, with batch_parts under FSDP 2: the gradients of the first "
                "are summed already. Give one backward the sum of the losses."
            )
        if self._is_last:
            self._drop()
        self._micro_batch, self._number = micro_batch, self._number + 1
        self._is_last = self.parts.is_update_complete
        if self._is_last:
            self.parts.num_rounds(self._number + 1)
        super().backward(loss, scaler, 1 if num_steps is None else num_steps * self.mesh.size(*TOKEN_AXES), **kwargs)
        if self._is_last:
            if any(reduction.is_open for reduction in self._reductions):
                raise PreparationError(
                    "A unit of FSDP computed earlier parts of this update and not the last one, with batch_parts: its "
                    "gradients can't be completed. Let each part use all units, or wrap fewer modules."
                )
            self.parts.complete_update()

    def _drop(self) -> None:
        """Begin a new update."""
        if self._is_last:
            self._number, self._is_last = -1, False

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``clipping.max_norm``; return the norm before scaling."""
        self._require_gradients(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.world.device)
        shards = [local_tensor(gradient) for gradient in gradients]
        mesh = self.shard_mesh()
        places = [place for gradient in gradients if (place := place_of(gradient)) is not None]
        assert len(places) == len(gradients), "fully_shard cuts rows"
        norm = total_norm(shards, clipping.norm_type, places, mesh.get_group(mesh.ndim - 1), self.mesh.group("tp"))
        if self.parts.is_update_complete:
            scale_to(shards, norm, clipping.max_norm, clipping.error_if_nonfinite)
        return norm

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clamp every element of the gradients to [-``clip_value``, ``clip_value``], at the end of an update."""
        if self.parts.is_update_complete:
            super().clip_grad_value(parameters, clip_value)


@final
class _Reduction:
    """The sum of the gradients of one unit, in the order of the parts, instead of torch's reduce-scatter.

    Each rank gets its shard of every rank's gradients after each part, and adds them to the tree. Until the last part
    of an update the result is zero.

    Args:
        num_inner: so many consecutive ranks compute one part, each for some of its tokens.
    """

    def __init__(
        self, strategy: PartShards, shards: dist.ProcessGroup, replicas: dist.ProcessGroup | None, num_inner: int
    ) -> None:
        self._strategy, self._shards, self._replicas, self._num_inner = strategy, shards, replicas, num_inner
        self._num_shards = dist.get_world_size(shards)
        self._sums: dict[int, PartialSums] = {}
        self._num_parts = 0
        self._is_first = replicas is None or dist.get_rank(replicas) == 0

    @property
    def is_open(self) -> bool:
        """Whether it holds sums of an update that isn't complete."""
        return bool(self._sums)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, op: object, async_op: bool = False
    ) -> None:
        """Write the sum of this rank's shard of all ranks' ``input_tensor`` [ranks * values] to ``output_tensor``."""
        rows = torch.empty_like(input_tensor)
        dist.all_to_all_single(rows, input_tensor, group=self._shards)
        self._sum(output_tensor, rows.view(self._num_shards, -1))

    def sum_own(self, output: torch.Tensor) -> None:
        """Replace ``output`` [values], the gradients of the one rank that shards, by their sum."""
        self._sum(output, output.clone().view(1, -1))

    def _sum(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        strategy = self._strategy
        if self._replicas is not None:
            found = [torch.empty_like(rows) for _ in range(dist.get_world_size(self._replicas))]
            dist.all_gather(found, rows.contiguous(), group=self._replicas)
            rows = torch.cat(found)
        division = strategy.parts.division
        for rank, of_part in enumerate(rows.split(self._num_inner)):
            row = of_part[0]
            for other in of_part[1:]:
                row += other
            sums = self._sums.setdefault(rank, PartialSums())
            for number in range(self._num_parts, strategy.number):  # parts that didn't use this unit
                sums.add(Node(division.part(rank, number), 1, [None]))
            sums.add(Node(division.part(rank, strategy.number), 1, [row]))
        self._num_parts = strategy.number + 1
        if not strategy.is_last:
            output.zero_()
            return
        nodes = sorted((node for sums in self._sums.values() for node in sums.nodes), key=lambda node: node.start)
        whole = PartialSums()
        for node in nodes:
            whole.add(node)
        (total,) = whole.total()
        assert total is not None, "this part has used the unit"
        self._sums, self._num_parts = {}, 0
        # Under HSDP torch adds up the replicas after this, so that all but one are zero.
        output.copy_(total.view_as(output) + 0.0 if self._is_first else torch.zeros_like(output))
