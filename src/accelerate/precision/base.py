"""Precisions: the hooks that a precision may override; full and true precision, and mixed precision by autocast."""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper, wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeVar, final

import torch

from ..devices.table import kind_of
from ..errors import SettingError
from ..nested import convert_to_fp32, recursively_apply
from ..torch_private.modules import has_scaled_gradients

if TYPE_CHECKING:
    from ..plugins.handlers import AutocastKwargs

P = ParamSpec("P")
T = TypeVar("T")


class Precision(ABC):  # noqa: B024  (every member has a default)
    """The dtypes in which a model computes. Every hook does nothing unless a precision overrides it."""

    #: The name in the interface: no, fp16, bf16, fp8.
    label: str = "no"
    #: The gradient scaler, if the precision needs one; callers may assign another.
    scaler: torch.amp.GradScaler | None = None
    #: Whether forward passes run under autocast; callers may switch it off.
    is_autocast: bool = False
    #: The AutocastKwargs, if given.
    handler: AutocastKwargs | None = None

    #: One report for each converted model; a precision that converts has its own list.
    reports: Sequence[ConversionReport] = ()
    #: The package that converts, by its name in the interface (AO, TE).
    backend: str | None = None

    def check(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise if the new models and optimizers of one ``prepare`` call have to be converted together and aren't."""

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Convert the modules or weights of ``model`` for this precision; called first in ``place``."""
        return model

    def patch_forward(self, model: torch.nn.Module) -> None:
        """Make ``model.forward`` compute in this precision."""

    def patch_wrapped(self, model: torch.nn.Module) -> None:
        """Make the forward of a wrapped ``model`` (DDP, FSDP) compute in this precision."""

    def restore_forward(self, model: torch.nn.Module) -> None:
        """Undo :meth:`patch_forward`."""

    def follow(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Register the work at each update of prepared ``models``; called last in ``prepare``."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Enter a context in which operations run in this precision."""
        return nullcontext()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, once per accumulation window."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return
        # GradScaler raises on a second unscale_, but a loop may clip twice, or clip two models.
        if has_scaled_gradients(scaler, optimizer):
            scaler.unscale_(optimizer)


@final
class FullPrecision(Precision):
    """The precision of a model that computes in the dtypes of its parameters."""


# --------------------------------------------------------------------------------------------------
# Mixed precision by autocast: fp16 (with a gradient scaler) and bf16


class Autocasting(Precision, ABC):
    """The base of precisions that run forwards under autocast and cast outputs to ``output_dtype``.

    Args:
        label: fp16, or bf16 or fp8, which both compute under autocast in bf16.
        device_type: the device type for autocast (``"cuda"``, ``"cpu"``, ...).
        scaler: the gradient scaler (fp16), or None.
        handler: AutocastKwargs; with ``output_dtype=None``, outputs stay in the compute dtype.
    """

    def __init__(
        self,
        label: str,
        device_type: str,
        scaler: torch.amp.GradScaler | None = None,
        handler: AutocastKwargs | None = None,
    ) -> None:
        self.label = label
        self.scaler = scaler
        self._device_type = device_type
        self._dtype = torch.float16 if label == "fp16" else torch.bfloat16
        self.handler = handler
        self.is_autocast = True

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[object]:
        """Enter a context in which operations run in half precision, as ``handler`` or the constructor's says."""
        if not self.is_autocast:
            return nullcontext()
        chosen = handler or self.handler
        if chosen is None:
            return torch.autocast(self._device_type, dtype=self._dtype)
        # Also enter a disabled autocast: inside another autocast block it restores full precision.
        return torch.autocast(
            self._device_type, dtype=self._dtype, enabled=chosen.enabled, cache_enabled=chosen.cache_enabled
        )

    def patch_forward(self, model: torch.nn.Module) -> None:
        """Run ``model.forward`` under autocast; cast half-precision outputs to float32 by default."""
        if self.is_autocast:
            _patch_forward(model, self.handler, context=self.autocast)

    def restore_forward(self, model: torch.nn.Module) -> None:
        """Restore the original forward of ``model``."""
        restore_forward(model)


@final
class AutocastPrecision(Autocasting):
    """The precision ``"fp16"`` or ``"bf16"`` (``label``), with autocast."""


def _is_patched(model: torch.nn.Module) -> bool:
    # A model that was pickled while it was patched has the attribute, and its class's forward.
    original = model.__dict__.get("_original_forward")
    return original is not None and model.__dict__.get("forward") != original


def _patch_forward(
    model: torch.nn.Module,
    handler: AutocastKwargs | None,
    *,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    dtype: torch.dtype | None = None,
) -> None:
    """Run ``model.forward`` in ``context``, and cast half-precision outputs to float32 unless ``handler`` says no.

    Args:
        dtype: cast floating-point inputs to it.
    """
    if _is_patched(model):
        return
    original = model.forward
    model._original_forward = original  # pyright: ignore[reportArgumentType]
    converts = handler is None or getattr(handler, "output_dtype", torch.float32) is not None
    is_method = isinstance(original, MethodType)
    function = original.__func__ if is_method else original

    @wraps(function)
    def forward(*args: object, **kwargs: object) -> object:
        if dtype is not None:
            args = (args[0], *_cast(args[1:], dtype)) if is_method else _cast(args, dtype)
            kwargs = _cast(kwargs, dtype)
        with context():
            outputs = function(*args, **kwargs)
        return convert_to_fp32(outputs) if converts else outputs

    # Keep it a method, so that a deep copy of the model runs its own forward, a pickled model is loaded with its
    # class's forward, and libraries read the user's signature.
    model.forward = MethodType(forward, model) if is_method else forward


def _cast(inputs: T, dtype: torch.dtype) -> T:
    return recursively_apply(lambda tensor: tensor.to(dtype), inputs, test_type=_is_floating)


def restore_forward(model: torch.nn.Module) -> None:
    """Restore the forward that ``model`` had before it was patched."""
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    model.__dict__.pop("forward", None)
    if model.forward != original:  # an instance attribute of the user's
        model.forward = original


# --------------------------------------------------------------------------------------------------
# True precision: a model whose parameters and computation have one dtype

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@final
class TruePrecision(Precision):
    """A precision with parameters, buffers, gradients and optimizer states in ``dtype``, without a float32 copy.

    Floating-point inputs are cast to ``dtype``; half-precision outputs are cast to float32, unless the handler's
    ``output_dtype`` is None.

    Args:
        handler: AutocastKwargs; only ``output_dtype`` is used.

    Raises:
        SettingError: ``dtype`` isn't a floating-point dtype, or the device doesn't support it.
    """

    def __init__(self, dtype: torch.dtype, device_type: str, handler: AutocastKwargs | None = None) -> None:
        if dtype not in _DTYPES:
            raise SettingError(f"parameter_dtype={dtype!r}: choose one of {', '.join(map(str, _DTYPES))}.")
        kind = kind_of(device_type)
        lacks = (dtype is torch.bfloat16 and not kind.supports_bf16()) or (
            dtype is torch.float16 and not kind.supports_fp16()
        )
        if lacks:
            raise SettingError(f"parameter_dtype={dtype}: this {device_type} device can't compute in it. Leave it out.")
        self.dtype = dtype
        self.handler = handler

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cast the floating-point tensors of ``model`` to the dtype; the parameters stay the same objects."""
        return model.to(self.dtype)

    def patch_forward(self, model: torch.nn.Module) -> None:
        """Make ``model.forward`` accept inputs of any floating-point dtype."""
        _patch_forward(model, self.handler, dtype=self.dtype)

    def restore_forward(self, model: torch.nn.Module) -> None:
        """Restore the original forward of ``model``; its parameters keep the dtype."""
        restore_forward(model)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# --------------------------------------------------------------------------------------------------
# Half-precision outputs converted to float32, so that losses and metrics are computed in full precision


class ConvertOutputsToFp32:
    """A forward whose half-precision outputs are converted to float32."""

    def __init__(self, model_forward: Callable[..., object]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "A forward prepared for mixed precision can't be pickled. Pickle the model itself, after "
            "`accelerator.unwrap_model(model, keep_fp32_wrapper=False)`."
        )


def convert_outputs_to_fp32(model_forward: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``model_forward`` in a function that converts half-precision outputs to float32."""
    converter = ConvertOutputsToFp32(model_forward)

    @wraps(model_forward)
    def forward(*args: P.args, **kwargs: P.kwargs) -> T:
        return converter(*args, **kwargs)

    return forward


# --------------------------------------------------------------------------------------------------
# Reports of conversions for low-precision arithmetic


@final
@dataclass(frozen=True)
class ConvertedModule:
    """One module of a conversion: its name, its class before and after, and the reason if it was kept."""

    name: str
    kind: str
    became: str
    reason: str = ""

    @property
    def is_converted(self) -> bool:
        """Whether the module now computes in the low precision."""
        return not self.reason


@final
@dataclass(frozen=True)
class ConversionReport:
    """The modules of one converted model in their order. Its text is a table with a summary.

    Args:
        model: the class of the model.
        backend: the package that converted it.
    """

    model: str
    backend: str
    modules: tuple[ConvertedModule, ...]

    @property
    def converted(self) -> tuple[ConvertedModule, ...]:
        """The modules that compute in the low precision."""
        return tuple(module for module in self.modules if module.is_converted)

    @property
    def kept(self) -> tuple[ConvertedModule, ...]:
        """The modules that weren't converted, each with its reason."""
        return tuple(module for module in self.modules if not module.is_converted)

    @property
    def summary(self) -> str:
        """The number of converted modules, and why convertible layers were kept, in one line."""
        reasons = Counter(module.reason for module in self.kept if module.reason not in (OTHER_KIND, HOLDS_OTHERS))
        kept = "; ".join(f"{count} kept: {reason}" for reason, count in reasons.items())
        line = f"{self.backend}: {len(self.converted)} of {len(self.modules)} modules of {self.model} converted"
        return f"{line} ({kept})" if kept else line

    def __str__(self) -> str:
        width = max((len(module.name) for module in self.modules), default=0)
        rows = [
            f"  {module.name:<{width}}  {module.kind}" + (f" -> {module.became}" if module.is_converted else "")
            + (f"  ({module.reason})" if module.reason else "")
            for module in self.modules
        ]  # fmt: skip
        return "\n".join([self.summary, *rows])


OTHER_KIND = "not a kind of layer that is converted"
HOLDS_OTHERS = "holds other modules"


def report_conversion(
    model: torch.nn.Module,
    backend: str,
    convert: Callable[[torch.nn.Module], torch.nn.Module],
    why_not: Callable[[str, torch.nn.Module], str],
    is_converted: Callable[[torch.nn.Module], bool],
) -> tuple[torch.nn.Module, ConversionReport]:
    """Return ``convert(model)`` and a report that compares all modules before and after.

    Args:
        why_not: returns why the module of that name isn't converted; called before the conversion.
        is_converted: returns whether a module is one of the backend's.
    """
    before = dict(model.named_modules())
    kinds = {name: type(module).__name__ for name, module in before.items()}
    # Ask before converting, which changes modules in place and so the answers.
    reasons = {name: why_not(name, module) for name, module in before.items()}
    model = convert(model)
    modules: list[ConvertedModule] = []
    for name, module in model.named_modules():
        became = type(module).__name__
        reason = "" if is_converted(module) else reasons.get(name) or OTHER_KIND
        modules.append(ConvertedModule(name, kinds.get(name, became), became, reason))  # no kind: converting added it
    return model, ConversionReport(type(model).__name__, backend, tuple(modules))
