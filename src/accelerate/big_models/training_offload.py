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

from ..devices.memory import CopyStream
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
        device = max(devices, key=str)
        kind = kind_of(device)
        _OffloadedState(inner, CopyStream(kind, device, kind.side_stream(device)), chunk_bytes)


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
class _OffloadedState:
    """An optimizer's state in host memory, and a ``step`` that fetches it chunk by chunk."""

    def __init__(self, optimizer: torch.optim.Optimizer, copy_stream: CopyStream, chunk_bytes: int) -> None:
        self._optimizer, self._copy_stream, self._chunk_bytes = optimizer, copy_stream, chunk_bytes
        self._inner_step: Callable[..., object] = optimizer.step
        self._on_host: dict[tuple[int, str], torch.Tensor] = {}

        @wraps(optimizer.step)
        def step(_: object, closure: Callable[[], T] | None = None) -> T | None:
            return self._step(closure)

        # A method, because learning rate schedulers wrap it as one.
        optimizer.step = MethodType(step, optimizer)
        optimizer.register_state_dict_pre_hook(lambda _: copy_stream.synchronize())
        optimizer.register_load_state_dict_post_hook(lambda _: self._offload(self._parameters()))
        self._offload(self._parameters())
        copy_stream.synchronize()

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
        sent = self._fetch(chunks[0]) if chunks else None
        try:
            for index, chunk in enumerate(chunks):
                if sent is not None:
                    self._copy_stream.receive(sent)
                sent = self._fetch(chunks[index + 1]) if index + 1 < len(chunks) else None
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

    def _fetch(self, parameters: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Event] | None:
        """Start to copy the state of the parameters to the device; return the copies, or None if it has no state."""
        found = [
            (state, name)
            for parameter in parameters
            for state in [self._optimizer.state.get(parameter) or {}]
            for name, value in state.items()
            if (id(parameter), name) in self._on_host and isinstance(value, torch.Tensor)
        ]
        if not found:  # an event would also wait for concurrent copies to the host
            return None
        sent = self._copy_stream.send([state[name] for state, name in found])
        for (state, name), value in zip(found, sent[0], strict=True):
            state[name] = value
        return sent

    def _offload(self, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            state = self._optimizer.state.get(parameter) or {}
            for name, value in state.items():
                # Don't copy counters, which torch keeps in host memory, nor other small tensors.
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    key = id(parameter), name
                    self._on_host[key] = state[name] = self._copy_stream.to_host(value, self._on_host.get(key))
