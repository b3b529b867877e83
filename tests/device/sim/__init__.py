"""An imitation of an accelerator: torch's device type ``sim``, for tests on machines that have none.

Its memory can't be touched by the host, it has several devices, streams that work later, events, a generator per
device, memory limits, pinned host memory, autocast, and process groups. Its kernels are those of the CPU, on its own
memory.

``start()`` builds the extension once per machine (about a minute) and makes ``torch.sim`` known, and the kind of device
to ``accelerate``.
"""

from __future__ import annotations

import sys

import torch

from . import build, module

#: Its row among the kinds of devices.
ROW_OPTIONS = {
    "name": "sim", "label": "MULTI_GPU", "module": "torch.sim", "backend": "simccl",
    "visible_devices": module.VISIBLE,
}  # fmt: skip


def start() -> None:
    """Make ``torch.sim`` known to torch, and its row to ``accelerate``; once per process."""
    if hasattr(torch, "sim"):
        return
    torch.utils.rename_privateuse1_backend("sim")
    module.load(build.load())
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.distributed.Backend.register_backend("simccl", _make_group, devices=["sim"])
    from accelerate.devices import table

    kinds = (table.DeviceKind(**ROW_OPTIONS), *table.KINDS)
    for name, imported in list(sys.modules.items()):  # those that have imported the table's rows already, too
        if name.startswith("accelerate") and hasattr(imported, "KINDS"):
            imported.KINDS = kinds  # type: ignore[attr-defined]


def _make_group(store: object, rank: int, size: int, timeout: object) -> object:
    gloo = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    return module._sim.make_backend(gloo)
