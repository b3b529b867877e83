"""``accelerate env``: versions, devices and configuration, for a bug report."""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
from pathlib import Path

from ..optional import installed_version
from ..settings import env
from .parser import WHICH_FILE, Subparsers, command_parser, configuration_path, spellings

_LIBRARIES = ("transformers", "deepspeed", "torchao", "transformer_engine", "bitsandbytes", "torch_xla", "megatron")
_VARIABLES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "NCCL_", "GLOO_", "TORCH_", "CUDA_VISIBLE")
_CLUSTER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def env_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate env``."""
    parser = command_parser("env", "Print versions, devices and the configuration.", subparsers)
    parser.add_argument(*spellings("--config_file"), default=None, help=f"The file to show. {WHICH_FILE}")
    parser.set_defaults(func=env_command)
    return parser


def _memory() -> str:
    try:
        text = Path("/proc/meminfo").read_text()
        kibibytes = int(next(line.split()[1] for line in text.splitlines() if line.startswith("MemTotal")))
    except (OSError, StopIteration, ValueError):
        return "unknown"
    return f"{kibibytes / 2**20:.1f} GiB"


def facts() -> dict[str, str]:
    """Return versions, devices and memory of this machine, in the order in which they are shown."""
    import numpy
    import torch

    from ..devices.table import CPU, present

    package = sys.modules[__name__.partition(".")[0]]
    kind, count = present()
    num_devices = 0 if kind is CPU else count
    found: dict[str, str] = {
        "accelerate": package.__version__,
        "Platform": platform.platform(),
        "`accelerate` command": shutil.which("accelerate") or "not on the PATH",
        "Package": str(Path(str(package.__file__)).parent),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "NumPy": numpy.__version__,
        "PyTorch": torch.__version__,
        "Communication backends": ", ".join(
            name
            for name, check in (
                ("gloo", torch.distributed.is_gloo_available),
                ("nccl", torch.distributed.is_nccl_available),
                ("mpi", torch.distributed.is_mpi_available),
            )
            if check()
        ),
        "Accelerator": f"{num_devices} x {kind.name}" if num_devices else "none (CPU)",
        "Memory": _memory(),
        "CPU": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads for torch",
    }
    found.update({name: version for name in _LIBRARIES if (version := installed_version(name)) is not None})
    return found


def env_command(args: argparse.Namespace) -> dict[str, str]:
    """Print the facts as a block to be copied, and return them."""
    found = facts()
    print("\nCopy the lines below into your report.\n")
    for name, value in found.items():
        print(f"- {name}: {value}")
    path = configuration_path(args.config_file)
    if path.is_file():
        print(f"- Configuration ({path}):")
        print("\n".join(f"\t{line}" for line in path.read_text().rstrip().splitlines()))
    else:
        print(f"- Configuration: none at {path}")
    variables = {
        name: value
        for name, value in sorted(env.snapshot().items())
        if (name.startswith(_VARIABLES) or name in _CLUSTER) and "KEY" not in name and "TOKEN" not in name
    }
    print("- Environment:" if variables else "- Environment: nothing of ours is set")
    for name, value in variables.items():
        print(f"\t{name}={value}")
    return found
