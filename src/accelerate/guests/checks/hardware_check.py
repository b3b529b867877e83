"""Check in every k-th update whether the hardware computes and stores correctly.

The results of a rank in that update (outputs of layers, gradients, the update of each parameter) are recomputed and
compared bit by bit; under data parallelism, the neighbouring rank recomputes them too. The values written by the
optimizer must be unchanged before its next step. Between these updates, only a counter runs.

Hochschild et al., "Cores that don't count", HotOS 2021; Dixit et al., "Silent Data Corruptions at Scale", 2021.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...distributed.collectives import gather_object, max_over_ranks
from ...distributed.random import capture_rng_states, restore_rng_states
from ...distributed.world import World
from ...errors import HardwareError, HardwareWarning, SettingError
from ...nested import recursively_apply
from ...parallel.base import Strategy
from ...parallel.compile import has_compiled_regions
from ...parallel.gradient_norm import local_tensor
from ...parallel.matrix_optimizer import needs_whole_matrices
from ...torch_private.modules import num_changes, set_step_hooks
from ...training.optimizer import AcceleratedOptimizer
from ...wording import some_ranks
from .recorded_pass import Checksums, Forward, PassRecorder
from .replica_check import checksum, has_bits, unwrapped

_AGAIN: Final = ", computed again on the same rank, differs"
_NEIGHBOUR: Final = ", computed again by the next rank, differs"
_FOR_ANOTHER: Final = ", computed twice for the rank before, differs"
_UPDATE: Final = " after the update isn't what the update gives when computed again"
_MEMORY: Final = " changed between two updates, by no operation"

#: The ``step`` methods that update each parameter separately, without other effects; only these are called again.
_REPEATABLE_STEPS: Final = {
    inspect.unwrap(vars(torch.optim)[name].step)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
        "SGD", "SparseAdam",
    )
}  # fmt: skip


def check_hardware(
    strategy: Strategy,
    models: Sequence[nn.Module],
    optimizers: Sequence[AcceleratedOptimizer],
    every: int,
    action: Literal["raise", "warn"],
) -> list[Callable[[], None]]:
    """Check the first and then each ``every``-th update of each of ``optimizers``; return what ends these checks.

    Args:
        models: the prepared models.

    Raises:
        SettingError: the options or the run don't allow the check.
    """
    asked = f"watch_run(sdc_check={every}, on_sdc={action!r})"
    if every < 1:
        raise SettingError(f"{asked}: hardware is checked every n updates. Give 1 or more, or leave it out.")
    if action not in ("raise", "warn"):
        raise SettingError(f"{asked}: on_sdc is 'raise' or 'warn'.")
    if not strategy.can_repeat_passes or strategy.mesh.active("tp", "cp", "sp", "ep", "pp"):
        raise SettingError(
            f"{asked}: under {type(strategy).__name__} ({strategy.mesh.equation()}) no pass is computed again. It is "
            "under one process, DDP and FSDP2 without other axes; leave sdc_check out."
        )
    if not models or not optimizers:
        raise SettingError(f"{asked}: there is nothing to check yet. Call it after prepare(model, optimizer).")
    if any(map(has_compiled_regions, models)):
        raise SettingError(f"{asked}: a compiled model isn't recorded. Leave sdc_check or the compiler out.")
    window, device = optimizers[0].gradient_state, strategy.world.device
    recorders = [PassRecorder(inner, label, window, device) for _, inner, label in unwrapped(models)]
    for recorder in recorders:
        if recorder.obstacle:
            raise SettingError(
                f"{asked}: {type(recorder.model).__name__} holds {recorder.obstacle}, whose state can't be put back "
                "after a pass is computed again. Keep its state in numbers, lists, tensors or a random.Random, or "
                "leave sdc_check out."
            )
    checks: list[_UpdateCheck] = []
    for number, optimizer in enumerate(optimizers):
        owner = f" of optimizer {number}" if len(optimizers) > 1 else ""
        checks.append(_UpdateCheck(optimizer, owner, recorders, strategy, every, action))
        try:
            checks[-1].register()
        except AttributeError as error:
            for check in checks:
                check.end()
            kind = type(optimizer.optimizer).__name__
            raise SettingError(
                f"{asked}: {kind} takes no hooks of its step. Call super().__init__() in it, or leave sdc_check out."
            ) from error
    for check in checks:
        check.arm()
    return [check.end for check in checks]


@final
@dataclass(frozen=True)
class _Finding:
    """A value that differs from the first computation.

    Attributes:
        what: the tensor, and what is wrong with it.
        place: the tensor's number in the order of computation.
        ranks: the ranks of which one computes wrong.
        is_proven: an earlier comparison was equal, so the program itself is reproducible.
    """

    what: str
    place: int
    ranks: tuple[int, ...]
    is_proven: bool


@final
class _UpdateCheck:
    """The check of one optimizer's updates, and of the passes of the models that it trains."""

    def __init__(
        self,
        prepared: AcceleratedOptimizer,
        owner: str,
        recorders: Sequence[PassRecorder],
        strategy: Strategy,
        every: int,
        action: Literal["raise", "warn"],
    ) -> None:
        self._prepared, self._owner, self._every, self._action = prepared, owner, every, action
        self._world: World = strategy.world
        self._can_repeat_step = inspect.unwrap(type(prepared.optimizer).step) in _REPEATABLE_STEPS
        self._has_neighbour = strategy.world.size > 1 and strategy.state.is_whole()
        trained = {id(parameter) for group in prepared.param_groups for parameter in group["params"]}
        self._recorders = [each for each in recorders if any(id(p) in trained for p in each.model.parameters())]
        self._names = {
            id(parameter): f"`{name}`{each.label}"
            for each in self._recorders
            for name, parameter in each.model.named_parameters()
        }
        self._handles: list[RemovableHandle] = []
        self._count = 0
        self._is_armed = False
        self._findings: list[_Finding] = []
        self._proven: set[str] = set()  # names of tensors that were equal in a comparison
        self._said: set[str] = set()  # names that can't be compared and were logged
        self._expected = Checksums()
        self._written: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}  # tensor, version, checksum

    def register(self) -> None:
        """Register the check around each step of the optimizer."""
        optimizer = self._prepared.optimizer
        self._handles.append(optimizer.register_step_pre_hook(self._before))
        self._handles.append(optimizer.register_step_post_hook(self._after))

    def end(self) -> None:
        """Remove all hooks from the optimizer and the models, and discard all records."""
        for handle in self._handles:
            handle.remove()
        self._disarm()
        self._written = {}

    def arm(self) -> None:
        """Start to record passes, and check the next update."""
        self._is_armed = True
        for recorder in self._recorders:
            recorder.arm()

    def _disarm(self) -> None:
        self._is_armed = False
        for recorder in self._recorders:
            recorder.disarm()

    # -- around a step -------------------------------------------------------------------------------------

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._count += 1
        if self._written:
            self._compare_memory()
            if not self._is_armed:
                self._agree()
        if not self._is_armed:
            return
        for recorder in self._recorders:
            self._compare_passes(recorder)
            recorder.clear()
        takes_closure = any(value is not None for value in [*args[1:], *kwargs.values()])  # the first is the optimizer
        self._expected = Checksums() if takes_closure else self._expected_update(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        is_next = (self._count + 1) % self._every == 0
        if not self._is_armed and not is_next:
            return
        # Also before a checked update: a shard that changes during it makes the passes of all ranks differ.
        written = {each: tensor for name, p, _ in self._named(optimizer) for each, tensor in _held(name, p, optimizer)}
        sums = {name: checksum(tensor) for name, tensor in written.items()}
        self._written = {name: (tensor, num_changes(tensor), sums[name]) for name, tensor in written.items()}
        if self._is_armed:
            self._compare(self._expected, sums, _UPDATE)
            self._expected = Checksums()
            self._agree()
        if is_next:
            self.arm()
            for recorder in self._recorders:
                recorder.clear()
        else:
            self._disarm()

    # -- comparing -----------------------------------------------------------------------------------------

    def _compare(
        self, first: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor], what: str, *others: int
    ) -> bool:
        """Return whether values differ, and record each difference; equal values are comparable from now on."""
        places = {name: place for place, name in enumerate(first) if name in again and name + what not in self._said}
        if not places:
            return False
        differ = torch.stack([first[name].cpu() != again[name].cpu() for name in places]).tolist()
        for (name, place), is_other in zip(places.items(), differ, strict=True):
            key = name + what
            if is_other:
                self._findings.append(_Finding(key, place, (self._world.rank, *others), key in self._proven))
            else:
                self._proven.add(key)
        return any(differ)

    def _compare_memory(self) -> None:
        """Compare the optimizer's written values with the current ones, except tensors changed since."""
        first, again = Checksums(), Checksums()
        for name, (tensor, version, total) in self._written.items():
            if num_changes(tensor) == version:
                first[name], again[name] = total, checksum(tensor)
        self._written = {}
        self._compare(first, again, _MEMORY)

    def _compare_passes(self, recorder: PassRecorder) -> None:
        if recorder.obstacle:
            self._say(f"the passes of {type(recorder.model).__name__} ({recorder.obstacle})")
        forwards = recorder.forwards if self._is_agreed(recorder, len(recorder.forwards)) else []
        again = self._replay(recorder, forwards)
        if self._count == 1:  # at the first check, exclude results that this rank can't reproduce
            is_agreed = self._is_agreed(recorder, int(bool(again)))
            self._leave_out(again, self._replay(recorder, forwards if is_agreed else []))
        own = recorder.recorded()
        self._compare(own, again, _AGAIN)
        if self._has_neighbour:
            self._compare_with_neighbour(recorder, forwards, own)

    def _is_agreed(self, recorder: PassRecorder, count: int) -> bool:
        """Return whether all ranks recompute the same ``count`` of passes, if these have collectives."""
        if self._world.size == 1 or not recorder.has_collectives:
            return True
        most, fewest = max_over_ranks(self._world, count, -count)
        if most != -fewest:
            self._say(f"passes of {type(recorder.model).__name__}, since not all ranks can compute theirs again")
        return most == -fewest

    def _replay(self, recorder: PassRecorder, forwards: Sequence[Forward], of: str = "") -> Checksums:
        try:
            there = [_on(self._world.device, forward) for forward in forwards] if of else forwards
            return recorder.replay(there)
        except Exception as error:  # raised by the model; it must not end the run
            self._say(f"the passes of {of or type(recorder.model).__name__} can't be computed again ({error!r})")
            return Checksums()

    def _leave_out(self, once: Checksums, twice: Checksums) -> None:
        names = [name for name in once if name in twice and not torch.equal(once[name], twice[name])]
        self._said.update(name + what for name in names for what in (_AGAIN, _NEIGHBOUR, _FOR_ANOTHER))
        if names:
            self._say(f"{names[0]} and {len(names) - 1} more are other ones each time, without a fault")

    def _compare_with_neighbour(self, recorder: PassRecorder, forwards: Sequence[Forward], own: Checksums) -> None:
        """Compare ``own`` with the next rank's results for the same passes; a collective.

        If the results of any rank differ, each rank repeats its computation for the previous rank: a rank that
            disagrees
        with itself is wrong. All ranks do so together, because a model may have collectives.
        """
        world = self._world
        sent = [] if recorder.keeps_state else [_on(torch.device("cpu"), forward) for forward in forwards]
        given = self._pass_on(sent, 1)
        answer = self._computed_for_another(recorder, given)
        next_rank = (world.rank + 1) % world.size
        differs = self._compare(own, self._pass_on(answer, -1), _NEIGHBOUR, next_rank)
        if any(max_over_ranks(world, differs)):
            self._proven.update(name + _FOR_ANOTHER for name in answer if name + _AGAIN in self._proven)
            self._compare(answer, self._computed_for_another(recorder, given), _FOR_ANOTHER)

    def _computed_for_another(self, recorder: PassRecorder, given: Sequence[Forward]) -> Checksums:
        if recorder.keeps_state:
            self._say(f"{type(recorder.model).__name__} on another rank, since it keeps Python state between its calls")
            given = []
        forwards = given if self._is_agreed(recorder, len(given)) else []
        return {name: total.cpu() for name, total in self._replay(recorder, forwards, "the rank before").items()}

    def _pass_on(self, value: Any, step: int) -> Any:
        """Send ``value`` to the rank ``step`` places further in the ring, and return the value received."""
        world, received = self._world, [None]
        to, source = (world.rank + step) % world.size, (world.rank - step) % world.size

        def send() -> None:
            try:
                dist.send_object_list([value], to, world.group, world.device)
            except Exception as error:  # a user's object can't be pickled, so nothing was sent
                if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):  # of the connection
                    raise
                self._say(f"what the model was given can't be sent to another rank ({error!r})")
                dist.send_object_list([()], to, world.group, world.device)

        if world.rank % 2 == 0:
            send()
        dist.recv_object_list(received, source, world.group, world.device)
        if world.rank % 2:
            send()
        return received[0]

    # -- the update ----------------------------------------------------------------------------------------

    def _expected_update(self, optimizer: torch.optim.Optimizer) -> Checksums:
        """Return the checksums of the values that the step will write, computed on copies per parameter."""
        if needs_whole_matrices(optimizer):
            return Checksums()
        if not self._can_repeat_step:  # `step` may step another optimizer, or use all parameters together
            self._say(f"the update of {type(optimizer).__name__}, which isn't one of torch.optim's by one parameter")
            return Checksums()
        found, streams = Checksums(), capture_rng_states()
        try:
            for name, parameter, group in self._named(optimizer):
                if parameter.grad is not None:
                    twin = _twin(optimizer, parameter, group)
                    held = _held(name, twin.param_groups[0]["params"][0], twin)
                    found.update({each: checksum(tensor) for each, tensor in held})
        except Exception as error:  # a foreign optimizer's
            self._say(f"an update of {type(optimizer).__name__} can't be computed for one parameter alone ({error!r})")
            return Checksums()
        finally:
            restore_rng_states(streams)
        return found

    def _named(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Iterate over the parameters of ``optimizer`` with their names and groups."""
        places = ((parameter, group) for group in optimizer.param_groups for parameter in group["params"])
        for number, (parameter, group) in enumerate(places):
            yield self._names.get(id(parameter), f"parameter {number}{self._owner}"), parameter, group

    # -- the verdict ---------------------------------------------------------------------------------------

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            text = f"The hardware check leaves something out: {what}, on rank {self._world.rank}."
            warnings.warn(text, HardwareWarning, stacklevel=4)

    def _agree(self) -> None:
        """Raise or warn on the findings of any rank; a collective.

        Raises:
            HardwareError: on every rank.
        """
        found, world = self._findings, self._world
        self._findings = []
        if not any(max_over_ranks(world, len(found))):
            return
        found = gather_object(found, world=world)
        proven = self._faults(found)
        for each in found:
            if each not in proven:
                self._said.add(each.what)
        if not proven:
            if world.is_main:
                self._say(f"{found[0].what} from the start, {len(found)} in all: the program's own doing")
            return
        step = self._prepared.num_updates + (self._prepared.scaler is not None)
        text = f"Hardware computes or remembers wrong, found at update {step}: {_verdict(proven)}. {_ADVICE}"
        if self._action == "raise":
            self._disarm()
            self._written = {}
            raise HardwareError(text)
        if world.is_main:
            warnings.warn(text, HardwareWarning, stacklevel=4)

    def _faults(self, found: Sequence[_Finding]) -> list[_Finding]:
        """Return the findings that the program can't explain: equal before, or on a minority of ranks only."""
        ranks: dict[str, set[int]] = defaultdict(set)
        for each in found:
            ranks[each.what].add(each.ranks[0])

        def is_alone(each: _Finding) -> bool:  # not of neighbours, which may be other hardware
            return len(each.ranks) == 1 and 2 * len(ranks[each.what]) < self._world.size

        return [each for each in found if each.is_proven or is_alone(each)]


_ADVICE: Final = (
    "Take that machine out, and resume from a checkpoint older than the last check. (A program that changes "
    "parameters through `.data`, or a model with state outside of Python, looks the same.)"
)


def _verdict(found: Sequence[_Finding]) -> str:
    """Format the faulty ranks, and the first tensor with a proven error."""
    alone = [each for each in found if len(each.ranks) == 1]
    local = [each for each in alone if each.what.endswith((_MEMORY, _UPDATE))]
    if local:  # results without collectives; if a shard changed, the passes of all ranks differ
        chosen, is_sure = local, True
        ranks = sorted({each.ranks[0] for each in local})
    elif alone:  # the first one is the cause: gathered weights and shared statistics spread it to other ranks
        first = min(each.place for each in alone)
        ranks = sorted({each.ranks[0] for each in alone if each.place == first})
        chosen, is_sure = [each for each in alone if each.ranks[0] in ranks], len(ranks) == 1
    else:  # pairs of neighbours, one of which is wrong: the rank that is in all pairs, if there is one
        pairs = [set(each.ranks) for each in found]
        ranks = sorted(set.intersection(*pairs) or set.union(*pairs))
        chosen, is_sure = found, len(ranks) == 1
    count = len({each.what for each in chosen})
    more = f" (and {count - 1} more)" if count > 1 else ""
    return f"{'' if is_sure else 'one of '}{some_ranks(ranks)}: {chosen[0].what}{more}"


def _held(name: str, parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over this rank's part of ``parameter`` and of its optimizer state, by name."""
    tensors = {name: parameter}
    for key, value in (optimizer.state.get(parameter) or {}).items():
        if isinstance(value, torch.Tensor):
            tensors[f"the optimizer's {key!r} of {name}"] = value
    return ((each, local_tensor(tensor.detach())) for each, tensor in tensors.items() if has_bits(tensor))


def _twin(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer like ``optimizer`` that has updated a copy of ``parameter`` alone."""
    own = parameter.detach().clone().requires_grad_(parameter.requires_grad)
    own.grad = None if parameter.grad is None else parameter.grad.detach().clone()
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [{**group, "params": [own]}]
    twin.state = defaultdict(dict)
    if parameter in optimizer.state:
        twin.state[own] = {
            key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in optimizer.state[parameter].items()
        }
    set_step_hooks(twin, {}, {})
    type(twin).step(twin)  # a scheduler may have replaced the instance's method by one of the original
    return twin


def _on(device: torch.device, forward: Forward) -> Forward:
    """Return ``forward`` with its tensors on ``device``, and its buffers in host memory."""
    moved = recursively_apply(
        lambda tensor: tensor.to(device), {"args": forward.args, "kwargs": forward.kwargs, "of": forward.gradients}
    )
    buffers = {name: buffer.cpu() for name, buffer in forward.buffers.items()}
    return replace(
        forward,
        versions=[],
        state=None,
        args=moved["args"],
        kwargs=moved["kwargs"],
        gradients=moved["of"],
        buffers=buffers,
    )
