"""Record the passes through a model in one micro-batch, and recompute them.

A pass recomputed from the same inputs, buffers and random numbers, with the same gradients of its outputs, gives the
same bits. The user's code computes the loss; only its gradient with respect to the outputs is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeAlias, final
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from ...distributed.random import capture_rng_states, restore_rng_states
from ...nested import recursively_apply
from ...torch_private.distributed import find_tensors
from ...torch_private.modules import current_backward, num_changes
from ...training.accumulation import GradientState
from .python_state import PythonState
from .replica_check import checksum, has_bits

#: Name of a result (an output, a gradient) -> its checksum, of shape [].
Checksums: TypeAlias = dict[str, torch.Tensor]


@final
@dataclass
class Forward:
    """One call of the model, with all data that an identical call needs.

    Attributes:
        number: the number of the call, among the calls with graphs.
        versions: the inputs, with the number of in-place changes of each.
        buffers: the buffers before the call, by name.
        state: the Python state before the call; None for another rank's call, which starts from the initial state.
        gradients: backward pass -> number of an output -> the gradient of that output.
    """

    number: int
    versions: list[tuple[torch.Tensor, int]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    streams: Mapping[str, Any]
    buffers: dict[str, torch.Tensor]
    autocast: tuple[bool, torch.dtype]
    state: PythonState | None
    gradients: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)


@final
class PassRecorder:
    """A recorder of the passes through ``model`` while it is armed.

    Args:
        label: text after the names of tensors ("" or "of model 1").
        window: tells whether a micro-batch completes an update; only such micro-batches are recorded.
        device: the device whose autocast state is restored.
    """

    def __init__(self, model: nn.Module, label: str, window: GradientState, device: torch.device) -> None:
        self.model = model
        self.label: str = label
        self._window, self._device = window, device
        self._is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        #: Whether a pass is a collective.
        self.has_collectives: bool = self._is_sharded or any(
            isinstance(each, nn.SyncBatchNorm) for each in model.modules()
        )
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[int, RemovableHandle] = {}  # by parameter, from a forward to the update only
        # By number, and referenced only by the graph, so that a forward without backward (evaluation) is freed with it.
        self._forwards: WeakValueDictionary[int, Forward] = WeakValueDictionary()
        self._used: list[Forward] = []  # a backward pass went through them
        self._outputs: dict[int, Checksums] = {}  # by number of the forward
        self._gradients: dict[int, Checksums] = {}  # by number of the backward pass
        self._running: Forward | None = None
        self._number: int | None = None  # of the forward that runs or is recomputed
        self._num_step_calls = 0  # at the start of the newest forward
        self._is_replay = False
        self._weights: list[tuple[str, torch.Tensor, int, int]] = []  # with their versions and addresses at the start
        self._at_start = PythonState(model).without_tensors()
        #: The object that can't be restored after a pass is recomputed; "" if there is none.
        self.obstacle: str = self._at_start.obstacle
        #: Whether Python state has changed since the check began, so that it may differ between ranks.
        self.keeps_state: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> PassRecorder:
        """Return the same object, because a copy of the model isn't recorded."""
        return self

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a recorder that records nothing, because a loaded pickle isn't checked."""
        return {
            **vars(self), "_is_replay": True, "_running": None, "_number": None, "_forwards": {}, "_used": [],
            "_outputs": {}, "_gradients": {}, "_weights": [], "_at_start": None,
        }  # fmt: skip

    # -- recording -----------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Start to record; the model has hooks only until :meth:`disarm`."""
        if self._handles:
            return
        add, model = self._handles.append, self.model
        units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        add(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        for name, module in model.named_modules():
            if next(module.children(), None) is None:
                what = f"the output of `{name}`" if name else "the output"
                add(module.register_forward_hook(partial(self._note_output, what)))
            if name in units:
                add(module.register_forward_pre_hook(partial(self._hook_parameters, name)))
        add(model.register_forward_hook(self._end))

    def disarm(self) -> None:
        """Remove all hooks, and discard the records."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def clear(self) -> None:
        """Discard the records, because the parameters have changed."""
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        for forward in self._used:  # a graph that is still referenced, as by an output in an attribute, refers to them
            forward.state = None
        self._forwards.clear()
        self._used.clear()
        self._running = self._number = None
        self._outputs.clear()
        self._gradients.clear()

    def _hook_parameters(self, prefix: str, module: nn.Module, *_: object) -> None:
        """Add hooks to the parameters of ``module`` that are whole now, for the gradients of this rank's samples."""
        if self._number is None and not self._is_replay:
            return
        for own, parameter in module.named_parameters():
            if not parameter.requires_grad or id(parameter) in self._hooked or isinstance(parameter, DTensor):
                continue
            name = f"the gradient of `{f'{prefix}.{own}' if prefix else own}`"
            self._hooked[id(parameter)] = parameter.register_hook(partial(self._note_gradient, name))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_wanted = module is self.model and torch.is_grad_enabled() and current_backward() == -1
        if self._is_replay or not is_wanted or not self._window.sync_gradients:
            return
        if self._num_step_calls != self._window.num_step_calls and len(self._used) == len(self._forwards):
            self.clear()  # the scaler skipped an update; its passes and their inputs would be kept
        self._num_step_calls = self._window.num_step_calls
        kind = self._device.type
        number = next(each for each in count() if each not in self._forwards)
        self._running = self._forwards[number] = Forward(
            number,
            [(tensor, num_changes(tensor)) for tensor in find_tensors([args, kwargs]) if not tensor.is_inference()],
            recursively_apply(_as_given, args),
            recursively_apply(_as_given, kwargs),
            capture_rng_states(),
            {name: buffer.detach().clone() for name, buffer in module.named_buffers()},
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            state := PythonState(module),
        )
        if state.obstacle:
            self.obstacle = f"{state.obstacle}, came into the model, and its state can't be put back"
        self.keeps_state = self.keeps_state or state.differs(self._at_start)
        if not self._is_sharded:
            self._weights = [(*each, num_changes(each[1]), each[1].data_ptr()) for each in module.named_parameters()]
        self._number, self._outputs[number] = number, Checksums()
        self._hook_parameters("", module)

    def _end(self, _: nn.Module, __: object, output: object) -> None:
        forward = self._running
        if self._is_replay or forward is None:
            return
        self._running = self._number = None
        changed = [name for name, each, *was in self._weights if was != [num_changes(each), each.data_ptr()]]
        if changed:
            self.obstacle = f"`{changed[0]}`, a parameter, is changed in forward"
        self._weights = []
        for place, tensor in enumerate(find_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._keep_gradient, forward, place))

    def _note_output(self, name: str, _: nn.Module, __: object, output: object) -> None:
        if self._number is None or current_backward() != -1:  # a backward runs: activation checkpointing recomputes
            return
        _note(self._outputs.setdefault(self._number, {}), name, find_tensors(output))

    def _keep_gradient(self, forward: Forward, place: int, gradient: torch.Tensor) -> None:
        if self._forwards.get(forward.number) is not forward:  # it belongs to an earlier update
            return
        if not forward.gradients:
            self._used.append(forward)
        forward.gradients.setdefault(current_backward(), {})[place] = gradient.detach()
        self._note_gradient(_output_gradient(forward.number, place), gradient)

    def _note_gradient(self, name: str, gradient: torch.Tensor) -> None:
        _note(self._gradients.setdefault(current_backward(), {}), name, [gradient])

    # -- computing again -----------------------------------------------------------------------------------

    @property
    def forwards(self) -> Sequence[Forward]:
        """The calls reached by a backward pass; empty if they can't be recomputed.

        They can't if an input was changed in place, or if state can't be restored.
        """
        is_same = not self.obstacle and all(
            num_changes(tensor) == version for each in self._used for tensor, version in each.versions
        )
        return [each for each in self._forwards.values() if each.gradients] if is_same else []

    def recorded(self) -> Checksums:
        """Return the checksums of all tensors computed in the passes of :attr:`forwards`."""
        return self._named(_backward_numbers(self._used), self._outputs, self._gradients)

    def replay(self, forwards: Sequence[Forward]) -> Checksums:
        """Recompute ``forwards`` and their backward passes; return the checksums of the results.

        A collective if the model is under ``fully_shard``. Gradients, buffers, Python state and random states don't
        change.
        """
        state = PythonState(self.model)
        kept = self._outputs, self._gradients, capture_rng_states()
        held = [(parameter, parameter.grad) for parameter in self.model.parameters()] if self._is_sharded else []
        self._outputs, self._gradients, self._is_replay = {}, {}, True
        numbers = _backward_numbers(forwards)
        try:
            for parameter, _ in held:
                parameter.grad = None
            with torch.enable_grad():
                done = self._compute(forwards, numbers)
            return self._named(numbers, self._outputs, {old: self._gradients.get(new, {}) for old, new in done.items()})
        finally:
            self._outputs, self._gradients, streams = kept
            self._is_replay, self._number = False, None
            state.put_back()
            restore_rng_states(streams)
            for parameter, gradient in held:
                parameter.grad = gradient

    def _compute(self, forwards: Sequence[Forward], numbers: Sequence[int]) -> dict[int, int]:
        """Run the passes in order; return the new number of each backward pass by its old one."""
        outputs: list[list[torch.Tensor]] = []
        done: dict[int, int] = {}
        for number in numbers:
            last = max(place for place, forward in enumerate(forwards) if number in forward.gradients)
            while len(outputs) <= last:
                forward = forwards[len(outputs)]
                self._number = forward.number
                outputs.append(self._forward(forward))
                self._number = None
            given = [
                (place, at, gradient)
                for place, forward in enumerate(forwards)
                for at, gradient in forward.gradients.get(number, {}).items()
                if at < len(outputs[place]) and outputs[place][at].requires_grad
            ]
            if given:
                done[number] = self._backward([outputs[place][at] for place, at, _ in given], [one[2] for one in given])
                for place, at, gradient in given:
                    _note(self._gradients[done[number]], _output_gradient(forwards[place].number, at), [gradient])
        return done

    def _forward(self, forward: Forward) -> list[torch.Tensor]:
        if forward.state is not None:
            forward.state.put_back()
        restore_rng_states(forward.streams)
        enabled, dtype = forward.autocast
        # Copies replace the buffers, because graphs may refer to these.
        own = dict(self.model.named_buffers())
        buffers = {name: value.to(own[name].device, copy=True) for name, value in forward.buffers.items()}
        with torch.autocast(self._device.type, dtype, enabled):
            found = functional_call(self.model, buffers, forward.args, forward.kwargs, tie_weights=False)
        return list(find_tensors(found))

    def _backward(self, outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> int:
        number: list[int] = []
        outputs[0].register_hook(lambda _: number.append(current_backward()))
        if self._is_sharded:
            torch.autograd.backward(outputs, gradients, retain_graph=True)
        else:  # don't accumulate, so that no hook reduces the gradients
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            torch.autograd.grad(outputs, trained, gradients, retain_graph=True, allow_unused=True)
        self._gradients.setdefault(number[0], {})
        return number[0]

    def _named(
        self, numbers: Sequence[int], outputs: Mapping[int, Checksums], gradients: Mapping[int, Checksums]
    ) -> Checksums:
        found = Checksums()
        in_order = {place: gradients[number] for place, number in enumerate(numbers) if number in gradients}
        for kind, each in (("call", outputs), ("backward pass", in_order)):
            for number, sums in sorted(each.items()):
                where = f" in {kind} {number}" if number else ""
                found.update({f"{name}{self.label}{where}": value for name, value in sums.items()})
        return found


def _as_given(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` detached; a copy if it was created in inference mode, which counts no in-place changes."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _output_gradient(number: int, place: int) -> str:
    return f"the gradient of output {place}{f' of call {number}' if number else ''}"


def _backward_numbers(forwards: Sequence[Forward]) -> list[int]:
    """Return the numbers of the backward passes through ``forwards``, in order."""
    return sorted({number for forward in forwards for number in forward.gradients})


def _note(sums: Checksums, name: str, tensors: Any) -> None:
    for tensor in tensors:
        if has_bits(tensor) and tensor.numel():
            again = sum(key == name or key.startswith(f"{name} (") for key in sums)
            sums[f"{name} ({again + 1})" if again else name] = checksum(tensor)
