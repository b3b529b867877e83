"""Optional packages: check if one is installed and its version, and import it with a clear error.

A package counts as installed if both it and its metadata are found; a folder that happens to have its name doesn't
count. The functions don't import the package, unless their docstring says so.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Final, ParamSpec, TypeVar

from .errors import MissingDependency
from .versions import compare_versions, is_torch_version

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: Import name -> names of the distributions that provide it, if they differ from the import name.
_DISTRIBUTIONS: Final[dict[str, tuple[str, ...]]] = {
    "PIL": ("pillow",),
    "comet_ml": ("comet-ml",),
    "import_timer": ("import-timer",),
    "lomo_optim": ("lomo-optim",),
    "megatron": ("megatron-core", "megatron-lm"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "msamp": ("ms-amp",),
    "pynvml": ("nvidia-ml-py", "pynvml"),
    "transformer_engine": ("transformer-engine", "transformer_engine"),
    "yaml": ("PyYAML",),
}

MEGATRON_REMEDY: Final = (
    "It is not on PyPI (`megatron-core` is only its core): clone https://github.com/NVIDIA/Megatron-LM and run "
    "`pip install --no-build-isolation .` in it, or put it on PYTHONPATH. Without it, torch's own tensor and "
    "pipeline parallelism do: ParallelismConfig(tp_size=..., pp_size=...)."
)
AIM_CEILING: Final = "4.0.0"
TORCHAO_FLOOR: Final = "0.6.1"
BNB_8BIT_FLOOR: Final = "0.37.2"
BNB_4BIT_FLOOR: Final = "0.39.0"


@functools.cache
def installed_version(module: str) -> str | None:
    """Return the version of the package that provides ``module``; None if it isn't installed."""
    # Imported here, because it is slow and most programs don't need it.
    from importlib import metadata

    try:
        if find_spec(module) is None:
            return None
    except (ImportError, ValueError):  # a broken parent package, or a stub without a spec in sys.modules
        return None
    for distribution in _DISTRIBUTIONS.get(module, (module,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def can_be_found(module: str) -> bool:
    """Return whether ``module`` is on the path; only its parent packages are imported."""
    try:
        return find_spec(module) is not None
    except ImportError:  # of a package above it
        return False
    except ValueError:  # a stand-in without a spec
        return True


def is_installed(module: str, *, at_least: str | None = None, below: str | None = None) -> bool:
    """Return whether ``module`` is installed, with version ``at_least`` or later and below ``below`` if given."""
    from packaging.version import InvalidVersion, Version

    version = installed_version(module)
    if version is None:
        return False
    if at_least is None and below is None:
        return True
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return (at_least is None or compare_versions(found, ">=", at_least)) and (
        below is None or compare_versions(found, "<", below)
    )


def require(
    module: str, extra: str | None = None, *, purpose: str | None = None, at_least: str | None = None
) -> ModuleType:
    """Import ``module`` and return it.

    ``extra`` names the extra of this package that installs it, ``purpose`` what it is needed for.

    Raises:
        MissingDependency: the package is missing, older than ``at_least``, or fails to import.
    """
    top = module.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(top, (top,))[0]
    wanted = distribution if at_least is None else f"{distribution}>={at_least}"
    needed = f"{purpose} needs {wanted!r}" if purpose else f"{wanted!r} is needed"
    remedy = f'Install it with: pip install "{wanted}"'
    if extra is not None:
        remedy += f' (or: pip install "accelerate[{extra}]")'
    if at_least is not None and not is_installed(top, at_least=at_least):
        found = installed_version(top)
        state = "it isn't installed" if found is None else f"version {found} is installed"
        raise MissingDependency(f"{needed}, but {state}. {remedy}")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        state = "it isn't installed" if installed_version(top) is None else f"importing it failed: {error}"
        raise MissingDependency(f"{needed}, but {state}. {remedy}") from error


def torchao_required(func: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate ``func`` to raise a clear error if ``torchao`` isn't installed."""

    @functools.wraps(func)
    def guarded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not is_torchao_available():
            raise MissingDependency(
                f"`{func.__name__}` needs torchao, which isn't installed. Install it with: pip install torchao"
            )
        return func(*args, **kwargs)

    return guarded


# -- one function per package, under its documented name ----------------------------------------------------


def _check_of(module: str) -> Callable[[], bool]:
    """Return a function that returns whether ``module`` is installed."""

    def is_available() -> bool:
        return is_installed(module)

    is_available.__doc__ = f"Return whether ``{module}`` is installed."
    return is_available


is_amdsmi_available: Callable[[], bool] = _check_of("amdsmi")
is_boto3_available: Callable[[], bool] = _check_of("boto3")
is_clearml_available: Callable[[], bool] = _check_of("clearml")
is_comet_ml_available: Callable[[], bool] = _check_of("comet_ml")
is_datasets_available: Callable[[], bool] = _check_of("datasets")
is_deepspeed_available: Callable[[], bool] = _check_of("deepspeed")
is_dvclive_available: Callable[[], bool] = _check_of("dvclive")
is_import_timer_available: Callable[[], bool] = _check_of("import_timer")
is_lomo_available: Callable[[], bool] = _check_of("lomo_optim")
is_matplotlib_available: Callable[[], bool] = _check_of("matplotlib")
is_msamp_available: Callable[[], bool] = _check_of("msamp")
is_pandas_available: Callable[[], bool] = _check_of("pandas")
is_peft_available: Callable[[], bool] = _check_of("peft")
is_pynvml_available: Callable[[], bool] = _check_of("pynvml")
is_pytest_available: Callable[[], bool] = _check_of("pytest")
is_rich_available: Callable[[], bool] = _check_of("rich")
is_sagemaker_available: Callable[[], bool] = _check_of("sagemaker")
is_schedulefree_available: Callable[[], bool] = _check_of("schedulefree")
is_swanlab_available: Callable[[], bool] = _check_of("swanlab")
is_timm_available: Callable[[], bool] = _check_of("timm")
is_torchdata_available: Callable[[], bool] = _check_of("torchdata")
is_torchvision_available: Callable[[], bool] = _check_of("torchvision")
is_tqdm_available: Callable[[], bool] = _check_of("tqdm")
is_trackio_available: Callable[[], bool] = _check_of("trackio")
is_transformer_engine_available: Callable[[], bool] = _check_of("transformer_engine")
is_transformers_available: Callable[[], bool] = _check_of("transformers")
is_triton_available: Callable[[], bool] = _check_of("triton")
is_wandb_available: Callable[[], bool] = _check_of("wandb")


def is_aim_available() -> bool:
    """Return whether ``aim`` is installed, below version 4, whose interface differs."""
    return is_installed("aim", below=AIM_CEILING)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether ``bitsandbytes`` is installed, with at least ``min_version`` if given."""
    return is_installed("bitsandbytes", at_least=min_version)


def is_4bit_bnb_available() -> bool:
    """Return whether ``bitsandbytes`` is installed and supports 4-bit weights."""
    return is_bnb_available(BNB_4BIT_FLOOR)


def is_8bit_bnb_available() -> bool:
    """Return whether ``bitsandbytes`` is installed and supports 8-bit weights."""
    return is_bnb_available(BNB_8BIT_FLOOR)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether ``bitsandbytes`` is installed and runs on more than CUDA (imports it)."""
    if not is_bnb_available():
        return False
    features = getattr(require("bitsandbytes"), "features", set[str]())
    return "multi_backend" in features


def is_megatron_lm_available() -> bool:
    """Return whether Megatron-LM is installed."""
    return is_installed("megatron")


def is_mlflow_available() -> bool:
    """Return whether ``mlflow`` or ``mlflow-skinny`` is installed."""
    return is_installed("mlflow")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether ``numpy`` is installed, with at least ``min_version``."""
    return is_installed("numpy", at_least=min_version)


def is_pippy_available() -> bool:
    """Return whether torch is new enough for its own pipeline parallelism."""
    return is_torch_version(">=", "2.4.0")


def is_tensorboard_available() -> bool:
    """Return whether ``tensorboard`` or ``tensorboardX`` is installed."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with its distributed package (imports torch)."""
    import torch

    return torch.distributed.is_available()


def is_torchao_available() -> bool:
    """Return whether ``torchao`` is installed in a version with float8 training."""
    return is_installed("torchao", at_least=TORCHAO_FLOOR)


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether ``torchdata`` is installed and has ``StatefulDataLoader``."""
    return is_installed("torchdata", at_least="0.8.0")


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether ``transformer_engine`` is installed and this device has MXFP8 (imports it)."""
    if not is_transformer_engine_available():
        return False
    supported, _reason = require("transformer_engine.pytorch.fp8").check_mxfp8_support()
    return bool(supported)


def is_weights_only_available() -> bool:
    """Return whether torch can load weights without running the code in a pickle, including numpy's arrays."""
    return is_torch_version(">=", "2.4.0")
