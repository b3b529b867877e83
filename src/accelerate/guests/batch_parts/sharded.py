"""Parameters sharded by FSDP 2, also in pipeline stages, over ranks that compute the parts of an update.

The gradients of FSDP's units are summed over the parts by a reduce-scatter of our own.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ...distributed.mesh import DATA_AXES, TOKEN_AXES
from ...distributed.world import World
from ...errors import PreparationError
from ...parallel.base import Clipping, Reduction, Strategy, StrategyOptions
from ...parallel.fsdp.fsdp2 import FullyShardStrategy
from ...parallel.gradient_norm import local_tensor, scale_to
from ...parallel.matrix_optimizer import DECLARATION
from ...parallel.pipeline.strategy import PipelinedModel, PipelineStrategy
from ...precision import Precision
from ...torch_private.fsdp import unsharded_parameters
from .fixed_order import Node, PartialSums, norm_of_norms, place_of, total_norm
from .parts import Parts
from .statistics import has_statistics

if TYPE_CHECKING:
    from ...data_loader.loader import PreparedLoader


class PartSharding(Strategy, ABC):
    """The base of strategies that shard parameters by FSDP 2, and sum gradients in the order of the parts.

    It stands before the strategy of FSDP 2 in the bases of a class.

    Attributes:
        parts: the parts that this rank computes.
        number: the number of the part that this rank computes, among its parts of the update.
        is_last: whether it is the last one.
    """

    reduction: ClassVar[Reduction] = Reduction(is_sum=True)

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        self.retry = None
        self.parts: Parts = Parts(world, self.mesh.within(*DATA_AXES))
        self.parts.is_open = lambda: self.number >= 0 and not self.is_last
        self.parts.drop = self._drop
        self.number: int = -1
        self.is_last: bool = False
        self._micro_batch: object = None
        self._reductions: list[_Reduction] = []
        self._uses: list[_Use] = []

    @property
    def data_parallel_size(self) -> int:
        """The number of parts: as many ranks as that would get the same results."""
        return self.parts.division.count

    def sum_parts_of(
        self, model: torch.nn.Module, mesh: DeviceMesh, num_inner: int = 1, shared: Container[torch.Tensor] = ()
    ) -> None:
        """Sum the gradients of the units of ``model`` in the order of the parts; a collective.

        Args:
            mesh: [replicas, shards] or [shards].
            num_inner: so many consecutive ranks compute one part, each for some of its tokens.
            shared: the parameters that other ranks than these use too.
        """
        self._uses.append(_Use(model, self.mesh.within(*TOKEN_AXES), shared))
        replicas = mesh.get_group(0) if mesh.ndim > 1 else None
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                reduction = _Reduction(self, mesh.get_group(mesh.ndim - 1), replicas, num_inner)
                unit.set_custom_reduce_scatter(cast("Any", reduction))  # it has the two methods of torch's class
                unit.set_gradient_divide_factor(1.0)
                unit.set_reduce_scatter_unused_params(True)
                if mesh.size(mesh.ndim - 1) == 1:  # torch scatters nothing there
                    unit.set_all_reduce_hook(reduction.sum_own)
                self._reductions.append(reduction)

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
        self._uses.clear()

    @contextmanager
    def next_part(self) -> Iterator[None]:
        """Enter a context that computes and sums the gradients of the next part.

        Raises:
            PreparationError: it can't be that of a part.
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
        if self.is_last:
            self._drop()
        self._micro_batch, self.number = micro_batch, self.number + 1
        self.is_last = self.parts.is_update_complete
        if self.is_last:
            self.parts.num_rounds(self.number + 1)
        yield
        if self.is_last:
            if any(reduction.is_open for reduction in self._reductions):
                raise PreparationError(
                    "A unit of FSDP computed earlier parts of this update and not the last one, with batch_parts: its "
                    "gradients can't be completed. Let each part use all units, or wrap fewer modules."
                )
            for use in self._uses:
                use.complete()
            self.parts.complete_update()

    def _drop(self) -> None:
        """Begin a new strategy."""
        if self.is_last:
            self.number, self.is_last = -1, False

    def norm_of(self, gradients: Sequence[torch.Tensor], norm_type: float, mesh: DeviceMesh) -> torch.Tensor:
        """Return the norm of sharded ``gradients``, at least one, in a fixed order; a collective.

        Args:
            mesh: the mesh whose last axis shards them.
        """
        shards, places = list(map(local_tensor, gradients)), list(map(place_of, gradients))
        known = [place for place in places if place is not None]
        assert len(known) == len(places), "fully_shard cuts rows"
        return total_norm(shards, norm_type, known, mesh.get_group(mesh.ndim - 1), self.mesh.group("tp"))

    def scale(self, gradients: Sequence[torch.Tensor], norm: torch.Tensor, clipping: Clipping) -> torch.Tensor:
        """Scale ``gradients`` of ``norm`` to at most ``clipping.max_norm`` at the end of an update; return ``norm``."""
        if self.parts.is_update_complete:
            scale_to(list(map(local_tensor, gradients)), norm, clipping.max_norm, clipping.error_if_nonfinite)
        return norm

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clamp every element of the gradients to [-``clip_value``, ``clip_value``], at the end of an update."""
        if self.parts.is_update_complete:
            super().clip_grad_value(parameters, clip_value)


@final
class _Use:
    """Which parameters of ``model`` the parts of an update use; torch gives the others gradients of zeros.

    Args:
        ranks: those that compute parts, or tokens of them.
        shared: the parameters that others than ``ranks`` use too; they count as used.
    """

    def __init__(self, model: torch.nn.Module, ranks: World, shared: Container[torch.Tensor]) -> None:
        self._ranks = ranks
        trained = [pair for pair in unsharded_parameters(model) if pair[1].requires_grad and pair[0] not in shared]
        self._shards = [shard for shard, _ in trained]
        is_used = self._is_used = [False] * len(trained)  # on this rank

        def hook(_: torch.Tensor, number: int) -> None:
            is_used[number] = True

        for number, (_, unsharded) in enumerate(trained):
            unsharded.register_post_accumulate_grad_hook(partial(hook, number=number))

    def complete(self) -> None:
        """Drop the gradients of parameters that no part has used, as replicas do; a collective."""
        found = torch.tensor(self._is_used, dtype=torch.uint8, device=self._ranks.device)
        if self._ranks.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._ranks.group)
        if not all(self._is_used):  # else there is no need to wait for the device
            for shard, is_used in zip(self._shards, found.tolist(), strict=True):
                shard.grad = shard.grad if is_used else None
        self._is_used[:] = [False] * len(self._is_used)


@final
class _Reduction:
    """The sum of the gradients of one unit, in the order of the parts, instead of torch's reduce-scatter.

    Each rank gets its shard of every rank's gradients after each part, and adds them to the tree. Until the last part
    of an update the result is zero.

    Args:
        num_inner: so many consecutive ranks compute one part, each for some of its tokens.
    """

    def __init__(
        self, strategy: PartSharding, shards: dist.ProcessGroup, replicas: dist.ProcessGroup | None, num_inner: int
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


# --------------------------------------------------------------------------------------------------
# The strategies

#: Along these, ranks compute tokens of the same samples.
_TOKENS = tuple(axis for axis in TOKEN_AXES if axis not in DATA_AXES)


@final
class PartShards(PartSharding, FullyShardStrategy):
    """FSDP 2 whose gradients are summed in the order of the parts, after each of them."""

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        if self.mesh.active("ep"):
            raise PreparationError(
                "ep with batch_parts isn't built: an expert computes tokens of several parts at once, so the order of "
                "their sums depends on the number of ranks. Leave it out, or batch_parts."
            )

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return ``model`` sharded; its gradients are summed in the order of the parts."""
        placed = super().place_model(model, precision, device_placement, evaluation_mode)
        if evaluation_mode:
            return placed
        if self._replicas:
            raise PreparationError("Parameters that FSDP ignores aren't summed in the order of the parts. Shard them.")
        self.sum_parts_of(placed, self.shard_mesh(), self.mesh.size(*_TOKENS))
        self.parts.take_model(placed)
        sequences = self.mesh.active(*_TOKENS)
        if sequences and self.parts.has_statistics:
            raise PreparationError(
                f"BatchNorm under {', '.join(sequences)} with batch_parts isn't built: each rank normalises over its "
                "own tokens of a part. Use LayerNorm, or leave batch_parts out."
            )
        return placed

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enter a context in which backward passes reduce gradients as elsewhere: each is one part's."""
        return nullcontext()

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float | None = None, **kwargs: Any
    ) -> None:
        """Accumulate the gradients of ``loss``; at the end of the window they are those of all parts.

        Args:
            num_steps: the micro-batches of an update on this rank, if the loss is a mean; None if it is a sum.
        """
        with self.next_part():
            num_parts = 1 if num_steps is None else num_steps * self.mesh.size(*TOKEN_AXES)
            super().backward(loss, scaler, num_parts, **kwargs)

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a global norm of at most ``clipping.max_norm``; return the norm before scaling."""
        self._require_gradients(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.world.device)
        return self.scale(gradients, self.norm_of(gradients, clipping.norm_type, self.shard_mesh()), clipping)


@final
class PartStages(PartSharding, PipelineStrategy):
    """Stages whose gradients are summed in the order of the parts. All stages compute one part, in micro-batches."""

    def place_model(
        self, model: torch.nn.Module, precision: Precision, device_placement: bool, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return the stages of ``model`` on this rank; their gradients are summed in the order of the parts."""
        if has_statistics(model):
            raise PreparationError(
                "BatchNorm in a pipeline with batch_parts isn't built: it normalises over a micro-batch of a part. Use "
                "LayerNorm, or leave batch_parts out."
            )
        placed = super().place_model(model, precision, device_placement, evaluation_mode)
        if isinstance(placed, PipelinedModel) and placed is not model and not evaluation_mode:
            shared = {parameter for name, parameter in placed.named_parameters() if name in placed.shared}
            for stage in placed.pipeline_schedule.stages.values():
                self.sum_parts_of(stage, self.shard_mesh(), shared=shared)
            self.parts.take_model(placed)
        return placed

    def pipeline_step(
        self, model: Any, *args: Any, num_steps: float, synchronises: bool, **options: Any
    ) -> torch.Tensor:
        """Accumulate the gradients of a part on every stage; at the end of an update they are those of all parts."""
        with self.next_part():
            num_parts = num_steps * self.mesh.size(*DATA_AXES)
            loss = super().pipeline_step(model, *args, num_steps=num_parts, synchronises=synchronises, **options)
            if not synchronises:
                model.pipeline_schedule.reduce()
        return loss

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Scale the gradients to a norm over all stages; a collective of the pipeline."""
        counted = [p.grad for p in parameters if p.grad is not None and p not in self._shared]
        own = torch.zeros((), device=self.world.device)
        if counted:
            own = self.norm_of(counted, clipping.norm_type, self.shard_mesh())
        of_stages = [torch.empty_like(own) for _ in range(self.mesh.size("pp"))]
        dist.all_gather(of_stages, own, group=self.mesh.group("pp"))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return self.scale(gradients, norm_of_norms(torch.stack(of_stages), clipping.norm_type), clipping)
