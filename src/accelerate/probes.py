"""Whether a kind of device, or a precision, works here: answered by the rows of `devices`."""

from __future__ import annotations

import functools

from .devices import available_kind, kind_of
from .optional import is_msamp_available, is_torchao_available, is_transformer_engine_available
from .versions import is_torch_version

# A question about a device imports torch, and the vendor's extension where there is one. `check_device`
# asked the driver too in the documented interface; here that is always done.


@functools.cache
def _is_available(name: str) -> bool:
    return kind_of(name).is_available()


def is_cuda_available() -> bool:
    """A CUDA (or ROCm) device can be used."""
    return _is_available("cuda")


def is_mps_available(min_version: str = "1.12") -> bool:
    """Apple's GPU can be used, and torch is at least ``min_version``."""
    return is_torch_version(">=", min_version) and _is_available("mps")


def is_mlu_available(check_device: bool = False) -> bool:
    """An MLU can be used."""
    del check_device
    return _is_available("mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """A MUSA device can be used."""
    del check_device
    return _is_available("musa")


def is_npu_available(check_device: bool = False) -> bool:
    """An NPU can be used."""
    del check_device
    return _is_available("npu")


def is_sdaa_available(check_device: bool = False) -> bool:
    """An SDAA device can be used."""
    del check_device
    return _is_available("sdaa")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """An HPU can be used; with ``init_hccl``, its way for processes to talk is loaded too."""
    if not _is_available("hpu"):
        return False
    if init_hccl:
        import importlib

        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_habana_gaudi1() -> bool:
    """The HPU is a first-generation Gaudi."""
    if not is_hpu_available():
        return False
    import importlib

    return importlib.import_module("habana_frameworks.torch.utils.experimental")._get_device_type() == 1


def is_xpu_available(check_device: bool = False) -> bool:
    """An Intel GPU can be used."""
    del check_device
    return _is_available("xpu")


def is_neuron_available(check_device: bool = False) -> bool:
    """A Neuron device can be used."""
    del check_device
    return _is_available("neuron")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """An XLA device can be used; with ``check_is_tpu`` or ``check_is_gpu``, one of that hardware.

    Raises:
        ValueError: both checks are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("`is_torch_xla_available` checks for a TPU or for a GPU, not for both at once.")
    if not _is_available("xla"):
        return False
    if not check_is_tpu and not check_is_gpu:
        return True
    import importlib

    hardware = importlib.import_module("torch_xla.runtime").device_type()
    return hardware == "TPU" if check_is_tpu else hardware in ("GPU", "CUDA", "ROCM")


def is_rocm_available() -> bool:
    """torch was built for AMD's devices, and one can be used."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_xccl_available() -> bool:
    """torch's processes can talk over xccl."""
    import torch

    return torch.distributed.is_available() and getattr(torch.distributed, "is_xccl_available", bool)()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """The device found here computes in bfloat16; with ``ignore_tpu``, an XLA device doesn't count."""
    kind = available_kind()
    if ignore_tpu and kind == kind_of("xla"):
        return False
    return kind.supports_bf16()


def is_fp16_available() -> bool:
    """The device found here computes in float16."""
    return available_kind().supports_fp16()


def is_fp8_available() -> bool:
    """A package for 8-bit floats is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()
