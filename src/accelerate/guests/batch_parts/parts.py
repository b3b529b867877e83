"""The parts of a run: their division among its ranks, their random streams, and what begins and ends with them.

While a loop works with a batch, all of the process's random streams belong to its part: they are a function of the
seed, the epoch, the update and the part. Outside of loops the streams continue where they were before, so what all
ranks draw there is equal on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, final
from weakref import ref

import torch

from ...data_loader.loader import PreparedLoader
from ...data_loader.random_streams import SampleSeed, derived_seed
from ...devices.table import DeviceKind
from ...distributed.random import (
    HOST_STREAMS,
    capture_host_streams,
    capture_rng_states,
    restore_rng_states,
    seed_host_streams,
    synchronize_rng_states,
)
from ...distributed.world import World
from ...errors import PreparationError, SettingError
from ...modules import is_sharded
from ...seams import LoopHook
from ...torch_private.modules import num_changes
from .exchange import Division
from .hashes import fingerprint
from .loaders import divide, parts_of
from .options import BatchPartsOptions
from .statistics import RunningStatistics

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: Makes the seeds of parts other numbers than those of samples, which follow from the same seed.
_OF_PARTS: Final = 0x7061727473
#: The same for those of updates.
_OF_UPDATES: Final = 0x75706474


@final
class PartStreams:
    """The streams of the parts that this rank computes, and the saved streams of the running loops."""

    def __init__(self, kind: DeviceKind) -> None:
        self._seed_device: Callable[[int], object] | None = None if kind.name == "cpu" else kind.manual_seed
        self._left: dict[str, Any] | None = None  # those of the part, while others are shown
        self._saved: list[tuple[PreparedLoader, dict[str, Any]]] = []  # before each running loop, the innermost last

    @property
    def shared(self) -> dict[str, Any]:
        """The states of the host's streams outside of loops."""
        states = self._saved[0][1] if self._saved else capture_host_streams()
        return {name: state for name, state in states.items() if name in HOST_STREAMS}

    def begin_part(self, loader: PreparedLoader, number: int) -> None:
        """Set the streams for the part with ``number`` in the epoch of ``loader``."""
        if not any(running is loader for running, _ in self._saved):
            self._saved.append((loader, capture_rng_states()))
        self._seed(loader, _OF_PARTS, number)

    def begin_step(self, number: int) -> None:
        """Set the streams for the step of the update with ``number`` in the epoch: the same on all ranks."""
        if self._saved:
            self._seed(self._saved[-1][0], _OF_UPDATES, number)

    def _seed(self, loader: PreparedLoader, kind: int, number: int) -> None:
        assert loader.sample_seed is not None, "the loader got one when it was divided"
        value = derived_seed(loader.sample_seed.value ^ kind, loader.progress.epoch, number)
        seed_host_streams(value)
        if self._seed_device is not None:
            self._seed_device(value)

    def leave_part(self) -> None:
        """Let the streams be those outside of loops, until :meth:`return_to_part`."""
        self._left = capture_rng_states() if self._saved else None
        if self._saved:
            restore_rng_states(self._saved[0][1])

    def return_to_part(self) -> None:
        """Let the streams continue where they were before :meth:`leave_part`."""
        if self._left is not None:
            restore_rng_states(self._left)
            self._left = None

    def end_pass(self, loader: PreparedLoader) -> None:
        """Let the streams continue where they were before the loop over ``loader``."""
        for place, (running, states) in enumerate(self._saved):
            if running is loader:
                del self._saved[place]
                if place < len(self._saved):  # a loop that began later runs on, such as the other one of a zip()
                    self._saved[place] = (self._saved[place][0], states)
                else:
                    restore_rng_states(states)
                return


@final
class Parts(LoopHook):
    """The parts that this rank computes; the strategy of the run holds it.

    Args:
        share: the ranks that divide the parts; each of them may be several ranks that compute the same part.
    """

    def __init__(self, world: World, share: World) -> None:
        self.world, self._share = world, share
        self.division: Division = Division(1, share.size, share.rank)
        #: Returns whether gradients of an update that isn't complete are held; set by the strategy.
        self.is_open: Callable[[], bool] = lambda: False
        #: Drops what the strategy holds of a complete update; set by it.
        self.drop: Callable[[], None] = lambda: None
        self._run: Any = lambda: None
        self._streams = PartStreams(world.kind)
        self._statistics: list[RunningStatistics] = []
        #: The models before their first update, with their values by name: (value, number of changes).
        self._values: list[tuple[torch.nn.Module, dict[str, tuple[torch.Tensor, int]]]] = []
        self._models: list[torch.nn.Module] = []  # whose values are kept when the first part begins
        self._number = 0  # of the part in the epoch
        self._num_begun = 0  # batches of all loops
        self._last_backward: tuple[object, int, int] | None = None  # loader, step and batch
        self._is_complete = self._has_step_streams = False  # the gradients of this micro-batch's update; its streams
        self._step_calls = 0  # of optimizers when the part began
        self._is_stepping = False  # an optimizer is
        self._is_due = False  # statistics of a complete update have not been applied

    def attach(self, run: Accelerator) -> None:
        """Compute the parts of the updates of ``run``.

        Raises:
            SettingError: the number of parts isn't a multiple of the number of processes, or an option changes what a
                part is.
        """
        options = run.settings.find(BatchPartsOptions)
        assert options is not None and options.batch_parts is not None, "attached only then"
        count = options.batch_parts
        size = self._share.size
        if count % size:
            what = "processes" if size == self.world.size else "data-parallel ranks"
            raise SettingError(
                f"{run.settings.quote('batch_parts.batch_parts')}: {size} {what} can't share {count} parts equally. "
                f"Start a number of {what} that divides {count}, or choose a multiple of {size}."
            )
        reasons = {
            "split_batches=True": run.split_batches and "a loader's batch is one part already",
            "dispatch_batches=True": run.dispatch_batches and "each process reads its own parts",
            "even_batches=False": not run.even_batches
            and "the last update of an epoch is padded to parts of one shape",
        }
        for asked, reason in reasons.items():
            if reason:
                raise SettingError(f"{asked} with batch_parts={count}: {reason}. Leave {asked.partition('=')[0]} out.")
        self._run = ref(run)
        self.division = Division(count, size, self._share.rank)
        # Not a product with the state's own number: a copy of the run in another process has multiplied it before.
        run.gradient_state.num_steps = (run.settings.accumulation.num_steps or 1) * self.division.per_rank

    @property
    def run(self) -> Accelerator:
        """The run."""
        run = self._run()
        assert run is not None, "it calls this"
        return run

    @property
    def is_update_complete(self) -> bool:
        """Whether the gradients are those of a whole update."""
        return self.run.gradient_state.sync_gradients

    def take_model(self, model: torch.nn.Module) -> None:
        """Follow the running statistics of ``model``, and look at its other buffers.

        Raises:
            PreparationError: the model normalises over ranks.
        """
        statistics = RunningStatistics(model, self.division, self._share.group)
        self._models.append(model)
        if statistics:
            self._statistics.append(statistics)

    @property
    def has_statistics(self) -> bool:
        """Whether a model has running statistics."""
        return bool(self._statistics)

    def divide_loader(self, loader: PreparedLoader) -> None:
        """Let ``loader`` read this rank's parts, and each sample with random streams of its own."""
        divide(loader, self.division, self._is_training)
        if loader.sample_seed is None:
            loader.sample_seed = SampleSeed(torch.initial_seed())

    def _is_training(self) -> bool:
        run = self._run()
        return run is not None and any(
            model.training and any(parameter.requires_grad for parameter in model.parameters())
            for model in run._wrapped_models
        )

    def release(self) -> None:
        """Drop all references to prepared models."""
        self._statistics.clear()
        self._values.clear()
        self._models.clear()

    # -- what is refused -----------------------------------------------------------------------------------

    def check_backward(self) -> None:
        """Raise if a backward pass now can't be that of a part.

        Raises:
            PreparationError: it is outside of ``accumulate``, or after a step of the same update.
        """
        state, named, count = self.run.gradient_state, self.run._windows, self.division.count
        if not named.depth or named.current.models is None:
            raise PreparationError(
                f"backward() outside of accumulate(), with batch_parts={count}: an update consists of {count} parts, "
                "so put each batch's forward, backward and step under `with accelerator.accumulate(model):`, with "
                "prepared models."
            )
        if state.loaders.active is None:
            raise PreparationError(
                f"backward() outside of a loop over a prepared loader, with batch_parts={count}: the loader divides "
                "the samples into parts. Iterate over a loader that prepare() returned."
            )
        if state.num_step_calls != self._step_calls:
            raise PreparationError(
                f"backward() after an optimizer has stepped in the same micro-batch, with batch_parts={count}: this "
                "part would be computed with other weights than the parts before, and how many those are depends on "
                "the number of ranks. Compute all losses first, then step all optimizers."
            )
        if self._is_stepping:
            raise PreparationError(
                f"backward() in the closure of an optimizer's step, with batch_parts={count}: the closure has only the "
                "last part of an update. Use an optimizer that needs no closure (not LBFGS), or leave batch_parts out."
            )
        loader, per_rank = state.loaders.active, self.division.per_rank
        step = getattr(getattr(loader, "progress", None), "batch_info", None)
        place, last = (loader, 0 if step is None else step.steps - 1, self._num_begun), self._last_backward
        is_another = last is not None and place[0] is last[0] and place[2] != last[2]
        if last is not None and is_another and self.is_open() and place[1] % per_rank == 0 != (last[1] + 1) % per_rank:
            raise PreparationError(
                f"An update of {count} parts was left after some of them, and this batch begins another one. Leave a "
                "loop after a step, where accelerator.sync_gradients is true."
            )
        self._last_backward = place

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if ``optimizer`` doesn't wait for the sums of all parts.

        Raises:
            PreparationError: it updates parameters during the backward pass.
        """
        if any(base.__module__.partition(".")[0] == "lomo_optim" for base in type(optimizer).__mro__):
            raise PreparationError(
                f"{type(optimizer).__name__} with batch_parts={self.division.count}: it updates parameters during each "
                "backward pass, and so with the gradients of one part. Use another optimizer, or leave batch_parts out."
            )

    def num_rounds(self, num_parts: int) -> int:
        """Return how many times ``division.count`` parts an update with ``num_parts`` of this rank has.

        Raises:
            PreparationError: the update would have different numbers of parts on different numbers of ranks.
        """
        rounds, rest = divmod(num_parts, self.division.per_rank)
        if rest:
            raise PreparationError(
                f"An update ends after {num_parts} micro-batches, but with batch_parts={self.division.count} on "
                f"{self.division.num_ranks} processes it has a multiple of {self.division.per_rank}. Let accumulate() "
                "count the micro-batches of a prepared loader."
            )
        return rounds

    def complete_update(self) -> None:
        """Note that the gradients of an update are complete.

        Raises:
            PreparationError: a forward pass has changed a buffer whose values would depend on the number of ranks.
        """
        self._is_due, self._is_complete = bool(self._statistics), True
        if not self._values:
            return
        changed = [name for model, before in self._values for name in self._changed_of(model, before)]
        self._values.clear()  # once: a model that changes them does it in its first update
        if changed:
            raise PreparationError(
                f"The model changes buffers or weights while it trains: {', '.join(changed[:5])}. Each rank would "
                "change its own, so they would depend on the number of ranks. Only the running statistics of "
                "normalisation layers follow the parts in their order. Leave batch_parts out, or compute these values "
                "outside of forward()."
            )

    def _keep_values(self) -> None:
        """Keep the values that a forward pass must not change; weights may be large, so they aren't copied."""
        for model in self._models:
            fixed = self._fixed_of(model).items()
            copied = (
                (name, one if isinstance(one, torch.nn.Parameter) else one.detach().clone(), one) for name, one in fixed
            )
            self._values.append((model, {name: (value, num_changes(one)) for name, value, one in copied}))
        self._models.clear()

    def _fixed_of(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors that a forward pass must not change: buffers and unsharded weights."""
        updated = {id(buffer) for statistics in self._statistics for buffer in statistics.buffers()}
        fixed = {f"buffer {name}": one for name, one in model.named_buffers() if id(one) not in updated}
        return fixed | {f"weight {name}": one for name, one in model.named_parameters() if not is_sharded(one)}

    def _changed_of(self, model: torch.nn.Module, before: dict[str, tuple[torch.Tensor, int]]) -> list[str]:
        """Return the names of buffers with other values than before, and of weights that were written to."""
        now = self._fixed_of(model)
        return [name for name, kept in before.items() if name not in now or _has_changed(now[name], *kept)]

    # -- the points of a loop ------------------------------------------------------------------------------

    def begin_pass(self, loader: object) -> None:
        """Apply statistics that wait, before another loop uses the model."""
        self._apply_statistics()

    def begin_batch(self, loader: object) -> None:
        """Set the random streams and the number of the part that ``loader`` gives to the loop."""
        if not isinstance(loader, PreparedLoader):
            return
        root, batch_info = parts_of(loader), loader.progress.batch_info
        if root is None or batch_info is None:
            return
        if root.trains and self._models:
            self._keep_values()
        step = batch_info.steps - 1
        self._is_complete = self._has_step_streams = False
        self._number, self._num_begun = root.number_of(step), self._num_begun + 1
        if step % self.division.per_rank == 0:
            self._apply_statistics()
            for statistics in self._statistics if root.trains else ():
                statistics.round += 1
        self._streams.begin_part(loader, self._number)
        self._step_calls, self._is_stepping = self.run.gradient_state.num_step_calls, False

    def end_pass(self, loader: object) -> None:
        """Let the random streams continue where they were before the loop."""
        if not isinstance(loader, PreparedLoader):
            return
        if loader.end_of_dataloader:  # all ranks come here; an exception or `break` may be one rank's
            self._apply_statistics()
        self._streams.end_pass(loader)

    def before_step(self, optimizer: object) -> None:
        """Set the random streams of the update; note that backward passes come from a closure.

        Raises:
            PreparationError: gradients come from a backward pass that didn't exchange them.
        """
        self._is_stepping = True
        if not self._has_step_streams:  # another optimizer of the same update goes on with them
            self._has_step_streams = True
            self._streams.begin_step(self._number // self.division.count)
        groups = getattr(optimizer, "param_groups", ())
        if not self._is_complete and any(one.grad is not None for group in groups for one in group["params"]):
            raise PreparationError(
                f"An optimizer steps with gradients that no accelerator.backward() of this batch has completed, with "
                f"batch_parts={self.division.count}: each rank would use its own. Call accelerator.backward(loss) "
                "instead of loss.backward()."
            )

    def after_step(self, optimizer: object) -> None:
        """Drop what the update has used, and apply its statistics."""
        self._is_stepping = False
        self.drop()
        if len(self.run._optimizers) <= 1:  # else another loss may still use the same layers
            self._apply_statistics()

    @property
    def shared_streams(self) -> Mapping[str, object]:
        """The states of the host's random streams outside of loops."""
        return self._streams.shared

    def before_save(self) -> None:
        """Apply the statistics that wait."""
        self._apply_statistics()

    def details_of_save(self, alone: bool) -> Mapping[str, object]:
        """Refuse a save inside an update; return the fingerprint for the checkpoint's manifest.

        The checkpoint gets the random streams from outside of loops: those of a part follow from its number.

        Raises:
            PreparationError: the update isn't complete, or running statistics wait for the other ranks.
        """
        if alone and self._is_due:
            raise PreparationError(
                "save_state() on one process, with batch_parts and several optimizers: the running statistics of this "
                "update aren't there until all processes call it. Call it on all of them."
            )
        if self.is_open():
            raise PreparationError(
                f"save_state() inside an update of {self.division.count} parts: each rank holds sums of its own, "
                "which another number of ranks can't use. Save after a step, where accelerator.sync_gradients is true."
            )
        self._streams.leave_part()
        if alone and not self.run.strategy.state.is_whole():  # a fingerprint of shards is a collective
            return {}
        return {"fingerprint": fingerprint(self.run, self.shared_streams)}

    def after_save(self, folder: str, seconds: float, details: Mapping[str, object]) -> None:
        """Let the random streams of the part continue."""
        self._streams.return_to_part()

    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Give all ranks the random streams of rank 0, also those without a counterpart in the saved run."""
        synchronize_rng_states(HOST_STREAMS, world=self.world)

    def _apply_statistics(self) -> None:
        """Apply the running statistics of a complete update, if there are some; a collective."""
        if self._is_due:
            self._is_due = False
            for statistics in self._statistics:
                statistics.apply()


def _has_changed(now: torch.Tensor, before: torch.Tensor, count: int) -> bool:
    if now is before:
        return num_changes(now) != count
    return now.shape != before.shape or not torch.equal(now, before)
