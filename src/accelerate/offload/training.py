"""Training with less on the device: optimizer state that waits in host memory, activations that do.

Both change where values lie, never what they are: a run with them equals the run without, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any, Final, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..devices import CPU, kind_of
from ..errors import SettingError
from ..torch_private.optim import set_step_hooks, step_hooks

#: State that is on the device at once while the optimizer steps, beside what follows next.
CHUNK_BYTES: Final = 256 << 20
#: Smaller activations stay: moving them takes longer than it frees.
SMALLEST_ACTIVATION_BYTES: Final = 1 << 20
_MARK: Final = "_offloads_activations"


def offload_optimizer(optimizer: torch.optim.Optimizer, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """The optimizer's state waits in host memory, and is on the device in chunks while ``step()`` uses it.

    The next chunk is copied while one is in use, so two are there at a time. For optimizers that treat each parameter
    by itself, as all of torch's do but LBFGS. Call it after ``prepare``. Where parameters are in host memory nothing
    changes.

    Raises:
        SettingError: parameters are sharded (their strategy offloads them), or the optimizer needs all of them at once.
    """
    inner: Any = optimizer
    while not isinstance(inner.__dict__.get("param_groups"), list) and isinstance(
        getattr(inner, "optimizer", None), torch.optim.Optimizer
    ):
        inner = inner.optimizer
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    if isinstance(inner, torch.optim.LBFGS):
        raise SettingError(
            "offload_optimizer: LBFGS needs the state of all parameters at once, so it can't wait apart."
        )
    if any(type(parameter.data).__name__ == "DTensor" for parameter in parameters):
        raise SettingError(
            "offload_optimizer: the parameters are sharded. Use FullyShardedDataParallelPlugin(cpu_offload=True), "
            "which keeps parameters, gradients and state in host memory."
        )
    devices = {parameter.device for parameter in parameters}
    if any(device.type != CPU.name for device in devices):
        _WaitingState(inner, _Courier(max(devices, key=str)), chunk_bytes)


def offload_activations(*modules: nn.Module, smallest_bytes: int = SMALLEST_ACTIVATION_BYTES) -> None:
    """What the modules keep for their backward pass waits in host memory; weights and what is small stay.

    Names and classes of the modules stay: only the instances' ``forward`` changes.
    """
    for module in modules:
        if not module.__dict__.get(_MARK, False):
            module.forward = _offloading(module, module.forward, smallest_bytes)
            module.__dict__[_MARK] = True


# ---------------------------------------------------------------------------------------------- activations


def _offloading(module: nn.Module, original: Callable[..., Any], smallest_bytes: int) -> Callable[..., Any]:
    is_method = isinstance(original, MethodType)
    function: Any = original.__func__ if is_method else original

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        owner = args[0] if is_method else module  # a copy of the module has parameters of its own
        kept = {parameter.untyped_storage().data_ptr() for parameter in owner.parameters()}

        def pack(tensor: torch.Tensor) -> Any:
            if not _is_worth_moving(tensor, smallest_bytes) or tensor.untyped_storage().data_ptr() in kept:
                return tensor
            return tensor.device, _to_host(tensor)

        with saved_tensors_hooks(pack, _unpacked):
            return function(*args, **kwargs)

    return MethodType(forward, module) if is_method else forward


def _is_worth_moving(tensor: torch.Tensor, smallest_bytes: int) -> bool:
    is_away = tensor.device.type not in (CPU.name, "meta")
    return is_away and tensor.numel() * tensor.element_size() >= smallest_bytes and tensor.layout is torch.strided


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # Queued behind what computes the tensor, and before whatever its memory is used for next.
    waiting = torch.empty_like(tensor, device=CPU.name, pin_memory=tensor.device.type != CPU.name)
    return waiting.copy_(tensor, non_blocking=True)


def _unpacked(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, waiting = packed
    return waiting.to(device, non_blocking=True)


# --------------------------------------------------------------------------------------------------- state


@final
class _Courier:
    """Copies between a device and page-locked host memory, on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = kind_of(device)
        self._stream = self._kind.side_stream(device)
        self._sent: Any = None  # the event after what was brought last

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, for work that is queued after ``arrived``."""
        with self._kind.in_stream(self._stream):
            coming = tensor.to(self._device, non_blocking=True)
        self._sent = self._stream.record_event()
        return coming

    def arrived(self, tensors: list[torch.Tensor]) -> None:
        """What was brought can be used by work that is queued from now on."""
        current = self._kind.current_stream(self._device)
        if tensors:
            current.wait_event(self._sent)  # not for what leaves at the same time
        for tensor in tensors:
            tensor.record_stream(current)

    def take(self, tensor: torch.Tensor, waiting: torch.Tensor | None) -> torch.Tensor:
        """The tensor in host memory (in ``waiting`` where that fits), once everything queued for it has happened."""
        if waiting is None or waiting.shape != tensor.shape or waiting.dtype != tensor.dtype:
            waiting = torch.empty_like(tensor, device=CPU.name, pin_memory=True)
        if tensor.device.type == CPU.name:  # as it was loaded
            return waiting.copy_(tensor)
        self._stream.wait_stream(self._kind.current_stream(self._device))
        with self._kind.in_stream(self._stream):
            waiting.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return waiting

    def finish(self) -> None:
        """Nothing is on its way any more."""
        self._stream.synchronize()


@final
class _WaitingState:
    """An optimizer whose ``step`` fetches its state chunk by chunk."""

    def __init__(self, optimizer: torch.optim.Optimizer, courier: Any, chunk_bytes: int) -> None:
        self._optimizer, self._courier, self._chunk_bytes = optimizer, courier, chunk_bytes
        self._inner_step: Callable[..., Any] = optimizer.step
        self._waiting: dict[tuple[int, str], torch.Tensor] = {}

        @wraps(optimizer.step)
        def step(_: Any, closure: Callable[[], Any] | None = None) -> Any:
            return self._step(closure)

        # A method, as a learning rate schedule expects that wraps it.
        optimizer.step = MethodType(step, optimizer)
        optimizer.register_state_dict_pre_hook(lambda _: courier.finish())
        optimizer.register_load_state_dict_post_hook(lambda _: self._send_away(self._with_state()))
        self._send_away(self._with_state())
        courier.finish()

    def _with_state(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:  # it makes the gradients, once for all chunks
            with torch.enable_grad():
                loss = closure()
        chunks = list(self._chunks())
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        before, after = step_hooks(self._optimizer)
        coming = self._bring(chunks[0]) if chunks else []
        try:
            for index, chunk in enumerate(chunks):
                self._courier.arrived(coming)
                coming = self._bring(chunks[index + 1]) if index + 1 < len(chunks) else []
                inside = set(map(id, chunk))
                for group, parameters in zip(groups, whole, strict=True):
                    group["params"] = [parameter for parameter in parameters if id(parameter) in inside]
                # What others hooked to a step happens once: before the first chunk, and after the last.
                set_step_hooks(
                    self._optimizer,
                    before if index == 0 else OrderedDict(),
                    after if index + 1 == len(chunks) else OrderedDict(),
                )
                self._inner_step()
                self._send_away(chunk)
        finally:
            set_step_hooks(self._optimizer, before, after)
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        return loss

    def _chunks(self) -> Iterator[list[torch.Tensor]]:
        """Parameters with gradients, as many together as their state (two values a number) may take."""
        chunk, num_bytes = [], 0
        for parameter in self._with_state():
            if parameter.grad is None:
                continue
            size = 2 * parameter.numel() * parameter.element_size()
            if chunk and num_bytes + size > self._chunk_bytes:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(parameter)
            num_bytes += size
        if chunk:
            yield chunk

    def _bring(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        brought = []
        for parameter in parameters:
            state = self._optimizer.state.get(parameter) or {}
            for name, value in state.items():
                if (id(parameter), name) in self._waiting and isinstance(value, torch.Tensor):
                    state[name] = self._courier.bring(value)
                    brought.append(state[name])
        return brought

    def _send_away(self, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            state = self._optimizer.state.get(parameter) or {}
            for name, value in state.items():
                # Counters that torch keeps in host memory, and the few numbers of others, aren't worth a journey.
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    key = id(parameter), name
                    self._waiting[key] = state[name] = self._courier.take(value, self._waiting.get(key))
