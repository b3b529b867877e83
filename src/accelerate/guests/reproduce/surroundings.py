"""The facts of a launch beside its code: packages, variables, machine, seeds and data."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ...distributed.random import capture_host_streams
from ...settings import env
from ...settings.option import options_of
from ...settings.tree import GROUPS, Settings, encode_settings
from .masking import MASK, masked

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: Variables of others that change results, by their beginning.
_PREFIXES: Final = (
    "OMP_", "MKL_", "KMP_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "DNNL_", "ONEDNN_", "ATEN_CPU_CAPABILITY",
    "PYTHONHASHSEED", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE", "HIP_", "ROCR_", "ZE_", "XLA_", "NCCL_",
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_",
)  # fmt: skip


def variables() -> dict[str, str]:
    """Return the variables that matter, except defaults: those of the settings, and those by which others compute."""
    options = [option for group in GROUPS.values() for option in options_of(group)]
    secret = {name for option in options if option.secret for name in option.env}
    own = {name for option in options for name in option.env} - secret
    found = {
        name: masked(value, name)
        for name, value in sorted(env.snapshot().items())
        if name in own or (name.startswith(_PREFIXES) and name not in secret and not name.endswith("_CACHE_DIR"))
    }
    defaults = encode_settings(Settings())  # a launcher sets them too
    return {name: value for name, value in found.items() if MASK not in value and defaults.get(name) != value}


def packages() -> dict[str, str]:
    """Return the installed packages with their versions, and Python, by the names of their folders."""
    found: dict[str, str] = {}
    for folder in filter(os.path.isdir, sys.path):
        for entry in os.listdir(folder):
            stem, kind = os.path.splitext(entry)
            if kind in (".dist-info", ".egg-info"):
                name, _, version = stem.partition("-")
                found.setdefault(name, version.partition("-")[0])
    return {"python": platform.python_version()} | {name: found[name] for name in sorted(found)}


def machine(run: Accelerator) -> dict[str, Any]:
    """Return the machine's properties on which the bits of a result may depend."""
    kind, world = run.world.kind, run.world
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": f"{run.device.type} {kind.device_name(run.device.index or 0)}".strip(),
        "ranks_per_host": world.local_size,
    }


def _processor() -> str:
    try:
        lines = Path("/proc", "cpuinfo").read_text(errors="replace").splitlines()  # its name; `cores` counts them
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # another system, or another architecture
        return platform.processor()


def switches() -> dict[str, Any]:
    """Return torch's own switches that choose between computations."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "default_dtype": str(torch.get_default_dtype()),
    }


def seeds() -> dict[str, str]:
    """Return torch's seed, and a hash of the state of each random stream of the host."""

    def plain(value: object) -> object:
        return value.tolist() if isinstance(value, torch.Tensor) else repr(value)

    states = capture_host_streams()
    hashes = {
        name: hashlib.sha256(json.dumps(state, default=plain).encode()).hexdigest()[:16]
        for name, state in states.items()
    }
    return {"torch_seed": str(torch.initial_seed()), **hashes}


def data(run: Accelerator) -> list[dict[str, Any]]:
    """Return the type and sizes of the data of each prepared loader."""
    return [
        {
            "dataset": type(getattr(loader, "dataset", loader)).__qualname__,
            "samples": _number(loader, "total_dataset_length"),
            "global_batch": _number(loader, "total_batch_size"),
        }
        for loader in run._dataloaders
    ]


def _number(loader: object, name: str) -> int | None:
    try:
        return int(getattr(loader, name))
    except (TypeError, ValueError, AttributeError, NotImplementedError):  # a dataset without a length
        return None
