"""Training with less device memory: optimizer state and activations in host memory. Internal.

Results are bit for bit the same as without offloading.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any, Final, TypeVar, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..devices.table import CPU, kind_of
from ..errors import SettingError
from ..modules import is_sharded
from ..torch_private.modules import set_step_hooks, step_hooks

#: The bytes of optimizer state on the device during a step, without the prefetched chunk.
CHUNK_BYTES: Final = 256 << 20
#: Smaller activations stay on the device, because a copy costs more than it saves.
MIN_ACTIVATION_BYTES: Final = 1 << 20
_MARK: Final = "_offloads_activations"

T = TypeVar("T")
#: What the backward pass saves: the tensor, or its device and its copy in host memory.
Packed = torch.Tensor | tuple[torch.device, torch.Tensor]


def offload_optimizer(optimizer: torch.optim.Optimizer, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Keep the optimizer's state in host memory, and copy it to the device in chunks during ``step()``.

    The next chunk is copied while one is in use, so the device holds two at a time. The optimizer must update each
    parameter separately, as all of torch's do except LBFGS. Call this after ``prepare``. It has no effect on parameters
    in host memory.

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
            "offload_optimizer: LBFGS needs the state of all parameters at once, so it can't be offloaded."
        )
    if any(map(is_sharded, parameters)):
        raise SettingError(
            "offload_optimizer: the parameters are sharded. Use FullyShardedDataParallelPlugin(cpu_offload=True), "
            "which keeps parameters, gradients and state in host memory."
        )
    devices = {parameter.device for parameter in parameters}
    if any(device.type != CPU.name for device in devices):
        _OffloadedState(inner, _OffloadStream(max(devices, key=str)), chunk_bytes)


def offload_activations(*modules: nn.Module, smallest_bytes: int = MIN_ACTIVATION_BYTES) -> None:
    """Keep tensors saved for the backward pass in host memory, except weights and small tensors.

    Names and classes of the modules don't change; only the instances' ``forward`` does.
    """
    for module in modules:
        if not module.__dict__.get(_MARK, False):
            module.forward = _offloading(module, module.forward, smallest_bytes)
            module.__dict__[_MARK] = True


# ---------------------------------------------------------------------------------- activation offloading


def _offloading(module: nn.Module, original: Callable[..., T], smallest_bytes: int) -> Callable[..., T]:
    is_method = isinstance(original, MethodType)
    function: Callable[..., T] = original.__func__ if is_method else original

    @wraps(function)
    def forward(*args: Any, **kwargs: object) -> T:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        owner = args[0] if is_method else module  # a copy of the module has parameters of its own
        kept = {parameter.untyped_storage().data_ptr() for parameter in owner.parameters()}

        def pack(tensor: torch.Tensor) -> Packed:
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
    # Queued after the computation of the tensor, and before the next use of its memory.
    on_host = torch.empty_like(tensor, device=CPU.name, pin_memory=tensor.device.type != CPU.name)
    return on_host.copy_(tensor, non_blocking=True)


def _unpacked(packed: Packed) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, on_host = packed
    return on_host.to(device, non_blocking=True)


# ------------------------------------------------------------------------------ optimizer state offloading


@final
class _OffloadStream:
    """A side stream that copies between a device and pinned host memory during computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kind = kind_of(device)
        self._stream = self._kind.side_stream(device)
        self._sent: Any = None  # the event after the last copy to the device

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start to copy a tensor to the device; return it for use after ``wait``."""
        with self._kind.in_stream(self._stream):
            fetched = tensor.to(self._device, non_blocking=True)
        self._sent = self._stream.record_event()
        return fetched

    def wait(self, tensors: list[torch.Tensor]) -> None:
        """Make the current stream wait until these tensors are on the device."""
        current = self._kind.current_stream(self._device)
        if tensors:
            current.wait_event(self._sent)  # don't wait for concurrent copies to the host
        for tensor in tensors:
            tensor.record_stream(current)

    def to_host(self, tensor: torch.Tensor, on_host: torch.Tensor | None) -> torch.Tensor:
        """Start to copy a tensor to host memory (into ``on_host`` if it fits), after its queued operations."""
        if on_host is None or on_host.shape != tensor.shape or on_host.dtype != tensor.dtype:
            on_host = torch.empty_like(tensor, device=CPU.name, pin_memory=True)
        if tensor.device.type == CPU.name:  # as it was loaded
            return on_host.copy_(tensor)
        self._stream.wait_stream(self._kind.current_stream(self._device))
        with self._kind.in_stream(self._stream):
            on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return on_host

    def synchronize(self) -> None:
        """Wait until all copies are complete."""
        self._stream.synchronize()


@final
class _OffloadedState:
    """An optimizer's state in host memory, and a ``step`` that fetches it chunk by chunk."""

    def __init__(self, optimizer: torch.optim.Optimizer, offload_stream: _OffloadStream, chunk_bytes: int) -> None:
        self._optimizer, self._offload_stream, self._chunk_bytes = optimizer, offload_stream, chunk_bytes
        self._inner_step: Callable[..., object] = optimizer.step
        self._on_host: dict[tuple[int, str], torch.Tensor] = {}

        @wraps(optimizer.step)
        def step(_: object, closure: Callable[[], T] | None = None) -> T | None:
            return self._step(closure)

        # A method, because learning rate schedulers wrap it as one.
        optimizer.step = MethodType(step, optimizer)
        optimizer.register_state_dict_pre_hook(lambda _: offload_stream.synchronize())
        optimizer.register_load_state_dict_post_hook(lambda _: self._offload(self._parameters()))
        self._offload(self._parameters())
        offload_stream.synchronize()

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _step(self, closure: Callable[[], T] | None) -> T | None:
        loss = None
        if closure is not None:  # it computes the gradients, once for all chunks
            with torch.enable_grad():
                loss = closure()
        chunks = list(self._chunks())
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        before, after = step_hooks(self._optimizer)
        fetched = self._fetch(chunks[0]) if chunks else []
        try:
            for index, chunk in enumerate(chunks):
                self._offload_stream.wait(fetched)
                fetched = self._fetch(chunks[index + 1]) if index + 1 < len(chunks) else []
                inside = set(map(id, chunk))
                for group, parameters in zip(groups, whole, strict=True):
                    group["params"] = [parameter for parameter in parameters if id(parameter) in inside]
                # Other step hooks run once: before the first chunk, and after the last.
                set_step_hooks(
                    self._optimizer,
                    before if index == 0 else OrderedDict(),
                    after if index + 1 == len(chunks) else OrderedDict(),
                )
                self._inner_step()
                self._offload(chunk)
        finally:
            set_step_hooks(self._optimizer, before, after)
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        return loss

    def _chunks(self) -> Iterator[list[torch.Tensor]]:
        """Yield parameters with gradients in chunks whose state (two values per element) fits into ``chunk_bytes``."""
        chunk, num_bytes = [], 0
        for parameter in self._parameters():
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

    def _fetch(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        fetched = []
        for parameter in parameters:
            state = self._optimizer.state.get(parameter) or {}
            for name, value in state.items():
                if (id(parameter), name) in self._on_host and isinstance(value, torch.Tensor):
                    state[name] = self._offload_stream.to_device(value)
                    fetched.append(state[name])
        return fetched

    def _offload(self, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            state = self._optimizer.state.get(parameter) or {}
            for name, value in state.items():
                # Don't copy counters, which torch keeps in host memory, nor other small tensors.
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    key = id(parameter), name
                    self._on_host[key] = state[name] = self._offload_stream.to_host(value, self._on_host.get(key))
