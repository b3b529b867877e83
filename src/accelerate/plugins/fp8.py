"""Recipes for fp8 computation, one class per library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..callers import warn_of_old_spelling
from ..optional import require
from ..settings.fp8 import AoOptions, MsampOptions, TeOptions
from ..settings.option import option
from .handlers import KwargsHandler, LaunchedOptions, canonicalize


@dataclass(repr=False, eq=False)
class AORecipeKwargs(LaunchedOptions, AoOptions, KwargsHandler):
    """The options of torchao's conversion: a ``Float8LinearConfig``, or two options to create one.

    ``module_filter_func(module, name)`` returns whether a linear layer is converted; by default, all but the first and
    the last are.

    Raises:
        MissingDependency: torchao isn't installed or is older than 0.6.1.
    """

    def _resolve(self, given: Mapping[str, object]) -> None:
        float8 = require("torchao.float8", "fp8", purpose="AORecipeKwargs", at_least="0.6.1")
        if self.config is None:
            self.config: object = float8.Float8LinearConfig(
                pad_inner_dim=self.pad_inner_dim,
                enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather,
            )


@dataclass(repr=False, eq=False)
class TERecipeKwargs(LaunchedOptions, TeOptions, KwargsHandler):
    """The options with which Transformer Engine scales fp8 tensors."""

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, "fp8_format", "amax_compute_algo", "override_linear_precision")


@dataclass(repr=False, eq=False)
class MSAMPRecipeKwargs(LaunchedOptions, MsampOptions, KwargsHandler):
    """The optimisation level of MS-AMP, which is no longer supported: use :class:`AORecipeKwargs` (torchao)."""

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, "opt_level")


@dataclass(repr=False, eq=False)
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The deprecated recipe of Transformer Engine, with an option of MS-AMP, which is no longer supported."""

    backend: str = option(
        None,
        "The library that does fp8 arithmetic: TransformerEngine.",
        env="ACCELERATE_FP8_BACKEND",
        choices=("TE", "MSAMP"),
    )

    def _resolve(self, given: Mapping[str, object]) -> None:
        warn_of_old_spelling(
            "FP8RecipeKwargs is deprecated and will be removed in 2.0: use TERecipeKwargs or AORecipeKwargs."
        )
        super()._resolve(given)
        canonicalize(self, "opt_level", "backend")
        if self.backend is None:
            self.backend = "TE"
