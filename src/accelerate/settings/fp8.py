"""Options of fp8 arithmetic, by the library that does it."""

from __future__ import annotations

from typing import Any, Literal

from .option import OptionGroup, option, option_group

FP8_BACKENDS = ("AO", "TE", "MSAMP", "NO")
#: The end of the errors of those who ask for MS-AMP.
MSAMP_IS_GONE = (
    "which isn't supported any more: its package is unmaintained, and doesn't install. Use torchao "
    "(ACCELERATE_FP8_BACKEND=AO, or AORecipeKwargs()), Transformer Engine (TE, or TERecipeKwargs()), or "
    "mixed_precision='bf16'."
)


class _Fp8Group(
    OptionGroup, title="fp8", env="ACCELERATE_FP8_", section="fp8_config", key="", flag="fp8_", parses_defaults=True
):
    """The title of these groups, the prefixes of their names, and how their flags parse."""


@option_group
class AoOptions(_Fp8Group):
    """Options of fp8 by torchao."""

    config: Any = option(None, "A torchao Float8LinearConfig.", kind="object")
    module_filter_func: Any = option(None, "Tells which modules are converted.", kind="object")
    pad_inner_dim: bool = option(
        True,
        "Pad the inner dimension of linear layers to a multiple of 16.",
        question="Do you want to pad the inner dimension of weight matrices before float8 matmuls?",
    )
    enable_fsdp_float8_all_gather: bool = option(
        True, "Gather sharded parameters in fp8.", question="Do you want to enable FSDP2 float8 all gather?"
    )


@option_group
class TeOptions(_Fp8Group):
    """Options of fp8 by Transformer Engine."""

    use_autocast_during_eval: bool = option(
        False,
        "Use fp8 in evaluation mode too.",
        switch=True,
        question="Do you want to use FP8 autocast during eval mode?",
    )
    margin: int = option(
        0, "The margin of the gradient scaling.", question="What margin should be used for gradient scaling?"
    )
    interval: int = option(
        1,
        "The steps between two computations of the scaling factors.",
        minimum=1,
        question="What interval should be used for for how often the scaling factor is recomputed?",
    )
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] = option(
        "HYBRID",
        "The fp8 format: HYBRID is E4M3 forward and E5M2 backward.",
        env="ACCELERATE_FP8_FORMAT",
        stem="format",
        key="fp8_format",
        key_aliases=("format",),
        choices=("HYBRID", "E4M3", "E5M2"),
        question="Which weight format should be used?",
    )
    amax_history_len: int = option(
        1024,
        "The steps of history from which scaling factors are computed.",
        key_aliases=("amax_history_length",),
        minimum=1,
        question="What length of history should be used for the amax scaling factor computation?",
    )
    amax_compute_algo: Literal["most_recent", "max"] = option(
        "most_recent",
        "How the scaling factors follow from the history.",
        key_aliases=("amax_compute_algorithm",),
        choices=("most_recent", "max"),
        question="Which algorithm should be used for the amax scaling factor computation?",
    )
    override_linear_precision: tuple[bool, bool, bool] = option(
        (False, False, False),
        "Higher precision in linear layers for the forward pass, input gradients and weight gradients.",
        env=("ACCELERATE_FP8_OVERRIDE_FPROP", "ACCELERATE_FP8_OVERRIDE_DGRAD", "ACCELERATE_FP8_OVERRIDE_WGRAD"),
        question="Should fprop, dgrad and wgrad GEMMs be executed in higher precision?",
    )
    use_mxfp8_block_scaling: bool = option(False, "Scale in blocks (MXFP8).", flag=None)


@option_group
class MsampOptions(_Fp8Group):
    """Options of fp8 by MS-AMP, which isn't supported any more."""

    opt_level: Literal["O1", "O2"] = option(
        "O2",
        "The optimization level of MS-AMP, which isn't supported any more.",
        key_aliases=("optimization_level",),
        choices=("O1", "O2"),
        question="What level of 8-bit collective communication would you like to use?",
    )


@option_group
class Fp8Options(MsampOptions, TeOptions, AoOptions):
    """The library that does fp8, and the options of each of them."""

    backend: str = option(
        "NO",
        "The library that does fp8 arithmetic; NO: the first one that is installed.",
        choices=FP8_BACKENDS,
        question="Which FP8 backend do you want to use?",
        flag_default=None,
    )
