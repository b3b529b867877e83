"""``TEST_DEVICE=sim pytest -p tests.device.plugin FILES``: tests of the CPU with ranks on the imitated accelerator.

``TEST_DEVICE=cuda`` gives all ranks the first CUDA device, joined by gloo: NCCL refuses a device twice.

What a test asks of the CPU it gets on the device: ``Accelerator(cpu=True)`` takes the device, and values that are
compared are read back first. Each test runs in a fork, because a process that has used a device can't fork ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from tests.device import sim
from tests.device.left_out import LEFT_OUT

LIMIT_SECONDS = 300
DEVICE = os.environ.get("TEST_DEVICE", "sim")
_TESTS = str(Path(__file__).resolve().parent.parent)
_PLACES = {"copy_", "to", "__set__", "__setitem__"}  # they take tensors of two places


def pytest_configure(config: pytest.Config) -> None:
    os.environ["TEST_DEVICE"] = DEVICE  # read by tests/ranks.py
    # Torch's own FSDP 1 brings it about, under plain torch too.
    config.addinivalue_line("filterwarnings", "ignore:The AccumulateGrad node's stream does not match")
    # Torch's own too, where the backward's thread is the first to multiply.
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS, but there was no current CUDA context")
    if DEVICE == "sim":
        os.environ["SIM_DEVICES"] = "8"  # whatever rank's tensors a test reads
        sim.start()
    else:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has asked the driver can't fork ranks
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"{DEVICE}:0"
        _join_by_gloo()
    _take_the_device()
    for owner, name in (
        (torch, "equal"), (torch, "allclose"), (torch.testing, "assert_close"), (torch.Tensor, "equal"),
        (torch.Tensor, "allclose"),
    ):  # fmt: skip
        setattr(owner, name, _on_host(getattr(owner, name)))


def _join_by_gloo() -> None:
    from accelerate.distributed import world

    choose = world._choose_backend

    @wraps(choose)
    def chosen(kind: Any, identity: Any, requested: str | None) -> str:
        return choose(kind, identity, requested or "gloo")

    world._choose_backend = chosen


def _take_the_device() -> None:
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState

    for owner in (Accelerator, PartialState, AcceleratorState):
        made = owner.__init__

        @wraps(made)
        def make(self: Any, *arguments: Any, made: Callable[..., None] = made, **options: Any) -> None:
            options.pop("cpu", None)
            made(self, *arguments, **options)

        owner.__init__ = make  # type: ignore[method-assign]

    prepare = Accelerator.prepare_model

    @wraps(prepare)
    def prepare_model(self: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        prepared = prepare(self, model, *arguments, **options)
        prepared.register_forward_pre_hook(_move_inputs, with_kwargs=True)
        return prepared

    Accelerator.prepare_model = prepare_model  # type: ignore[method-assign]
    _Mixed().__enter__()


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE) if value.device.type == "cpu" and value.dim() else value
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_moved(one) for one in value)
    if type(value) is dict:
        return {name: _moved(one) for name, one in value.items()}
    return value


def _move_inputs(model: torch.nn.Module, inputs: Any, named: Any) -> Any:
    place = next(model.parameters(), None)
    return None if place is None or place.device.type != DEVICE else (_moved(inputs), _moved(named))


class _Mixed(TorchFunctionMode):
    """Moves what a test made on the CPU to the device, where the test itself uses the two together."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _caller().startswith(_TESTS) and func.__name__ not in _PLACES:
            flat = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if len({value.device.type for value in flat if value.dim()}) > 1:
                args, kwargs = _moved(args), _moved(kwargs)
        return func(*args, **kwargs)


def _caller() -> str:
    """The file that calls the function at hand; torch's own in Python ask the mode from inside."""
    frame = sys._getframe(2)
    if frame.f_code is handle_torch_function.__code__:
        frame = frame.f_back.f_back  # type: ignore[union-attr]
    return frame.f_code.co_filename  # type: ignore[union-attr]


def _on_host(compare: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compare)
    def compared(*values: Any, **options: Any) -> Any:
        return compare(*(value.cpu() if isinstance(value, torch.Tensor) else value for value in values), **options)

    return compared


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = "/".join(item.path.parts[-2:])
        reason = LEFT_OUT.get(f"{file}::{item.name}") or LEFT_OUT.get(f"{file}::{item.name.partition('[')[0]}")
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run the test in a fork; its error comes back as text, what it noted for tables as it is."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        sender.send_bytes(pickle.dumps(_outcome(pyfuncitem)))
        os._exit(0)
    sender.close()
    try:
        if not receiver.poll(LIMIT_SECONDS):
            os.kill(child, 9)
        kind, text, noted = pickle.loads(receiver.recv_bytes())
    except EOFError:
        kind, text, noted = "failed", "", []
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    pyfuncitem.user_properties[:] = noted
    if kind == "skipped":
        pytest.skip(text)
    if kind == "failed":
        pytest.fail(text or f"the test's process ended with {status}", pytrace=False)
    return True


def _outcome(item: pytest.Function) -> tuple[str, str, list[Any]]:
    try:
        names = item._fixtureinfo.argnames
        item.obj(**{name: item.funcargs[name] for name in names})
    except pytest.skip.Exception as skipped:
        return "skipped", str(skipped), []
    except BaseException:
        return "failed", traceback.format_exc(), []
    return "passed", "", item.user_properties
