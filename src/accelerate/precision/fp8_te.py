"""fp8 by Transformer Engine: its layers instead of torch's, and a context that scales their operands."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, final

import torch

from ..errors import MissingDependency, PreparationError, SettingError
from ..optional import installed_version, is_transformer_engine_mxfp8_available, require
from ..plugins.fp8 import FP8RecipeKwargs, TERecipeKwargs
from ..settings.fp8 import TeOptions
from ..settings.option import options_of
from .base import HOLDS_OTHERS, OTHER_KIND, report_conversion
from .fp8 import Fp8Functions, Fp8Precision, why_linear_stays

if TYPE_CHECKING:
    from ..plugins.handlers import AutocastKwargs

#: The layers, and the recipes: NVIDIA's package, and Intel's with the same interface.
_PACKAGES = (
    ("transformer_engine.pytorch", "transformer_engine.common.recipe"),
    ("intel_transformer_engine", "intel_transformer_engine.recipe"),
)


def _engine() -> tuple[ModuleType, ModuleType]:
    """Return the package's modules with the layers and with the recipes.

    Raises:
        MissingDependency: Transformer Engine isn't installed, or can't be imported.
    """
    for layers, recipes in _PACKAGES:
        if installed_version(layers.partition(".")[0]) is not None:
            return require(layers, purpose="fp8 by Transformer Engine"), require(recipes)
    raise MissingDependency(
        "fp8 by Transformer Engine needs transformer-engine, which isn't installed. Install it as NVIDIA describes, or "
        "use torchao (ACCELERATE_FP8_BACKEND=AO)."
    )


def convert_model(
    model: torch.nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace the layers in ``model`` by Transformer Engine's with the same weights, or back by torch's.

    Linear layers whose sizes aren't multiples of 16 are kept, and so are layers that share a weight.
    """
    layers, _ = _engine()
    shared = _shared(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if shared.intersection(map(id, child.parameters(recurse=False))):
                continue
            new_layer = _replacement(child, layers, to_transformer_engine, _convert_linear, _convert_ln)
            if new_layer is None:
                continue
            with torch.no_grad():
                for key, parameter in child.named_parameters(recurse=False):
                    new_layer.get_parameter(key).copy_(parameter).requires_grad_(parameter.requires_grad)
            setattr(parent, name, new_layer.train(child.training))


def _shared(model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters that ``model`` has in several places; copies would no longer be tied."""
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return {key for key, count in counts.items() if count > 1}


def _replacement(
    module: torch.nn.Module, layers: ModuleType, forth: bool, convert_linear: bool, convert_norm: bool
) -> torch.nn.Module | None:
    """Return a new layer of the other package on the same device and in the same dtype; None to keep it."""
    linear, other_linear = (torch.nn.Linear, layers.Linear) if forth else (layers.Linear, torch.nn.Linear)
    norm, other_norm = (torch.nn.LayerNorm, layers.LayerNorm) if forth else (layers.LayerNorm, torch.nn.LayerNorm)
    found: Any = module  # two packages' layers with the same attributes
    if convert_linear and isinstance(found, linear) and (not forth or not why_linear_stays(found)):
        has_bias = found.bias is not None and found.bias.numel() > 0
        new = other_linear(found.in_features, found.out_features, bias=has_bias, **_dtype(found.weight, forth))
        return new.to(found.weight.device)
    if convert_norm and isinstance(found, norm) and (not forth or not _why_norm_stays(found)):
        new = other_norm(list(found.weight.shape), eps=found.eps, **_dtype(found.weight, forth))
        return new.to(found.weight.device)
    return None


def _dtype(weight: torch.Tensor, forth: bool) -> dict[str, Any]:
    return {"params_dtype" if forth else "dtype": weight.dtype}


def _why_norm_stays(module: torch.nn.LayerNorm) -> str:
    if not module.elementwise_affine or module.bias is None:  # pyright: ignore[reportUnnecessaryComparison]
        return "a LayerNorm without weight and bias"
    return "" if len(module.normalized_shape) == 1 else "a LayerNorm over several dimensions"


def _why_stays(shared: set[int], name: str, module: torch.nn.Module) -> str:
    if name == "":
        return HOLDS_OTHERS
    if shared.intersection(map(id, module.parameters(recurse=False))):
        return "its weight is tied to another layer's"
    if isinstance(module, torch.nn.Linear):
        return why_linear_stays(module)
    if isinstance(module, torch.nn.LayerNorm):
        return _why_norm_stays(module)
    return HOLDS_OTHERS if next(module.children(), None) is not None else OTHER_KIND


def has_transformer_engine_layers(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has layers of Transformer Engine.

    Raises:
        MissingDependency: Transformer Engine isn't installed.
    """
    return any(map(_is_converted, model.modules()))


def _is_converted(module: torch.nn.Module) -> bool:
    layers, _ = _engine()
    kinds = (getattr(layers, name, None) for name in ("Linear", "LayerNorm", "LayerNormLinear", "TransformerLayer"))
    return isinstance(module, tuple(kind for kind in kinds if kind is not None))


def contextual_fp8_autocast(
    model_forward: Callable[..., object], fp8_recipe: object, use_during_eval: bool = False
) -> Callable[..., object]:
    """Wrap ``model_forward`` to run in fp8 in training; with ``use_during_eval``, in evaluation too."""
    layers, _ = _engine()
    is_method = isinstance(model_forward, MethodType)
    function = model_forward.__func__ if is_method else model_forward

    @wraps(function)
    def forward(*args: object, **kwargs: object) -> object:
        is_training = bool(getattr(args[0], "training", True)) if args else True
        with layers.fp8_autocast(enabled=use_during_eval or is_training, fp8_recipe=fp8_recipe):
            return function(*args, **kwargs)

    forward.__dict__["_is_fp8"] = True
    # Keep it a method, so that a deep copy of the model runs its own forward.
    return MethodType(forward, model_forward.__self__) if is_method else forward


def apply_fp8_autowrap(
    model: torch.nn.Module, fp8_recipe_handler: TERecipeKwargs | FP8RecipeKwargs | None
) -> torch.nn.Module:
    """Make the forward of ``model`` run in fp8 as TERecipeKwargs say.

    Raises:
        SettingError: block scaling is set on hardware without it, or with options of delayed scaling.
    """
    recipe, during_eval = _recipe(fp8_recipe_handler)
    model.forward = contextual_fp8_autocast(model.forward, recipe, during_eval)
    return model


def _recipe(handler: TERecipeKwargs | FP8RecipeKwargs | None) -> tuple[object, bool]:
    """Return the package's recipe, and whether it also applies in evaluation."""
    if isinstance(handler, FP8RecipeKwargs):  # the deprecated recipe, which was MS-AMP's too
        handler = TERecipeKwargs(**{option.name: getattr(handler, option.name) for option in options_of(TeOptions)})
    options = {} if handler is None else dict(handler.to_kwargs())
    during_eval = bool(options.pop("use_autocast_during_eval", False))
    in_blocks = bool(options.pop("use_mxfp8_block_scaling", False))
    _, recipes = _engine()
    if "fp8_format" in options:
        options["fp8_format"] = getattr(recipes.Format, options["fp8_format"])
    if not in_blocks:
        return _built(recipes.DelayedScaling, options), during_eval
    if not is_transformer_engine_mxfp8_available():
        raise SettingError(
            "use_mxfp8_block_scaling=True: this device has no MXFP8. Leave it out, and scaling is delayed."
        )
    delayed = sorted(set(options) - set(inspect.signature(recipes.MXFP8BlockScaling).parameters))
    if delayed:
        raise SettingError(
            f"use_mxfp8_block_scaling=True scales without history, so that {', '.join(delayed)} would have no effect. "
            "Leave them out."
        )
    return recipes.MXFP8BlockScaling(**options), during_eval


def _built(kind: Callable[..., object], options: dict[str, object]) -> object:
    """Return the recipe, after a check that the installed version of the package knows all options."""
    known = inspect.signature(kind).parameters
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise SettingError(
            f"TERecipeKwargs({', '.join(f'{name}={options[name]!r}' for name in unknown)}): the installed Transformer "
            f"Engine has no such option any more. Leave it out. It has: {', '.join(known)}."
        )
    return kind(**options)


@final
class TePrecision(Fp8Precision):
    """The precision fp8 with Transformer Engine's layers; everything else runs under autocast in bf16.

    Args:
        recipe: TERecipeKwargs, or the deprecated FP8RecipeKwargs.
        functions: returns a conversion at every use, because libraries on top replace them.
    """

    backend: str | None = "TE"

    def __init__(
        self,
        device_type: str,
        recipe: TERecipeKwargs | FP8RecipeKwargs,
        functions: Fp8Functions,
        *,
        handler: AutocastKwargs | None = None,
    ) -> None:
        super().__init__(device_type, handler=handler)
        _recipe(recipe)  # raises at once if something is wrong with it
        self._recipe = recipe
        self._functions = functions

    def check(self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise unless models to train come with an optimizer, because converted layers get new parameters."""
        fresh = [model for model in models if not has_transformer_engine_layers(model)]
        training = any(parameter.requires_grad for model in fresh for parameter in model.parameters())
        if training != bool(optimizers) and (fresh or not models):
            missing = "its optimizer" if training else "its model"
            raise PreparationError(
                f"prepare() got {'a model' if training else 'an optimizer'} without {missing}. With fp8 by Transformer "
                "Engine they must be given to one prepare() together, because layers and their parameters are "
                "replaced. For evaluation only, use prepare_model(model, evaluation_mode=True)."
            )

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Replace layers of ``model`` by Transformer Engine's, unless it already has some."""
        if has_transformer_engine_layers(model):
            return model
        convert = partial(_converted_in_place, self._functions("convert_model"))
        why = partial(_why_stays, _shared(model))
        model, report = report_conversion(model, "fp8 by Transformer Engine", convert, why, _is_converted)
        self.record(report)
        return model

    def patch_wrapped(self, model: torch.nn.Module) -> None:
        """Run the outermost forward, also of DDP and FSDP, in Transformer Engine's context."""
        if not getattr(model.forward, "_is_fp8", False):
            self._functions("apply_fp8_autowrap")(model, self._recipe)


def _converted_in_place(convert: Callable[[torch.nn.Module], object], model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        convert(model)
    return model
