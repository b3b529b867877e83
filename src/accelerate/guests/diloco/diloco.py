"""The context of a training loop, in which islands train apart and exchange changes of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, final

import torch

from ...accelerator import Accelerator
from ...errors import CheckpointError, CollectiveError, SettingError
from ...logging import MultiProcessAdapter, get_logger
from ...seams import LoopHook
from ...torch_private.fsdp import reshard
from .compression import CODECS
from .fragments import Fragment, OuterOptimizer, OuterWeight, average_optimizer_states, divide, local_values
from .islands import Islands, check
from .state import DiLoCoState

logger: MultiProcessAdapter = get_logger(__name__)

#: Makes the optimizer of outer weights, by default: the one of the paper.
NESTEROV: Final[OuterOptimizer] = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@final
class DiLoCo:
    """A context in which islands of processes train apart, and exchange compressed changes of their weights.

    ::

        with DiLoCo(accelerator, model, inner_steps=100) as diloco:
            for batch in loader:
                ...
                optimizer.step()
                diloco.step()

    An island is one replica of the mesh (``ParallelismConfig(dp_replicate_size=...)``). Inside of it gradients are
    reduced in every step, as without DiLoCo. Every ``inner_steps`` updates each fragment of the model is exchanged
    between islands: the mean change of its weights is the gradient of an outer optimizer. At the end of the context
    all islands get the mean of their weights. It has no effect on one process.

    Args:
        model: the prepared model, for DDP, FSDP2, tensor or pipeline parallelism.
        inner_steps: the updates between two exchanges of the same fragment.
        outer_optimizer: makes the outer optimizer from a list of parameters; default SGD with Nesterov momentum
            (``lr=0.7, momentum=0.9``).
        compression: ``"int8"``, ``"2bit"`` or ``"none"`` (float32). An error is added to the next change.
        fragments: the number of parts of the model, which are exchanged in turn.
        overlap: exchange while training goes on, and use the result ``overlap_steps`` updates later.
        overlap_steps: the number of these updates, at most ``inner_steps - 1``.
        kept: with ``overlap``, the share of an island's own weights when it uses the result.
        islands: the number of islands, for DDP; default: each process is one.

    Raises:
        PreparationError: the model, or another option of the run, can't be combined with it.
        SettingError: an argument has no meaning, or doesn't fit the processes.

    Attributes:
        num_steps: the updates so far.
        bytes_sent: the bytes that this rank has sent to other islands.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        inner_steps: int = 100,
        outer_optimizer: OuterOptimizer | None = None,
        compression: Literal["int8", "2bit", "none"] = "int8",
        fragments: int = 4,
        overlap: bool = True,
        *,
        overlap_steps: int = 5,
        kept: float = 0.5,
        islands: int | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.num_steps: int = 0
        self.bytes_sent: int = 0
        self._num_exchanges = 0
        self.inner_steps = inner_steps
        self.enabled: bool = accelerator.num_processes > 1
        self._delay = min(overlap_steps, inner_steps - 1) if overlap else 0
        self._kept = kept if self._delay else 0.0
        self._fragments: list[Fragment] = []
        self._undo: list[Callable[[], object]] = []
        self._check_arguments(outer_optimizer, compression, fragments, overlap_steps)
        if not self.enabled:
            return
        check(accelerator, model)
        self._islands = Islands.of(accelerator, islands)
        self._free_gathered()
        part = (self._islands.part, self._islands.num_parts) if self._islands.holds_replicas else (0, 1)
        named = accelerator.strategy.state.named_parameters(model)
        trained = [(name, p) for name, p in named if p.requires_grad and not p.is_meta]  # meta: of other stages
        weights = [OuterWeight(name, parameter, part) for name, parameter in trained]
        groups = divide(weights, [parameter.numel() for _, parameter in trained], fragments)
        for number, group in enumerate(groups, start=1):
            offset = number * inner_steps // len(groups)
            make = outer_optimizer or NESTEROV
            self._fragments.append(Fragment(group, offset, self._islands, CODECS[compression], make))

    def _check_arguments(self, outer_optimizer: object, compression: str, fragments: int, overlap_steps: int) -> None:
        """Raise if an argument has no meaning.

        Raises:
            SettingError: names it, and the values that have one.
        """
        if outer_optimizer is not None and not callable(outer_optimizer):
            raise SettingError(
                f"DiLoCo(outer_optimizer={type(outer_optimizer).__name__}(...)): outer weights are made by DiLoCo. "
                "Give a function that makes the optimizer: `lambda parameters: torch.optim.SGD(parameters, lr=0.7)`."
            )
        if compression not in CODECS:
            raise SettingError(f"DiLoCo(compression={compression!r}): there are {', '.join(map(repr, CODECS))}.")
        for name, value, least in (
            ("inner_steps", self.inner_steps, 1), ("fragments", fragments, 1), ("overlap_steps", overlap_steps, 1)
        ):  # fmt: skip
            if type(value) is not int or value < least:
                raise SettingError(f"DiLoCo({name}={value!r}): a whole number of at least {least}.")
        if fragments > self.inner_steps:
            raise SettingError(
                f"DiLoCo(fragments={fragments}, inner_steps={self.inner_steps}): one fragment is sent after a step at "
                "most. Choose as many fragments as steps, or fewer."
            )
        if not 0 <= self._kept < 1:
            raise SettingError(f"DiLoCo(kept={self._kept}): a share of at least 0 and less than 1.")

    # -- the context ---------------------------------------------------------------------------------------

    def __enter__(self) -> DiLoCo:
        if self.enabled:
            self._undo = [*self._islands.keep_inside(self.accelerator, self.model), *_Checkpoints(self).register()]
            members = self.accelerator.world.members
            if members is not None:
                joint = _JointState(self)
                members.joint_states.append(joint)
                self._undo.append(lambda: members.joint_states.remove(joint))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.enabled and error is None:  # after an error the other processes may not reach the collectives
            self._average()
        elif self.enabled and isinstance(error, Exception):
            logger.warning(
                "An exception left a DiLoCo block: the islands keep weights of their own. Load a checkpoint before "
                "training goes on."
            )
        while self._undo:
            self._undo.pop()()

    @torch.no_grad()
    def step(self) -> None:
        """Count one update; send and apply the fragments whose turn it is. Call it after ``optimizer.step()``.

        Raises:
            SettingError: the call is outside of the block.
        """
        if self.enabled and not self._undo:
            raise SettingError(
                "diloco.step() outside of `with DiLoCo(...) as diloco:` exchanges nothing. Move it inside."
            )
        if not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        turn = [one for one in self._fragments if self.num_steps % self.inner_steps == one.offset % self.inner_steps]
        # Resumed with fewer inner steps, a fragment's turn may come before its last change was due.
        due = [
            one
            for one in self._fragments
            if (sent := one.arriving) is not None and (sent.due == self.num_steps or one in turn)
        ]
        if due or turn:
            self._free_gathered()
        for fragment in due:
            fragment.apply(self._kept)
        self._num_exchanges += len(turn)
        for fragment in turn:
            self.bytes_sent += fragment.send(self.num_steps + self._delay)
            if not self._delay:
                fragment.apply(0.0)

    @torch.no_grad()
    def _average(self) -> None:
        """Make all islands equal: apply what is on its way, then average weights, optimizer states and buffers."""
        self._check_numbers()
        self._free_gathered()
        for fragment in self._fragments:
            if fragment.arriving is not None:
                fragment.apply(self._kept)
        for fragment in self._fragments:
            self.bytes_sent += fragment.average()
        self.bytes_sent += average_optimizer_states(self.accelerator, self.model, self._islands)
        buffers = [local_values(one) for one in self.model.buffers() if one.is_floating_point() and not one.is_meta]
        self._islands.average(buffers, inside=True)

    def _check_numbers(self) -> None:
        """Raise on all ranks if they have made different numbers of exchanges.

        Raises:
            CollectiveError: they have, or a rank never comes to the end of its block.
        """
        coordinator = self.accelerator.world.coordinator
        if coordinator is None:  # with --keep_replicas, an exchange itself says which rank makes another
            return
        coordinator.require_all("the end of a DiLoCo block")
        own = f"{self._num_exchanges}@{self._islands.part}"  # stages of a pipeline may have other fragments
        numbers = coordinator.exchange(f"diloco/{coordinator.number}", own, " ".join, seconds=60)
        if not isinstance(numbers, str):
            raise CollectiveError(f"DiLoCo: {numbers.text or 'a rank'} left or hung at the end of the block.")
        found = [number.split("@") for number in numbers.split()]
        if len({*numbers.split()}) > len({place for _, place in found}):
            counts = " ".join(count for count, _ in found)
            raise CollectiveError(
                f"DiLoCo: ranks have made different numbers of exchanges ({counts}, in the order of ranks). Call "
                "`diloco.step()` equally often on all islands: end the loop at the same update on all ranks."
            )

    def _free_gathered(self) -> None:
        """Reshard all parameters, also those that a forward has left unsharded."""
        if not self._islands.holds_replicas:
            reshard([self.model])

    def _state(self) -> DiLoCoState:
        return DiLoCoState(self.accelerator, self.model, self._islands, self._fragments)


@final
class _JointState:
    """The state of all islands, for a process in the place of a lost one."""

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco

    def state_dict(self) -> dict[str, Any]:
        """Return the outer weights, their optimizers and what is to be applied."""
        return {"num_steps": self._diloco.num_steps, "fragments": [one.state() for one in self._diloco._fragments]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the outer weights of the others, also as the model's own."""
        self._diloco._free_gathered()
        self._diloco.num_steps = state["num_steps"]
        for fragment, saved in zip(self._diloco._fragments, state["fragments"], strict=True):
            fragment.restore(saved)
            fragment.begin()


@final
class _Checkpoints(LoopHook):
    """Adds the state of a :class:`DiLoCo` to checkpoints, and restores it."""

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco
        self._loaded: DiLoCoState | None = None

    def register(self) -> list[Callable[[], object]]:
        """Take part in saves and loads from here on; return functions that end this."""
        run = self._diloco.accelerator
        run.gradient_state.hooks.add(self)
        handles = run.register_save_state_pre_hook(self._save), run.register_load_state_pre_hook(self._load)
        return [lambda: run.gradient_state.hooks.remove(self), *(handle.remove for handle in handles)]

    def details_of_save(self, alone: bool) -> Mapping[str, object]:
        """Refuse a save by one process.

        Raises:
            CheckpointError: islands differ, and each has to save its own state.
        """
        if alone:
            raise CheckpointError(
                "save_state() on the main process alone, inside of DiLoCo: every island has weights and optimizer "
                "states of its own. Call save_state() on all processes."
            )
        return {}

    def _save(self, models: object, weights: object, folder: str) -> None:
        self._diloco._free_gathered()
        self._diloco._state().write(Path(folder), self._diloco.num_steps)

    def _load(self, models: object, folder: str) -> None:
        self._loaded = self._diloco._state()
        self._loaded.read(Path(folder))

    @torch.no_grad()
    def after_load(self, folder: str, details: Mapping[str, object]) -> None:
        """Continue with the state of the checkpoint that was loaded."""
        if self._loaded is not None:
            self._diloco._free_gathered()
            self._diloco.num_steps = self._loaded.apply()
            self._loaded = None
