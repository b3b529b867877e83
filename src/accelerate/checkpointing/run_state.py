"""The live objects of a run, which the Accelerator passes to saving and loading. Internal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final, runtime_checkable

from ..settings.training import ProjectOptions

if TYPE_CHECKING:
    import torch

    from ..distributed.world import World
    from .background import Background
    from .items import CheckpointItem
    from .sharded import StateAccess
    from .store import StagingDirectory

#: The result of a ``state_dict()``: any values by name.
StateDict: TypeAlias = dict[str, Any]

#: A user's hook before saving, ``hook(models, weights, folder)``, or before loading, ``hook(models, folder)``.
Hook: TypeAlias = Callable[..., None]

#: Writes the state that a strategy saves in its own format. Or it returns items to write with the others, or a function
#: that writes later, from values that don't change meanwhile: an asynchronous save writes in another thread.
WriteStrategyState: TypeAlias = Callable[["StagingDirectory"], "Sequence[CheckpointItem] | Callable[[], object] | None"]


class Saved(Protocol):
    """An object whose state can be saved."""

    def state_dict(self) -> object:
        """Return the state to restore."""
        ...


@runtime_checkable
class Stateful(Saved, Protocol):
    """An object that can be saved and restored, such as a module, an optimizer or a scheduler."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Restore the state that ``state_dict`` returned."""
        ...


class OpenGradients(Protocol):
    """The gradients of a rank between two optimizer updates."""

    def state_dict(self) -> Mapping[str, object] | None:
        """Return the gradients; None if no window is open."""
        ...

    def joined(self, states: Iterable[Any]) -> Mapping[str, object] | None:
        """Return the sum of the gradients of several ranks; None if they can't be added."""
        ...


@dataclass(frozen=True)
@final
class StrategyState:
    """The part of a checkpoint that depends on how models are distributed over the processes.

    Attributes:
        weights: one state dict per model, as the main process writes it; hooks may take entries out.
        optimizers: those whose full state the main process writes.
        write: writes everything else, in the strategy's own format.
    """

    weights: Iterable[StateDict] = ()
    optimizers: Sequence[Saved] = ()
    write: WriteStrategyState | None = None


class StateStrategy(Protocol):
    """The interface to get the state of models and optimizers from their shards, and to load it into them."""

    @property
    def access(self) -> StateAccess:
        """The object that loads state into prepared models and their optimizers."""
        ...

    def checkpoint_state(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        model_only: bool = False,
    ) -> StrategyState:
        """Return the strategy's part of a checkpoint; a collective."""
        ...

    def restorable(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Return those of ``optimizers`` whose state a checkpoint restores."""
        ...


@dataclass
@final
class RunState:
    """The live objects of a run that a checkpoint saves and loads.

    Attributes:
        strategy: gets and sets the state of models and optimizers.
        world: the processes that save and load together; None means this process alone.
        label: the name of the strategy that a manifest records.
        step: saved with the checkpoint, and returned by a load.
        custom_objects: the objects that the user registered.
        may_pickle: those of them whose state is saved as a pickle, which may run code when it is loaded.
        open_window: the gradients of this rank, if the run is saved between two optimizer updates.
        save_hooks: called as ``hook(models, weights, folder)`` on every rank, with the folder of the checkpoint (for
            remote storage, the local staging directory); files that they write there are committed too.
        load_hooks: called as ``hook(models, folder)`` on every rank; a hook may take models out of the list.
        background: runs asynchronous saves; each save waits for the one before.
    """

    strategy: StateStrategy
    world: World | None = None
    project: ProjectOptions = field(default_factory=ProjectOptions)
    label: str = "NO"
    step: int = 0
    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    schedulers: Sequence[Stateful] = ()
    dataloaders: Sequence[object] = ()
    scaler: Stateful | None = None
    custom_objects: Sequence[Stateful] = ()
    may_pickle: Sequence[object] = ()
    open_window: OpenGradients | None = None
    save_hooks: Iterable[Hook] = ()
    load_hooks: Iterable[Hook] = ()
    background: Background | None = None

    @property
    def is_classic(self) -> bool:
        """Whether states are saved as pickles under the classic names."""
        return self.project.checkpoint_format == "classic"

    @property
    def num_ranks(self) -> int:
        """The number of processes of the run."""
        return 1 if self.world is None else self.world.size

    def pickles(self, obj: object) -> bool:
        """Return whether the state of a registered object may be a pickle."""
        return any(obj is one for one in self.may_pickle)
