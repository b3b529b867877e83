"""The kinds of devices, one row each: its name, and how to count, seed, measure and synchronise it.

A row has only strings, so this file needs no torch; torch and a vendor's extension are imported when a method of a row
is called. To add a vendor, add a row to `KINDS`.
"""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.util
import platform
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ..settings.env import flag, read

if TYPE_CHECKING:
    import torch

PROBE_TIMEOUT_SECONDS: Final = 20
_ALWAYS: Final = "always"
_NEVER: Final = "never"


@final
@dataclass(frozen=True)
class DeviceKind:
    """One kind of device, as strings; an empty string means that this kind lacks the feature.

    A call is the name of a function of `module`, or `package.module:function` for one elsewhere.
    """

    name: str  # torch's name of the device type
    label: str  # the DistributedType of several processes on this kind
    module: str  # the torch module with its functions
    extension: str = ""  # the package that registers this device with torch on import
    backend: str = ""  # the backend of its process groups
    visible_devices: str = ""  # the environment variable that limits the visible devices
    builds: str = ""  # names in torch/version.py; a torch with this device sets one of them
    runtime: str = ""  # the module that knows rank and world size without a process group
    binds_group: bool = False  # the process group can be bound to the device at init
    driver_builds: str = ""  # the builds whose devices can be counted by the driver's files and command
    driver_files: str = ""  # a glob that matches one file per device
    driver_command: str = ""  # prints one line per device

    available: str = "is_available"
    count: str = "device_count"
    select: str = "set_device"
    wait: str = "synchronize"
    clear: str = "empty_cache"
    seed_call: str = "manual_seed_all"
    rng_read: str = "get_rng_state_all"
    rng_write: str = "set_rng_state_all"
    rng_is_list: bool = True  # one state per device, not one for all
    memory_used: str = "memory_allocated"
    memory_peak: str = "max_memory_allocated"
    memory_left: str = "mem_get_info"
    busy: str = ""  # returns the percentage of recent time in which the device computed
    bf16: str = "is_bf16_supported"  # a call, or always, or never
    shards_attention: bool = False  # torch's context parallelism shards its attention kernels
    fp16: str = _ALWAYS
    fp8: str = _ALWAYS  # whether the hardware multiplies 8-bit floats, if that can be queried
    fp8_fallback: str = "bf16"  # the precision to use if it doesn't
    fp8_backends: str = "AO"  # the packages whose fp8 works on such devices, by their documented names
    stream: str = "Stream"  # the class of streams
    stream_scope: str = "stream"
    stream_now: str = "current_stream"

    # -- questions to torch --------------------------------------------------------------------------------

    def _function(self, call: str) -> Any:
        """Return the function behind a call of this row, or None if the installed torch has none."""
        if not call:
            return None
        where, colon, name = call.rpartition(":")
        try:
            if self.extension:
                importlib.import_module(self.extension)
            importlib.import_module("torch")
            found: Any = importlib.import_module(where) if colon else _resolve(self.module)
        except (ImportError, AttributeError):
            return None
        return getattr(found, name, None)

    def _call(self, call: str, *arguments: object, otherwise: object = None) -> Any:
        function = self._function(call)
        return otherwise if function is None else function(*arguments)

    def is_available(self) -> bool:
        """Return whether this process can use a device of this kind (imports torch)."""
        if self.extension and importlib.util.find_spec(self.extension.partition(".")[0]) is None:
            return False
        return not self._is_switched_off() and bool(self._call(self.available, otherwise=False))

    def device_count(self) -> int:
        """Return how many devices of this kind this process sees (imports torch)."""
        return int(self._call(self.count, otherwise=1)) if self.is_available() else 0

    def device(self, index: int | None = None) -> torch.device:
        """Return the torch device with that index; kinds with one device per process ignore the index."""
        import torch

        if not self.select or index is None:
            return torch.device(self.name)
        return torch.device(self.name, index)

    def set_device(self, device: torch.device) -> None:
        """Make `device` the current device, on which new tensors of this kind are allocated."""
        self._call(self.select, device)

    def device_name(self, index: int = 0) -> str:
        """Return the vendor's name of the device; empty if unknown."""
        return str(self._call("get_device_name", index, otherwise=""))

    def capability(self) -> tuple[int, ...]:
        """Return the vendor's generation number of the current device; empty if there is none."""
        return tuple(self._call("get_device_capability", otherwise=())) if self.is_available() else ()

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait for all work queued on ``device``, or on the current device."""
        self._call(self.wait, *(() if device is None or not self.select else (device,)))

    def side_stream(self, device: torch.device) -> Any:
        """Return a new stream of `device` beside the current one; None if this kind has no streams."""
        return self._call(self.stream, device)

    def in_stream(self, stream: object) -> AbstractContextManager[object]:
        """Return a context in which work is queued on `stream`."""
        return self._call(self.stream_scope, stream)

    def current_stream(self, device: torch.device) -> Any:
        """Return the current stream of `device`."""
        return self._call(self.stream_now, device)

    def empty_cache(self) -> None:
        """Return the cached memory of torch's allocator to the driver."""
        self._call(self.clear)

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices of this kind that the process sees."""
        self._call(self.seed_call, seed)

    def rng_states(self) -> list[torch.Tensor]:
        """Return the generator states of the devices of this kind; empty if it has no generators."""
        states = self._call(self.rng_read)
        if states is None:
            return []
        return list(states) if self.rng_is_list else [states]

    def set_rng_states(self, states: Sequence[object]) -> None:
        """Set the generators to `states` from `rng_states`."""
        self._call(self.rng_write, states if self.rng_is_list else states[0])

    def memory_allocated(self, device: torch.device | int | None = None) -> int:
        """Return the number of bytes of tensors; 0 if the kind can't tell."""
        return int(self._measure(self.memory_used, device))

    def max_memory_allocated(self, device: torch.device | int | None = None) -> int:
        """Return the peak bytes of tensors since the last reset; 0 if the kind can't tell."""
        return int(self._measure(self.memory_peak, device))

    def free_memory(self, device: torch.device | int | None = None) -> int | None:
        """Return the free bytes for new tensors; None if the kind can't tell."""
        found = self._measure(self.memory_left, device)
        return int(found[0]) if isinstance(found, tuple) else None

    def total_memory(self, device: torch.device | int | None = None) -> int | None:
        """Return the size of the device's memory in bytes; None if the kind can't tell."""
        found = self._measure(self.memory_left, device)
        return int(found[1]) if isinstance(found, tuple) else int(found) or None

    def _measure(self, call: str, device: torch.device | int | None) -> Any:
        arguments = () if device is None or not self.select else (device,)
        result = self._call(call, *arguments, otherwise=0)
        return 0 if result is None else result

    def utilization(self, device: torch.device) -> float | None:
        """Return the fraction of recent time in which `device` computed; None if the kind can't tell.

        The driver's package may raise; ImportError if it isn't installed.
        """
        percentage = self._call(self.busy, device)
        return None if percentage is None else float(percentage) / 100

    def supports_bf16(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return self._supports(self.bf16)

    def supports_fp16(self) -> bool:
        """Return whether the device computes in float16."""
        return self._supports(self.fp16)

    def supports_fp8(self) -> bool:
        """Return whether the device multiplies matrices of 8-bit floats; True if unknown."""
        return self._supports(self.fp8)

    def _supports(self, answer: str) -> bool:
        return answer == _ALWAYS or (answer != _NEVER and bool(self._call(answer, otherwise=False)))

    def _is_switched_off(self) -> bool:
        return self.name == "xla" and not flag("USE_TORCH_XLA", True)

    # -- questions without torch ---------------------------------------------------------------------------

    def count_without_torch(self, environment: Mapping[str, str] | None = None) -> int | None:
        """Return how many devices a process started in `environment` would see; None if only torch can tell."""
        if self.name == "cpu":
            return 1
        if self.name == "mps":
            return int(sys.platform == "darwin" and platform.machine() == "arm64")
        if self._is_switched_off() or (self.extension and not _is_importable(self.extension)):
            return 0
        if self.builds and not _torch_is_built_for(self.builds):
            return 0
        if self.driver_builds and not _torch_is_built_for(self.driver_builds):
            return None
        driver = self._count_by_driver()
        if driver is None:
            return None
        return min(driver, _num_visible(read_from(environment, self.visible_devices), driver))

    def _count_by_driver(self) -> int | None:
        if self.driver_files:
            found = len(glob.glob(self.driver_files))
            if found or not self.driver_command:
                return found
        return _num_lines(self.driver_command) if self.driver_command else None


KINDS: Final[tuple[DeviceKind, ...]] = (
    DeviceKind(
        "xla", "XLA", "torch_xla", extension="torch_xla", backend="xla", runtime="torch_xla.runtime",
        # Other calls initialise devices, after which it is too late to choose SPMD.
        available="torch_xla.runtime:addressable_runtime_device_count",
        count="torch_xla.runtime:addressable_runtime_device_count", select="",
        wait="torch_xla.core.xla_model:wait_device_ops",
        clear="", seed_call="torch_xla.core.xla_model:set_rng_state",
        rng_read="torch_xla.core.xla_model:get_rng_state", rng_write="torch_xla.core.xla_model:set_rng_state",
        rng_is_list=False, memory_used="", memory_peak="", memory_left="", bf16=_ALWAYS,
        stream="",
    ),
    DeviceKind(
        "mps", "NO", "torch.mps", available="torch.backends.mps:is_available", select="",
        seed_call="manual_seed", rng_read="get_rng_state", rng_write="set_rng_state", rng_is_list=False,
        memory_used="current_allocated_memory", memory_peak="",
        memory_left="recommended_max_memory", bf16="accelerate.devices.table:is_macos_14", stream="",
    ),
    DeviceKind(
        "mlu", "MULTI_MLU", "torch.mlu", extension="torch_mlu", backend="cncl",
        visible_devices="MLU_VISIBLE_DEVICES", driver_files="/dev/cambricon_dev[0-9]*",
    ),
    DeviceKind(
        "sdaa", "MULTI_SDAA", "torch.sdaa", extension="torch_sdaa", backend="tccl",
        visible_devices="SDAA_VISIBLE_DEVICES",
    ),
    DeviceKind(
        "musa", "MULTI_MUSA", "torch.musa", extension="torch_musa", backend="mccl",
        visible_devices="MUSA_VISIBLE_DEVICES",
    ),
    DeviceKind(
        "npu", "MULTI_NPU", "torch.npu", extension="torch_npu", backend="hccl",
        visible_devices="ASCEND_RT_VISIBLE_DEVICES", driver_files="/dev/davinci[0-9]*",
    ),
    DeviceKind(
        "hpu", "MULTI_HPU", "torch.hpu", extension="habana_frameworks.torch", backend="hccl",
        visible_devices="HABANA_VISIBLE_MODULES", clear="", seed_call="torch.hpu.random:manual_seed_all",
        rng_read="torch.hpu.random:get_rng_state_all", rng_write="torch.hpu.random:set_rng_state_all", bf16=_ALWAYS,
        fp8="accelerate.devices.table:is_gaudi2_or_later", fp8_backends="AO TE",
    ),
    DeviceKind(
        "cuda", "MULTI_GPU", "torch.cuda", backend="nccl", visible_devices="CUDA_VISIBLE_DEVICES",
        builds="cuda hip", binds_group=True, driver_builds="cuda", driver_files="/proc/driver/nvidia/gpus/*",
        driver_command="nvidia-smi -L", fp8="accelerate.devices.hardware:check_cuda_fp8_capability",
        fp8_fallback="fp16", fp8_backends="AO TE", shards_attention=True, busy="utilization",
    ),
    DeviceKind(
        "xpu", "MULTI_XPU", "torch.xpu", backend="xccl", visible_devices="ZE_AFFINITY_MASK", builds="xpu",
    ),
    DeviceKind(
        "neuron", "MULTI_NEURON", "torch.neuron", extension="torch_neuronx", backend="neuron",
        visible_devices="NEURON_RT_VISIBLE_CORES", bf16=_ALWAYS, fp16=_NEVER,
    ),
    DeviceKind(
        "cpu", "MULTI_CPU", "torch.cpu", backend="gloo", select="", clear="", seed_call="", rng_read="",
        rng_write="", memory_used="", memory_peak="", memory_left="", bf16=_ALWAYS, stream="",
    ),
)  # fmt: skip

CPU: Final = KINDS[-1]


def kind_of(device: str | torch.device) -> DeviceKind:
    """Return the row of a device or device type (`"cuda"`, `"cuda:1"`). Raise ValueError if there is none."""
    name = str(device).partition(":")[0]
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise ValueError(
        f"{device!r} is no device that is known here. Known are: {', '.join(kind.name for kind in KINDS)}."
    )


def available_kind(*, cpu: bool = False) -> DeviceKind:
    """Return the first row, in the documented order, with a device that this process can use (imports torch)."""
    if cpu:
        return CPU
    return next(kind for kind in KINDS if kind is CPU or kind.is_available())


def count_devices(kind: DeviceKind | str | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Return how many devices of a kind (default: this machine's) a process started from here would see.

    This process doesn't import torch: it asks the driver, or else a child process that imports torch.
    """
    if kind is None:
        return present(environment)[1]
    row = kind_of(kind) if isinstance(kind, str) else kind
    known = row.count_without_torch(environment)
    if known is not None:
        return known
    return row.device_count() if "torch" in sys.modules and environment is None else _count_in_child(row, environment)


def present(environment: Mapping[str, str] | None = None) -> tuple[DeviceKind, int]:
    """Return the kind and the number of devices for workers started here, without importing torch."""
    for kind in KINDS[:-1]:
        count = count_devices(kind, environment)
        if count:
            return kind, count
    return CPU, 1


def empty_caches() -> None:
    """Return torch's cached memory on this process's accelerator to the driver."""
    available_kind().empty_cache()


# -- helpers -----------------------------------------------------------------------------------------------


def is_macos_14() -> bool:
    """Return whether this is macOS 14 or later, the first version with bfloat16 in Metal."""
    version = platform.mac_ver()[0].partition(".")[0]
    return version.isdigit() and int(version) >= 14


def is_gaudi2_or_later() -> bool:
    """Return whether the HPU's generation has 8-bit floats."""
    return importlib.import_module("habana_frameworks.torch.utils.experimental")._get_device_type() != 1


def read_from(environment: Mapping[str, str] | None, name: str) -> str | None:
    """Return a variable of `environment`, or of this process's environment if it is None."""
    if not name:
        return None
    return read(name) if environment is None else environment.get(name)


def _resolve(dotted: str) -> Any:
    """Return `torch.cuda` as an object; follow attributes as well as modules, because extensions add attributes."""
    parts = dotted.split(".")
    found: Any = importlib.import_module(parts[0])
    for part in parts[1:]:
        found = getattr(found, part)
    return found


def _is_importable(extension: str) -> bool:
    top = extension.partition(".")[0]
    return top in sys.modules or importlib.util.find_spec(top) is not None


@functools.cache
def _torch_build() -> dict[str, object]:
    """Return the constants in torch/version.py, which imports nothing of torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return {}
    file = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(file)) if file.is_file() else {}


def _torch_is_built_for(names: str) -> bool:
    build = _torch_build()
    return any(build.get(name) for name in names.split())


def _num_visible(text: str | None, num_devices: int) -> int:
    """Count the devices in a visible-devices variable, up to the first impossible one."""
    if text is None or text.strip().lower() == "all":
        return num_devices
    count = 0
    for entry in text.split(","):
        entry = entry.strip()
        if entry in ("", "-1", "none", "void") or (entry.isdigit() and int(entry) >= num_devices):
            break
        count += 1
    return count


def is_torch_xpu_tensor(tensor: object) -> bool:
    """Return whether ``tensor`` is on an XPU."""
    return getattr(getattr(tensor, "device", None), "type", None) == "xpu"


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for a device that can't compute in it."""
    import torch

    try:
        torch.ones((), dtype=torch.float64, device=device).add_(1.0)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def _num_lines(command: str) -> int:
    try:
        finished = subprocess.run(command.split(), capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if finished.returncode != 0:
        return 0
    return sum(1 for line in finished.stdout.splitlines() if line and not line[0].isspace())


@functools.cache
def _count_in_child_cached(name: str, environment: tuple[tuple[str, str], ...] | None) -> int:
    program = f"from accelerate.devices.table import kind_of; print(kind_of({name!r}).device_count())"
    try:
        finished = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=6 * PROBE_TIMEOUT_SECONDS,
            env=None if environment is None else dict(environment),
        )
        return int(finished.stdout.split()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return 0


def _count_in_child(kind: DeviceKind, environment: Mapping[str, str] | None) -> int:
    return _count_in_child_cached(kind.name, None if environment is None else tuple(sorted(environment.items())))
