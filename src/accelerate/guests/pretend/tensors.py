"""Tensors without values: parameters, and all tensors computed from them, take no memory.

Parameters become fake tensors when a module registers them. Data, samplers and random generators stay real, so that the
script reads its actual samples. A number that the script reads from a result of the model is a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, final
from unittest.mock import patch

import torch
from torch import nn

from ...torch_private.modules import draws_numbers
from ...torch_private.tracing import (
    Operator,
    TorchDispatchMode,
    data_dependent_errors,
    fake_tensor_class,
    fake_tensor_mode,
    is_number_read,
    operator_name,
    returns_tensor,
    tree_leaves,
    tree_map,
)
from .communication import answer

if TYPE_CHECKING:
    from .run import PretendedRun

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

#: The replacement of every floating-point value (others are 0), chosen so that division and logarithm work.
VALUE: Final = 1.0
#: Operators that fill a tensor in order, so that parts draw the same numbers. torch fills 16 numbers at a time.
_IN_PARTS: Final = frozenset({"normal_", "uniform_"})
_PART: Final = 1 << 20


@final
class ValuelessMode(TorchDispatchMode):
    """A dispatch mode in which operations on parameters, and inside a model, return fake tensors; ``run`` is told."""

    def __init__(self, run: PretendedRun) -> None:
        super().__init__()
        self.fake = fake_tensor_mode()
        self._run = run
        self._fake_tensor = fake_tensor_class()
        self._depth = 0  # of calls inside of which new tensors have no values either
        self._errors = data_dependent_errors()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, with or without values, and tell the run of it."""
        is_fake = self._fake_tensor in types
        if any(kind not in (torch.Tensor, nn.Parameter, self._fake_tensor) for kind in types):
            return NotImplemented  # a DTensor: its operations on local tensors come here
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._run.collective(func, args)
            return answer(func, args)
        if func.namespace == "_c10d_functional":
            self._run.collective(func, args)
        # torch also reports classes of tensors with values: for `data` of a parameter; in 2.6 for any `detach`.
        if not is_fake and not (self._depth and returns_tensor(func) and not _has_tensors(args)):
            return func(*args, **kwargs)
        try:
            with self.fake:
                result = func(*args, **kwargs)
            draws = draws_numbers(func, args, kwargs)
            if not is_fake and (not result.is_floating_point() or (draws and result.numel() == 1)):
                return func(*args, **kwargs)  # positions, masks, and numbers used in decisions keep their values
            if draws:
                self._run.drawn(func)
                _draw(func, args, kwargs)
        except self._errors:
            if not is_number_read(func):
                raise
            return _value_of(args[0].dtype)
        self._run.memory.made(func, args, kwargs, result)
        return result

    def _valueless(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter without values for this one; always the same object for the same parameter."""
        found: nn.Parameter | None = getattr(parameter, "_without_values", None)
        if found is None:
            with self.fake:
                like = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
                )
            found = nn.Parameter(like, requires_grad=parameter.requires_grad)
            vars(found).update(vars(parameter))
            parameter._without_values = found  # pyright: ignore[reportAttributeAccessIssue]
        return found

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        depth, self._depth = self._depth, 0
        try:
            like = torch.full(tuple(tensor.shape), _value_of(tensor.dtype), dtype=tensor.dtype)
        finally:
            self._depth = depth
        return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Enter a context in which all tensors are created without values."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def calling(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Return ``function`` wrapped to run inside :meth:`inside`."""

        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with self.inside():
                return function(*args, **kwargs)

        return call

    @contextmanager
    def around_script(self) -> Iterator[None]:
        """Enter the mode; modules' parameters, forwards and backwards then have no values."""
        register, fake_tensor = nn.Module.register_parameter, fake_tensor_class()

        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(module, name, self._valueless(param) if type(param) is nn.Parameter else param)

        with ExitStack() as held:
            for owner, name, value in (
                (nn.Module, "register_parameter", register_parameter),
                (nn.Module, "_apply", _apply),
                (nn.Module, "__call__", self.calling(nn.Module.__call__)),
                (torch.autograd, "backward", self.calling(torch.autograd.backward)),
                (torch.autograd, "grad", self.calling(torch.autograd.grad)),
                (fake_tensor, "numpy", lambda tensor, *, force=False: self._real(tensor).numpy()),
                (fake_tensor, "__deepcopy__", _copied),
                (fake_tensor, "__reduce_ex__", lambda tensor, protocol: self._real(tensor).__reduce_ex__(protocol)),
                (fake_tensor, "__format__", lambda tensor, spec: format(_readable(tensor), spec)),
            ):
                held.enter_context(patch.object(owner, name, value))
            # Compiled code can't run without values: updates of torchao's optimizers, or code that the script compiles.
            held.enter_context(torch.compiler.set_stance("force_eager"))
            held.enter_context(self)
            yield


def _has_tensors(args: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))


def _apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Apply the function to the parameters in place, because torch would swap fake ones, which allow no references."""
    fake_tensor = fake_tensor_class()
    own = {name: each for name, each in module._parameters.items() if isinstance(each, fake_tensor)}
    for name in own:
        module._parameters[name] = None
    try:
        _APPLY(module, function, recurse)
    finally:
        module._parameters.update(own)
    for name, parameter in own.items():
        with torch.no_grad():
            applied = function(parameter)
        if applied is parameter:
            continue
        if applied.device == parameter.device:
            parameter.data = applied
        else:
            module._parameters[name] = nn.Parameter(applied, requires_grad=parameter.requires_grad)
    return module


_APPLY: Final[Any] = nn.Module._apply


def _draw(func: Operator, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Draw the same random numbers as the operation does on tensors with values."""
    target = args[0] if args else None
    name = operator_name(func)
    if name in _IN_PARTS and isinstance(target, torch.Tensor) and target.is_contiguous():
        parts = max(target.numel() // _PART, 1)
        sizes = [_PART] * (parts - 1) + [target.numel() - _PART * (parts - 1)]
        for size in sizes:
            func(torch.empty(size, dtype=target.dtype, device=target.device), *args[1:], **kwargs)
        return
    func(*tree_map(_filled, args), **tree_map(_filled, kwargs))


def _filled(value: object) -> object:
    """Return a real tensor in the shape of a fake one; any other object is returned unchanged."""
    if not isinstance(value, fake_tensor_class()):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return like.fill_(_value_of(value.dtype))


def _value_of(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return VALUE
    return False if dtype is torch.bool else 0


def _copied(tensor: torch.Tensor, memo: dict[int, object]) -> object:
    if id(tensor) not in memo:
        like = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
    return memo[id(tensor)]


def _readable(tensor: torch.Tensor) -> object:
    return tensor.item() if math.prod(tensor.shape) == 1 else repr(tensor)
