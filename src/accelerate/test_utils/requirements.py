"""Decorators that skip a test, or a class of tests, without the required device, version or package."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import optional
from ..devices import table
from ..settings import env
from ..versions import is_torch_version

Test = TypeVar("Test", bound=Callable[..., Any])


@functools.cache
def _kind() -> table.DeviceKind:
    return table.available_kind(cpu=env.flag("ACCELERATE_USE_CPU"))


@functools.cache
def _num_devices() -> int:
    return table.count_devices(_kind())


def _on(*names: str) -> bool:
    return _kind().name in names


def skip(test_case: Test) -> Test:
    """Skip the test always."""
    return unittest.skip("Test was skipped")(test_case)


def slow(test_case: Test) -> Test:
    """Run the test only with RUN_SLOW set."""
    return unittest.skipUnless(env.flag("RUN_SLOW"), "test is slow; set RUN_SLOW=1 to run it")(test_case)


# Kinds of device


def require_cpu(test_case: Test) -> Test:
    """Run the test only without an accelerator."""
    return unittest.skipUnless(_on("cpu"), "test requires only a CPU")(test_case)


def require_non_cpu(test_case: Test) -> Test:
    """Run the test only with an accelerator."""
    return unittest.skipIf(_on("cpu"), "test requires an accelerator")(test_case)


def require_cuda(test_case: Test) -> Test:
    """Run the test only on CUDA."""
    return unittest.skipUnless(_on("cuda"), "test requires a CUDA device")(test_case)


def require_cuda_or_hpu(test_case: Test) -> Test:
    """Run the test only on CUDA or HPU."""
    return unittest.skipUnless(_on("cuda", "hpu"), "test requires a CUDA or HPU device")(test_case)


def require_xpu(test_case: Test) -> Test:
    """Run the test only on XPU."""
    return unittest.skipUnless(_on("xpu"), "test requires an XPU device")(test_case)


def require_cuda_or_xpu(test_case: Test) -> Test:
    """Run the test only on CUDA or XPU."""
    return unittest.skipUnless(_on("cuda", "xpu"), "test requires a CUDA or XPU device")(test_case)


def require_non_xpu(test_case: Test) -> Test:
    """Skip the test on XPU."""
    return unittest.skipIf(_on("xpu"), "test can't run on XPU")(test_case)


def require_non_hpu(test_case: Test) -> Test:
    """Skip the test on HPU."""
    return unittest.skipIf(_on("hpu"), "test can't run on HPU")(test_case)


def require_mlu(test_case: Test) -> Test:
    """Run the test only on MLU."""
    return unittest.skipUnless(_on("mlu"), "test requires an MLU device")(test_case)


def require_sdaa(test_case: Test) -> Test:
    """Run the test only on SDAA."""
    return unittest.skipUnless(_on("sdaa"), "test requires an SDAA device")(test_case)


def require_musa(test_case: Test) -> Test:
    """Run the test only on MUSA."""
    return unittest.skipUnless(_on("musa"), "test requires a MUSA device")(test_case)


def require_npu(test_case: Test) -> Test:
    """Run the test only on NPU."""
    return unittest.skipUnless(_on("npu"), "test requires an NPU device")(test_case)


def require_neuron(test_case: Test) -> Test:
    """Run the test only on Neuron."""
    return unittest.skipUnless(_on("neuron"), "test requires a Neuron device")(test_case)


def require_mps(test_case: Test) -> Test:
    """Run the test only on MPS."""
    return unittest.skipUnless(_on("mps"), "test requires an MPS device")(test_case)


def require_tpu(test_case: Test) -> Test:
    """Run the test only on XLA devices."""
    return unittest.skipUnless(_on("xla"), "test requires a TPU")(test_case)


def require_non_torch_xla(test_case: Test) -> Test:
    """Skip the test on XLA devices."""
    return unittest.skipIf(_on("xla"), "test can't run on XLA")(test_case)


# Numbers of devices


def require_single_device(test_case: Test) -> Test:
    """Run the test only with exactly one accelerator."""
    return unittest.skipUnless(not _on("cpu") and _num_devices() == 1, "test requires one accelerator")(test_case)


def require_single_gpu(test_case: Test) -> Test:
    """Run the test only with exactly one GPU."""
    return unittest.skipUnless(_on("cuda") and _num_devices() == 1, "test requires one GPU")(test_case)


def require_single_xpu(test_case: Test) -> Test:
    """Run the test only with exactly one XPU."""
    return unittest.skipUnless(_on("xpu") and _num_devices() == 1, "test requires one XPU")(test_case)


def require_multi_device(test_case: Test) -> Test:
    """Run the test only with several accelerators."""
    return unittest.skipUnless(_num_devices() > 1, "test requires several accelerators")(test_case)


def require_multi_gpu(test_case: Test) -> Test:
    """Run the test only with several GPUs."""
    return unittest.skipUnless(_on("cuda") and _num_devices() > 1, "test requires several GPUs")(test_case)


def require_multi_xpu(test_case: Test) -> Test:
    """Run the test only with several XPUs."""
    return unittest.skipUnless(_on("xpu") and _num_devices() > 1, "test requires several XPUs")(test_case)


def require_multi_gpu_or_xpu(test_case: Test) -> Test:
    """Run the test only with several GPUs or XPUs."""
    several = _on("cuda", "xpu") and _num_devices() > 1
    return unittest.skipUnless(several, "test requires several GPUs or XPUs")(test_case)


# Precisions and versions of torch


def require_fp16(test_case: Test) -> Test:
    """Run the test only where float16 computes."""
    return unittest.skipUnless(_kind().supports_fp16(), "test requires float16")(test_case)


def require_fp8(test_case: Test) -> Test:
    """Run the test only on CUDA or HPU with a package for 8-bit floats."""
    package = optional.is_torchao_available() or optional.is_transformer_engine_available()
    return unittest.skipUnless(package and _on("cuda", "hpu"), "test requires 8-bit floats")(test_case)


def require_fsdp2(test_case: Test) -> Test:
    """Run the test only with a torch that has ``fully_shard``."""
    return unittest.skipUnless(is_torch_version(">=", "2.6.0"), "test requires torch >= 2.6.0")(test_case)


def require_tp(test_case: Test) -> Test:
    """Run the test only with a torch and a transformers that know tensor parallelism."""
    known = is_torch_version(">=", "2.3.0") and optional.is_installed("transformers", at_least="4.52.0")
    return unittest.skipUnless(known, "test requires torch >= 2.3.0 and transformers >= 4.52.0")(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Run the test only with torch ``version`` or newer; also as ``@require_torch_min_version(version="2.8")``."""
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    new_enough = version is None or is_torch_version(">=", version)
    return unittest.skipUnless(new_enough, f"test requires torch >= {version}")(test_case)


def require_pippy(test_case: Test) -> Test:
    """Run the test only with torch's own pipeline parallelism, on an accelerator."""
    known = optional.is_pippy_available() and torch.distributed.is_available() and not _on("hpu")
    return unittest.skipUnless(known, "test requires torch's pipeline parallelism")(test_case)


# Packages


def _require_package(test_case: Test, is_available: bool, name: str) -> Test:
    return unittest.skipUnless(is_available, f"test requires {name}")(test_case)


def require_peft(test_case: Test) -> Test:
    """Run the test only with ``peft``."""
    return _require_package(test_case, optional.is_peft_available(), "peft")


def require_huggingface_suite(test_case: Test) -> Test:
    """Run the test only with both ``transformers`` and ``datasets``."""
    both = optional.is_transformers_available() and optional.is_datasets_available()
    return _require_package(test_case, both, "transformers and datasets")


def require_datasets(test_case: Test) -> Test:
    """Run the test only with ``datasets``."""
    return _require_package(test_case, optional.is_datasets_available(), "datasets")


def require_transformers(test_case: Test) -> Test:
    """Run the test only with ``transformers``."""
    return _require_package(test_case, optional.is_transformers_available(), "transformers")


def require_timm(test_case: Test) -> Test:
    """Run the test only with ``timm``."""
    return _require_package(test_case, optional.is_timm_available(), "timm")


def require_torchvision(test_case: Test) -> Test:
    """Run the test only with ``torchvision``."""
    return _require_package(test_case, optional.is_torchvision_available(), "torchvision")


def require_triton(test_case: Test) -> Test:
    """Run the test only with ``triton``."""
    return _require_package(test_case, optional.is_triton_available(), "triton")


def require_schedulefree(test_case: Test) -> Test:
    """Run the test only with ``schedulefree``."""
    return _require_package(test_case, optional.is_schedulefree_available(), "schedulefree")


def require_bnb(test_case: Test) -> Test:
    """Run the test only with ``bitsandbytes``."""
    return _require_package(test_case, optional.is_bnb_available(), "bitsandbytes")


def require_deepspeed(test_case: Test) -> Test:
    """Run the test only with ``deepspeed``."""
    return _require_package(test_case, optional.is_deepspeed_available(), "deepspeed")


def require_tensorboard(test_case: Test) -> Test:
    """Run the test only with ``tensorboard``."""
    return _require_package(test_case, optional.is_tensorboard_available(), "tensorboard")


def require_wandb(test_case: Test) -> Test:
    """Run the test only with ``wandb``."""
    return _require_package(test_case, optional.is_wandb_available(), "wandb")


def require_trackio(test_case: Test) -> Test:
    """Run the test only with ``trackio``."""
    return _require_package(test_case, optional.is_trackio_available(), "trackio")


def require_comet_ml(test_case: Test) -> Test:
    """Run the test only with ``comet_ml``."""
    return _require_package(test_case, optional.is_comet_ml_available(), "comet_ml")


def require_aim(test_case: Test) -> Test:
    """Run the test only with ``aim``."""
    return _require_package(test_case, optional.is_aim_available(), "aim")


def require_clearml(test_case: Test) -> Test:
    """Run the test only with ``clearml``."""
    return _require_package(test_case, optional.is_clearml_available(), "clearml")


def require_dvclive(test_case: Test) -> Test:
    """Run the test only with ``dvclive``."""
    return _require_package(test_case, optional.is_dvclive_available(), "dvclive")


def require_swanlab(test_case: Test) -> Test:
    """Run the test only with ``swanlab``."""
    return _require_package(test_case, optional.is_swanlab_available(), "swanlab")


def require_mlflow(test_case: Test) -> Test:
    """Run the test only with ``mlflow``."""
    return _require_package(test_case, optional.is_mlflow_available(), "mlflow")


def require_trackers(test_case: Test) -> Test:
    """Run the test only with a tracker that needs no account, and without ``comet_ml``."""
    some = optional.is_wandb_available() or optional.is_tensorboard_available() or optional.is_trackio_available()
    return _require_package(test_case, some and not optional.is_comet_ml_available(), "a tracker, and no comet_ml")


def require_pandas(test_case: Test) -> Test:
    """Run the test only with ``pandas``."""
    return _require_package(test_case, optional.is_pandas_available(), "pandas")


def require_import_timer(test_case: Test) -> Test:
    """Run the test only with ``import_timer``."""
    return _require_package(test_case, optional.is_import_timer_available(), "import_timer")


def require_transformer_engine(test_case: Test) -> Test:
    """Run the test only with ``transformer_engine``."""
    return _require_package(test_case, optional.is_transformer_engine_available(), "transformer_engine")


def require_transformer_engine_mxfp8(test_case: Test) -> Test:
    """Run the test only with ``transformer_engine`` on a device that has MXFP8."""
    return _require_package(test_case, optional.is_transformer_engine_mxfp8_available(), "MXFP8")


def require_torchao(test_case: Test) -> Test:
    """Run the test only with ``torchao``."""
    return _require_package(test_case, optional.is_torchao_available(), "torchao")


def require_matplotlib(test_case: Test) -> Test:
    """Run the test only with ``matplotlib``."""
    return _require_package(test_case, optional.is_matplotlib_available(), "matplotlib")


def require_torchdata_stateful_dataloader(test_case: Test) -> Test:
    """Run the test only with ``torchdata``'s ``StatefulDataLoader``."""
    known = optional.is_torchdata_stateful_dataloader_available()
    return _require_package(test_case, known, "torchdata with StatefulDataLoader")
