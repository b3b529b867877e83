"""The questions of ``accelerate config`` as documented functions: whole interviews, single questions, their answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, TypeVar

from ...settings import file
from ...settings.labels import (
    ComputeEnvironment,
    DistributedType,
    DynamoBackend,
    FP8BackendType,
    PrecisionType,
    SageMakerDistributedType,
)
from ...settings.tree import Settings
from .ask import Asker, BulletMenu
from .config_args import ClusterConfig, SageMakerConfig
from .questions import Questionnaire

#: The compilers that can be chosen, in the order of the documented menu.
DYNAMO_BACKENDS: Final = [
    *("EAGER", "AOT_EAGER", "INDUCTOR", "AOT_TS_NVFUSER", "NVPRIMS_NVFUSER", "CUDAGRAPHS", "OFI", "FX2TRT"),
    *("ONNXRT", "TENSORRT", "AOT_TORCHXLA_TRACE_ONCE", "TORHCHXLA_TRACE_ONCE", "TVM"),
]
_MACHINES: Final = (
    "NO MULTI_CPU MULTI_XPU MULTI_HPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_NEURON XLA"
)


# Whole interviews


def _described(settings: Settings) -> ClusterConfig | SageMakerConfig:
    document = file.to_document(settings)
    kind = ClusterConfig if settings.sagemaker is None else SageMakerConfig
    return kind.from_dict(document, "the answers")


def get_user_input() -> ClusterConfig | SageMakerConfig:
    """Ask everything, and return the configuration that the answers describe."""
    return _described(Questionnaire(Asker()).run())


def get_cluster_input() -> ClusterConfig | SageMakerConfig:
    """Ask about one's own machines, and return the configuration that the answers describe."""
    return _described(Questionnaire(Asker()).run("LOCAL_MACHINE"))


def get_sagemaker_input() -> ClusterConfig | SageMakerConfig:
    """Ask about a SageMaker job, and return the configuration that the answers describe."""
    return _described(Questionnaire(Asker()).run("AMAZON_SAGEMAKER"))


# Single questions

T = TypeVar("T")


def _ask_field(
    input_text: str,
    convert_value: Callable[[str], object] | None = None,
    default: object = None,
    error_message: str | None = None,
) -> object:
    """Ask until the answer can be converted; an empty answer is ``default``."""
    while True:
        answer = input(input_text)
        if answer == "" and default is not None:
            return default
        try:
            return answer if convert_value is None else convert_value(answer)
        except (ValueError, KeyError, IndexError) as error:
            print(error_message or f"That can't be: {error}")


def _ask_options(
    input_text: str, options: Sequence[str] = (), convert_value: Callable[[int], object] | None = None, default: int = 0
) -> object:
    """Ask for one of ``options`` and return its index, converted."""
    index = BulletMenu(input_text, list(options)).run(default_choice=default)
    return index if convert_value is None else convert_value(index)


def _nth(values: Sequence[T], answer: int | str) -> T:
    """Return the value with this number, from 0; raise ValueError when there is none."""
    index = int(answer)
    if not 0 <= index < len(values):
        raise ValueError(f"{answer!r} is no number from 0 to {len(values) - 1}")
    return values[index]


def _convert_compute_environment(value: int | str) -> Enum:
    """Return the environment with this number in the menu."""
    return _nth((ComputeEnvironment.LOCAL_MACHINE, ComputeEnvironment.AMAZON_SAGEMAKER), value)


def _convert_distributed_mode(value: int | str) -> Enum:
    """Return the distributed type with this number in the menu."""
    return _nth([DistributedType(name) for name in _MACHINES.split()], value)


def _convert_dynamo_backend(value: int | str) -> str:
    """Return the compiler with this number in the menu."""
    name = str(_nth(DYNAMO_BACKENDS, value)).replace("TORHCHXLA", "TORCHXLA")
    return DynamoBackend(name).value


def _convert_mixed_precision(value: int | str) -> Enum:
    """Return the precision with this number in the menu."""
    return _nth((PrecisionType.NO, PrecisionType.FP16, PrecisionType.BF16, PrecisionType.FP8), value)


def _convert_sagemaker_distributed_mode(value: int | str) -> Enum:
    """Return the distribution of a SageMaker job with this number in the menu."""
    kinds = SageMakerDistributedType
    return _nth((kinds.NO, kinds.DATA_PARALLEL, kinds.MODEL_PARALLEL), value)


def _convert_fp8_backend(value: int | str) -> Enum:
    """Return the fp8 library with this number in the menu."""
    return _nth((FP8BackendType.AO, FP8BackendType.TE, FP8BackendType.MSAMP), value)


def _convert_yes_no_to_bool(value: str) -> bool:
    """Return True for yes and False for no, in any case; KeyError for anything else."""
    return {"yes": True, "no": False}[value.lower()]


class SubcommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that lists subcommands without the line of all their names."""

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        if action.nargs == argparse.PARSER:
            text = "\n".join(text.split("\n")[1:])
        return text
