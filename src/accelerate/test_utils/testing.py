"""Utilities for tests: subprocesses, temporary folders, comparisons over all ranks, test cases."""

from __future__ import annotations

import asyncio
import io
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TextIO, TypeVar
from unittest import mock

import torch

from ..devices import table
from ..devices.hardware import is_hpu_available, is_xpu_available
from ..distributed.collectives import gather
from ..ports import DEFAULT_PORT
from ..settings import env
from ..settings.env import parse_flag_from_env
from ..state import AcceleratorState, PartialState
from .requirements import (
    require_aim,
    require_bnb,
    require_clearml,
    require_comet_ml,
    require_cpu,
    require_cuda,
    require_cuda_or_hpu,
    require_cuda_or_xpu,
    require_datasets,
    require_deepspeed,
    require_dvclive,
    require_fp8,
    require_fp16,
    require_fsdp2,
    require_huggingface_suite,
    require_import_timer,
    require_matplotlib,
    require_mlflow,
    require_mlu,
    require_mps,
    require_multi_device,
    require_multi_gpu,
    require_multi_gpu_or_xpu,
    require_multi_xpu,
    require_musa,
    require_neuron,
    require_non_cpu,
    require_non_hpu,
    require_non_torch_xla,
    require_non_xpu,
    require_npu,
    require_pandas,
    require_peft,
    require_pippy,
    require_schedulefree,
    require_sdaa,
    require_single_device,
    require_single_gpu,
    require_single_xpu,
    require_swanlab,
    require_tensorboard,
    require_timm,
    require_torch_min_version,
    require_torchao,
    require_torchdata_stateful_dataloader,
    require_torchvision,
    require_tp,
    require_tpu,
    require_trackers,
    require_trackio,
    require_transformer_engine,
    require_transformer_engine_mxfp8,
    require_transformers,
    require_triton,
    require_wandb,
    require_xpu,
    skip,
    slow,
)

Test = TypeVar("Test", bound=Callable[..., Any])


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the kind of device found here, the number of devices, and a function for the bytes allocated on one."""
    kind = table.available_kind(cpu=env.flag("ACCELERATE_USE_CPU"))
    return kind.name, table.count_devices(kind), kind.memory_allocated


torch_device: str
device_count: int
memory_allocated_func: Callable[[], int]
torch_device, device_count, memory_allocated_func = get_backend()


def get_launch_command(**kwargs: object) -> list[str]:
    """Return an ``accelerate launch`` command with each keyword as a flag; True is a bare flag, False left out."""
    command = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command.append(f"--{name}={value}")
    return command


DEFAULT_LAUNCH_COMMAND: Final = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def run_first(test_case: Test) -> Test:
    """Run the test before the others, where the plugin ``pytest-order`` is installed."""
    import pytest

    return pytest.mark.order(1)(test_case)


# Programs


class SubprocessCallException(Exception):
    """The error of a failed command of a test; the text holds what it printed."""


@dataclass(frozen=True)
class _RunOutput:
    returncode: int
    stdout: list[str]
    stderr: list[str]


async def _run(
    command: Sequence[str], env: Mapping[str, str] | None, stdin: int | IO[bytes] | None, timeout: float, quiet: bool
) -> _RunOutput:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env
    )

    async def read(stream: asyncio.StreamReader | None, target: TextIO, label: str) -> list[str]:
        assert stream is not None  # both are pipes
        lines: list[str] = []
        async for line in stream:
            lines.append(line.decode(errors="replace").rstrip("\n"))
            if not quiet:
                print(label, lines[-1], file=target)
        return lines

    try:
        stdout, stderr, returncode = await asyncio.wait_for(
            asyncio.gather(
                read(process.stdout, sys.stdout, "stdout:"),
                read(process.stderr, sys.stderr, "stderr:"),
                process.wait(),
            ),
            timeout,
        )
    except asyncio.TimeoutError as error:
        process.kill()
        await process.wait()
        raise SubprocessCallException(f"`{' '.join(command)}` ran for more than {timeout} s.") from error
    return _RunOutput(returncode, stdout, stderr)


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: int | IO[bytes] | None = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> _RunOutput:
    """Run a command, and return what it printed, line by line.

    With ``echo`` the command is shown, and unless ``quiet`` each of its lines while it comes, marked ``stdout:`` or
    ``stderr:``.

    Raises:
        RuntimeError: it failed; the text holds what it wrote to stderr.
        SubprocessCallException: it ran longer than ``timeout`` seconds, and was killed.
    """
    command = [str(part) for part in cmd]
    if echo:
        print("\nRunning: ", " ".join(command))
    result = asyncio.run(_run(command, env, stdin, timeout, quiet))
    if result.returncode != 0:
        raise RuntimeError(
            f"`{' '.join(command)}` failed with code {result.returncode}. It wrote:\n" + "\n".join(result.stderr)
        )
    return result


def run_command(
    command: Sequence[str], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command; with ``return_stdout``, return what it printed.

    Raises:
        SubprocessCallException: it failed.
    """
    arguments = [str(part) for part in command]
    finished = subprocess.run(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True, errors="replace"
    )
    if finished.returncode != 0:
        raise SubprocessCallException(
            f"`{' '.join(arguments)}` failed with code {finished.returncode}:\n\n{finished.stdout}"
        )
    return finished.stdout if return_stdout else None


def path_in_accelerate_package(*components: str) -> Path:
    """Return the path of a file of this package, given by the components of its path inside."""
    return Path(__file__).resolve().parent.parent.joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """Return the number of this pytest-xdist worker; 0 without pytest-xdist."""
    worker = env.read("PYTEST_XDIST_WORKER", "gw0") or "gw0"
    return int(worker.removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a rendezvous port that no other pytest-xdist worker uses."""
    return DEFAULT_PORT + pytest_xdist_worker_id()


# What a test sees


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether every process holds the same tensor."""
    here = tensor[None].clone().to(PartialState().device)
    everywhere = gather(here).cpu()
    return bool((everywhere == everywhere[:1]).all())


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Raise an AssertionError unless the block raises ``exception_class`` with ``msg`` in its text."""
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(f"Expected {msg!r} in the error's text, which is {str(error)!r}.") from error
        return
    except Exception as error:  # another error than the expected one is what this reports
        raise AssertionError(f"Expected {exception_class.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"Expected {exception_class.__name__}, but nothing was raised.")


def capture_call_output(func: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Return what the call prints."""
    with redirect_stdout(io.StringIO()) as printed:
        func(*args, **kwargs)
    return printed.getvalue()


# Test cases


class TempDirTestCase(unittest.TestCase):
    """A test case with a folder ``tmpdir``, empty at the start of each test (``clear_on_setup``)."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        if self.clear_on_setup:
            shutil.rmtree(self.tmpdir, ignore_errors=True)
            self.tmpdir.mkdir(parents=True)


class AccelerateTestCase(unittest.TestCase):
    """A test case that resets the global states after each test."""

    def tearDown(self) -> None:
        super().tearDown()
        AcceleratorState._reset_state()
        PartialState._reset_state()


class MockingTestCase(unittest.TestCase):
    """A test case whose patches, given to ``add_mocks``, last until the end of the test."""

    def add_mocks(self, mocks: Any) -> None:
        """Start the ``mock.patch(...)`` objects."""
        self.mocks: list[mock._patch[Any]] = list(mocks) if isinstance(mocks, (tuple, list)) else [mocks]
        for each in self.mocks:
            each.start()
            self.addCleanup(each.stop)


__all__ = [
    "AccelerateTestCase",
    "DEFAULT_LAUNCH_COMMAND",
    "MockingTestCase",
    "SubprocessCallException",
    "TempDirTestCase",
    "are_the_same_tensors",
    "assert_exception",
    "capture_call_output",
    "device_count",
    "execute_subprocess_async",
    "get_backend",
    "get_launch_command",
    "get_torch_dist_unique_port",
    "is_hpu_available",
    "is_xpu_available",
    "memory_allocated_func",
    "parse_flag_from_env",
    "path_in_accelerate_package",
    "pytest_xdist_worker_id",
    "require_aim",
    "require_bnb",
    "require_clearml",
    "require_comet_ml",
    "require_cpu",
    "require_cuda",
    "require_cuda_or_hpu",
    "require_cuda_or_xpu",
    "require_datasets",
    "require_deepspeed",
    "require_dvclive",
    "require_fp16",
    "require_fp8",
    "require_fsdp2",
    "require_huggingface_suite",
    "require_import_timer",
    "require_matplotlib",
    "require_mlflow",
    "require_mlu",
    "require_mps",
    "require_multi_device",
    "require_multi_gpu",
    "require_multi_gpu_or_xpu",
    "require_multi_xpu",
    "require_musa",
    "require_neuron",
    "require_non_cpu",
    "require_non_hpu",
    "require_non_torch_xla",
    "require_non_xpu",
    "require_npu",
    "require_pandas",
    "require_peft",
    "require_pippy",
    "require_schedulefree",
    "require_sdaa",
    "require_single_device",
    "require_single_gpu",
    "require_single_xpu",
    "require_swanlab",
    "require_tensorboard",
    "require_timm",
    "require_torch_min_version",
    "require_torchao",
    "require_torchdata_stateful_dataloader",
    "require_torchvision",
    "require_tp",
    "require_tpu",
    "require_trackers",
    "require_trackio",
    "require_transformer_engine",
    "require_transformer_engine_mxfp8",
    "require_transformers",
    "require_triton",
    "require_wandb",
    "require_xpu",
    "run_command",
    "run_first",
    "skip",
    "slow",
    "torch_device",
]
