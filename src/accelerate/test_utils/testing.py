"""Utilities for tests: subprocesses, comparisons over all ranks, test cases, and requirements of tests."""

from __future__ import annotations

import asyncio
import functools
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
from typing import IO, Any, Final, Protocol, TextIO, TypeVar
from unittest import mock

import torch

from .. import optional
from ..devices import table
from ..devices.hardware import is_hpu_available as is_hpu_available
from ..devices.hardware import is_xpu_available as is_xpu_available
from ..distributed.collectives import gather
from ..ports import DEFAULT_PORT
from ..settings import env
from ..settings.env import parse_flag_from_env as parse_flag_from_env
from ..state import AcceleratorState, PartialState
from ..versions import is_torch_version

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


# Requirements: decorators that skip a test, or a class of tests, unless a device, a version or a package is there


class Requirement(Protocol):
    """A decorator that skips tests, or classes of tests, unless its requirement is met."""

    def __call__(self, test_case: Test) -> Test:
        """Return ``test_case``, marked to be skipped if the requirement isn't met."""
        ...


def _requires(what: str, is_met: Callable[[], bool]) -> Requirement:
    """Return a decorator that skips a test unless ``is_met()`` at the definition of the test."""

    def require(test_case: Test) -> Test:
        return unittest.skipUnless(is_met(), f"test requires {what}")(test_case)

    require.__doc__ = f"Run the test only with {what}."
    return require


def _on(*names: str) -> bool:
    return torch_device in names


def skip(test_case: Test) -> Test:
    """Skip the test always."""
    return unittest.skip("Test was skipped")(test_case)


def slow(test_case: Test) -> Test:
    """Run the test only with RUN_SLOW set."""
    return unittest.skipUnless(env.flag("RUN_SLOW"), "test is slow; set RUN_SLOW=1 to run it")(test_case)


require_cpu: Requirement = _requires("a machine without accelerators", lambda: _on("cpu"))
require_non_cpu: Requirement = _requires("an accelerator", lambda: not _on("cpu"))
require_cuda: Requirement = _requires("a CUDA device", lambda: _on("cuda"))
require_cuda_or_hpu: Requirement = _requires("a CUDA or HPU device", lambda: _on("cuda", "hpu"))
require_xpu: Requirement = _requires("an XPU device", lambda: _on("xpu"))
require_cuda_or_xpu: Requirement = _requires("a CUDA or XPU device", lambda: _on("cuda", "xpu"))
require_non_xpu: Requirement = _requires("another device than XPU", lambda: not _on("xpu"))
require_non_hpu: Requirement = _requires("another device than HPU", lambda: not _on("hpu"))
require_mlu: Requirement = _requires("an MLU device", lambda: _on("mlu"))
require_sdaa: Requirement = _requires("an SDAA device", lambda: _on("sdaa"))
require_musa: Requirement = _requires("a MUSA device", lambda: _on("musa"))
require_npu: Requirement = _requires("an NPU device", lambda: _on("npu"))
require_neuron: Requirement = _requires("a Neuron device", lambda: _on("neuron"))
require_mps: Requirement = _requires("an MPS device", lambda: _on("mps"))
require_tpu: Requirement = _requires("a TPU", lambda: _on("xla"))
require_non_torch_xla: Requirement = _requires("another device than XLA", lambda: not _on("xla"))

require_single_device: Requirement = _requires("one accelerator", lambda: not _on("cpu") and device_count == 1)
require_single_gpu: Requirement = _requires("one GPU", lambda: _on("cuda") and device_count == 1)
require_single_xpu: Requirement = _requires("one XPU", lambda: _on("xpu") and device_count == 1)
require_multi_device: Requirement = _requires("several accelerators", lambda: device_count > 1)
require_multi_gpu: Requirement = _requires("several GPUs", lambda: _on("cuda") and device_count > 1)
require_multi_xpu: Requirement = _requires("several XPUs", lambda: _on("xpu") and device_count > 1)
require_multi_gpu_or_xpu: Requirement = _requires(
    "several GPUs or XPUs", lambda: _on("cuda", "xpu") and device_count > 1
)

require_fp16: Requirement = _requires(
    "float16", lambda: table.available_kind(cpu=env.flag("ACCELERATE_USE_CPU")).supports_fp16()
)
require_fp8: Requirement = _requires(
    "8-bit floats",
    lambda: (optional.is_torchao_available() or optional.is_transformer_engine_available()) and _on("cuda", "hpu"),
)
require_fsdp2: Requirement = _requires("torch >= 2.6.0", lambda: is_torch_version(">=", "2.6.0"))
require_tp: Requirement = _requires(
    "torch >= 2.3.0 and transformers >= 4.52.0",
    lambda: is_torch_version(">=", "2.3.0") and optional.is_installed("transformers", at_least="4.52.0"),
)
require_pippy: Requirement = _requires(
    "torch's pipeline parallelism",
    lambda: optional.is_pippy_available() and torch.distributed.is_available() and not _on("hpu"),
)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Run the test only with torch ``version`` or newer; also as ``@require_torch_min_version(version="2.8")``."""
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    return _requires(f"torch >= {version}", lambda: version is None or is_torch_version(">=", version))(test_case)


require_huggingface_suite: Requirement = _requires(
    "transformers and datasets", lambda: optional.is_transformers_available() and optional.is_datasets_available()
)
require_trackers: Requirement = _requires(
    "a tracker without an account, and no comet_ml",
    lambda: (
        (optional.is_wandb_available() or optional.is_tensorboard_available() or optional.is_trackio_available())
        and not optional.is_comet_ml_available()
    ),
)
require_peft: Requirement = _requires("peft", optional.is_peft_available)
require_datasets: Requirement = _requires("datasets", optional.is_datasets_available)
require_transformers: Requirement = _requires("transformers", optional.is_transformers_available)
require_timm: Requirement = _requires("timm", optional.is_timm_available)
require_torchvision: Requirement = _requires("torchvision", optional.is_torchvision_available)
require_triton: Requirement = _requires("triton", optional.is_triton_available)
require_schedulefree: Requirement = _requires("schedulefree", optional.is_schedulefree_available)
require_bnb: Requirement = _requires("bitsandbytes", optional.is_bnb_available)
require_deepspeed: Requirement = _requires("deepspeed", optional.is_deepspeed_available)
require_tensorboard: Requirement = _requires("tensorboard", optional.is_tensorboard_available)
require_wandb: Requirement = _requires("wandb", optional.is_wandb_available)
require_trackio: Requirement = _requires("trackio", optional.is_trackio_available)
require_comet_ml: Requirement = _requires("comet_ml", optional.is_comet_ml_available)
require_aim: Requirement = _requires("aim", optional.is_aim_available)
require_clearml: Requirement = _requires("clearml", optional.is_clearml_available)
require_dvclive: Requirement = _requires("dvclive", optional.is_dvclive_available)
require_swanlab: Requirement = _requires("swanlab", optional.is_swanlab_available)
require_mlflow: Requirement = _requires("mlflow", optional.is_mlflow_available)
require_pandas: Requirement = _requires("pandas", optional.is_pandas_available)
require_import_timer: Requirement = _requires("import_timer", optional.is_import_timer_available)
require_transformer_engine: Requirement = _requires("transformer_engine", optional.is_transformer_engine_available)
require_torchao: Requirement = _requires("torchao", optional.is_torchao_available)
require_matplotlib: Requirement = _requires("matplotlib", optional.is_matplotlib_available)
require_transformer_engine_mxfp8: Requirement = _requires("MXFP8", optional.is_transformer_engine_mxfp8_available)
require_torchdata_stateful_dataloader: Requirement = _requires(
    "torchdata with StatefulDataLoader", optional.is_torchdata_stateful_dataloader_available
)
