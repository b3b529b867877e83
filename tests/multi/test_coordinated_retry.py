"""Memory runs out on one rank of several that shard one model: all abort and retry the pass, and the run is the same.

The model has wires at every place where a rank may fail: before, in and after its units, in the loss, and in the
backward of each. All runs of one test share their processes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from accelerate import Accelerator
from accelerate.distributed.collectives import MaxReducer
from accelerate.errors import CollectiveError, MemoryExhausted
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.handlers import GradientAccumulationPlugin
from accelerate.training.oom_retry import CoordinatedPass
from tests import mesh_runs
from tests.ranks import run_on_ranks
from tests.sharded_runs import Block
from tests.slow import IS_SLOW, mostly_slow, slow_for

NUM_MICRO_BATCHES = 6
ACCUMULATION = 2
GLOBAL_BATCH = 8
RAGGED = [8, 8, 8, 5, 3, 7]
WHERE = ("before the units", "in unit 0", "in unit 1", "after the units", "loss")
PLACES = [(where, way) for where in WHERE for way in ("forward", "backward")]


KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_version": 2},
    "fsdp1": {"fsdp_version": 1, "use_orig_params": True},
    "fsdp1 of flat parameters": {"fsdp_version": 1, "use_orig_params": False},
}
slow = slow_for("many meshes", "meshes")
# torch, of an output that is a view, under tensor parallelism
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


class OutOfMemory(RuntimeError):
    """What torch's own error says."""

    def __init__(self) -> None:
        super().__init__("CUDA out of memory. Tried to allocate 20.00 MiB")


class Device:
    """At one place of the pass no more than ``limit`` samples fit, from one micro-batch on."""

    def __init__(self, place: tuple[str, str] | None, limit: int, since: int) -> None:
        self.place, self.limit, self.since = place, limit, since
        self.micro_batch = self.failures = 0

    def allocate(self, place: tuple[str, str], size: int) -> None:
        if place == self.place and self.micro_batch >= self.since and size > self.limit:
            self.failures += 1
            raise OutOfMemory


class _Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Device, where: str, size: int) -> torch.Tensor:
        ctx.wire = (device, where, size)
        device.allocate((where, "forward"), size)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        device, where, size = ctx.wire
        device.allocate((where, "backward"), size)
        return gradients[0], None, None, None


class Wired(nn.Module):
    """Two units between layers of the root's own, with a wire at each place."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.entrance, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        units = [Block(), Block()]
        self.layers = nn.ModuleList(units)
        for number, unit in enumerate(units):
            unit.up.register_forward_hook(functools.partial(self._trip, f"in unit {number}"))

    def _trip(self, where: str, _: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return self.wire(where, output)

    def wire(self, where: str, x: torch.Tensor, size: int | None = None) -> torch.Tensor:
        return _Wire.apply(x, self.device, where, len(x) if size is None else size)  # pyright: ignore[reportReturnType]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wire("before the units", self.entrance(x))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.wire("after the units", hidden))


def _batches(sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(n, 8, generator=generator), torch.randint(0, 8, (n,), generator=generator)) for n in sizes]


def _alone(sizes: list[int]) -> dict[str, torch.Tensor]:
    """The weights of a plain loop over the global batches."""
    torch.manual_seed(0)
    model = Wired(Device(None, 0, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(_batches(sizes), start=1):
        (nn.functional.cross_entropy(model(x), y) / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def _reference(sizes: list[int]) -> dict[str, torch.Tensor]:
    """Those weights, computed in a process of their own: on a device, a process that has computed can't fork ranks."""
    return run_on_ranks(_alone, 1, sizes)[0]


def _prepared(device: Device, options: dict[str, Any], *, precision: str = "no", syncs_each: bool = False) -> Any:
    """An Accelerator, a wired model and its optimizer."""
    gc.freeze()  # what the process was forked with need not be looked through after every failure
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(ACCUMULATION, sync_each_batch=syncs_each),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], **options
        ),
    )
    torch.manual_seed(0)
    model = Wired(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator, *accelerator.prepare(model, optimizer)


def _train(
    place: tuple[str, str] | None,
    options: dict[str, Any],
    *,
    since: int = 0,
    limit: int = 1,
    oom_rank: int = 1,
    micro_batches: int = NUM_MICRO_BATCHES,
    sizes: list[int] | None = None,
    precision: str = "no",
    syncs_each: bool = False,
    **asked: Any,
) -> dict[str, Any]:
    device = Device(place, limit, since)
    accelerator, model, optimizer = _prepared(device, options, precision=precision, syncs_each=syncs_each)
    rank, count = accelerator.process_index, accelerator.num_processes
    if rank != oom_rank:
        device.place = None
    whole = 0

    def compute_loss(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(part[0]), part[1], reduction="sum") * count / whole
        return accelerator.unwrap_model(model).wire("loss", loss, len(part[0]))

    for x, y in _batches(sizes or [GLOBAL_BATCH] * micro_batches):
        whole = len(x)
        with accelerator.accumulate(model):
            accelerator.backward_in_parts(compute_loss, (x[rank::count], y[rank::count]), reduction="sum", **asked)
            optimizer.step()
            optimizer.zero_grad()
        device.micro_batch += 1
    weights = accelerator.get_state_dict(model)
    result = {
        "weights": weights,
        "failures": device.failures,
        "parts": getattr(accelerator._micro_batches, "num_parts", 1),
    }
    accelerator.free_memory()
    return result


def _all_places(options: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    return [_train(place, options, **how) for place in PLACES]


def _assert_as_alone(run: dict[str, Any], reference: dict[str, torch.Tensor], what: Any) -> None:
    for name, value in reference.items():
        torch.testing.assert_close(run["weights"][name], value, rtol=1e-6, atol=1e-6, msg=f"{what}: {name} differs")


@pytest.mark.parametrize("since", [pytest.param(0, marks=slow), 1, pytest.param(2, marks=slow)])
@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["fsdp2"], slow))
def test_wherever_memory_runs_out_all_ranks_split_and_the_update_stays(kind: str, since: int) -> None:
    reference = _reference([GLOBAL_BATCH] * NUM_MICRO_BATCHES)
    main, full = run_on_ranks(functools.partial(_all_places, KINDS[kind], since=since), 2)
    for place, run, other in zip(PLACES, main, full, strict=True):
        assert (run["failures"], run["parts"]) == (0, 4), place
        assert other["failures"] > 0 and other["parts"] == 4, place
        _assert_as_alone(run, reference, place)


def _variants(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    place = ("in unit 0", "backward")
    return {
        "the main process": _train(place, options, since=1, oom_rank=0),
        "a proved shape": _train(place, options, since=4, always_careful=True),
        "sharded gradients from before": _train(place, options, since=1, syncs_each=True),
        "parts from the start": _train(place, options, num_parts=4),
        "ragged batches": _train(place, options, since=1, sizes=RAGGED),
        "recomputed activations": _train(place, {**options, "activation_checkpointing": True}, since=1),
    }


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["fsdp2"], slow))
def test_whatever_came_before_the_update_stays(kind: str) -> None:
    reference, ragged = _reference([GLOBAL_BATCH] * NUM_MICRO_BATCHES), _reference(RAGGED)
    runs, others = run_on_ranks(functools.partial(_variants, KINDS[kind]), 2)
    for name, run in runs.items():
        failures = run["failures"] + others[name]["failures"]
        assert run["parts"] == others[name]["parts"] == 4 and bool(failures) == (name != "parts from the start"), name
        _assert_as_alone(run, ragged if name == "ragged batches" else reference, name)


def _failed_and_smooth() -> list[dict[str, Any]]:
    place = ("in unit 0", "backward")
    return [_train(place, KINDS["fsdp2"], precision="bf16", since=since) for since in (1, 99)]


def test_gradients_kept_in_another_dtype_are_put_back() -> None:
    """In bf16 with reduction in float32, those of passes without reduction are elsewhere than the parameters'."""
    (failed, smooth), (full, _) = run_on_ranks(_failed_and_smooth, 2)
    assert full["failures"] and not smooth["failures"]
    for name, value in smooth["weights"].items():
        torch.testing.assert_close(failed["weights"][name], value, rtol=0.02, atol=0.005, msg=name)


def _with_full_torch(operation: str, call: int) -> dict[str, Any]:
    """Memory runs out in torch's own ``operation``, at one of its calls in the third micro-batch."""
    inner = getattr(_fsdp_param_group, operation)
    calls = failures = 0

    def full(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls, failures
        calls += 1
        if calls == call and torch.distributed.get_rank() == 1:
            failures += 1
            raise OutOfMemory
        return inner(*args, **kwargs)

    setattr(_fsdp_param_group, operation, full)
    try:
        return {**_train(None, KINDS["fsdp2"], micro_batches=4), "failures": failures}
    finally:
        setattr(_fsdp_param_group, operation, inner)


def _all_of_torch() -> list[dict[str, Any]]:
    return [_with_full_torch(*place) for place in TORCH_PLACES]


TORCH_PLACES = [("foreach_all_gather", call) for call in (1, 2, 3, 4, 7)] + [
    ("foreach_reduce", 1),
    ("foreach_reduce", 3),
]


def test_gathering_and_reducing_may_run_out_themselves() -> None:
    reference = _reference([GLOBAL_BATCH] * 4)
    for place, run, other in zip(TORCH_PLACES, *run_on_ranks(_all_of_torch, 2), strict=True):
        assert (run["failures"], other["failures"], run["parts"], other["parts"]) == (0, 1, 2, 2), place
        _assert_as_alone(run, reference, place)


def _fail_otherwise() -> tuple[str, bool, int]:
    accelerator, model, optimizer = _prepared(Device(None, 0, 0), KINDS["fsdp2"])
    (x, y), *_ = _batches([4])
    armed = accelerator.process_index == 1

    def compute_loss(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(part[0]), part[1])
        if armed:
            raise ValueError("a mistake")
        return loss

    try:
        accelerator.backward_in_parts(compute_loss, (x, y))
        said = "nothing"
    except (ValueError, CollectiveError) as error:
        said = f"{type(error).__name__}: {error}"
    untouched = all(parameter.grad is None for parameter in model.parameters())
    armed = False
    accelerator.backward_in_parts(compute_loss, (x, y))  # both go on
    optimizer.step()
    return said, untouched, sum(parameter.grad is not None for parameter in model.parameters())


def test_another_error_on_one_rank_ends_the_wait_of_the_others() -> None:
    (other, untouched, here), (said, untouched_too, there) = run_on_ranks(_fail_otherwise, 2)
    assert said == "ValueError: a mistake" and untouched and untouched_too
    assert other.startswith("CollectiveError: Rank 1 failed while the ranks computed a batch together")
    assert here == there > 0


def _count_exchanges(lengths: Callable[[int, int], int], options: dict[str, Any]) -> list[tuple[int, int]]:
    """By batch how often the ranks told each other something beside the strategy's own, and how often carefully."""
    accelerator, model, optimizer = _prepared(Device(None, 0, 0), options)
    counts = [0, 0]
    inner, run = MaxReducer.largest, CoordinatedPass.run

    def largest(self: MaxReducer, *numbers: int) -> list[int]:
        counts[0] += 1
        return inner(self, *numbers)

    def counted(self: CoordinatedPass, compute: Any) -> Any:
        counts[1] += 1
        return run(self, compute)

    MaxReducer.largest, CoordinatedPass.run = largest, counted
    found: list[tuple[int, int]] = []
    for number in range(24):
        counts[:] = [0, 0]
        x = torch.randn(lengths(number, accelerator.process_index), 8)
        accelerator.backward_in_parts(lambda part: model(part).square().mean(), x)
        optimizer.step()
        optimizer.zero_grad()
        found.append((counts[0], counts[1]))
    return found


def test_once_the_shape_has_proved_to_fit_nothing_is_exchanged() -> None:
    for found in run_on_ranks(functools.partial(_count_exchanges, lambda _number, _rank: 4, KINDS["fsdp2"]), 2):
        assert [careful for _, careful in found] == [1, 1] + [0] * 22
        assert [said for said, _ in found][2:] == [1] * 16 + [0] * 6


def test_where_shapes_vary_ranks_go_on_telling_each_other() -> None:
    """A batch that is larger than all before on one rank is computed carefully on both."""
    lengths = functools.partial(_longer_on_one, at=22)
    for found in run_on_ranks(functools.partial(_count_exchanges, lengths, KINDS["fsdp2"]), 2):
        assert [careful for _, careful in found] == [1, 1, 1] + [0] * 19 + [1, 0]
        assert [said for said, _ in found][3:22] == [1] * 19


def _longer_on_one(number: int, rank: int, at: int) -> int:
    return 3 + (number >= 2) + 2 * (number == at and rank == 1)


def _draw() -> tuple[list[float], float]:
    accelerator, model, _ = _prepared(Device(None, 0, 0), KINDS["fsdp2"])
    drawn: list[float] = []

    def compute_loss(part: torch.Tensor) -> torch.Tensor:
        drawn.append(float(torch.rand(())))
        if len(part) > 2 and accelerator.process_index == 1:
            raise OutOfMemory
        return model(part).mean()

    torch.manual_seed(3)
    accelerator.backward_in_parts(compute_loss, torch.ones(4, 8))
    return drawn, float(torch.rand(()))


def test_random_numbers_are_drawn_again_on_every_rank() -> None:
    (here, next_here), (there, next_there) = run_on_ranks(_draw, 2)
    assert here == there and len(here) == 3 and here[0] == here[1] != here[2]
    assert next_here == next_there


def _too_large() -> str:
    accelerator, model, _ = _prepared(Device(None, 0, 0), KINDS["fsdp2"])

    def compute_loss(part: torch.Tensor) -> torch.Tensor:
        loss = model(part).mean()
        if accelerator.process_index == 1:
            raise OutOfMemory
        return loss

    try:
        accelerator.backward_in_parts(compute_loss, torch.ones(4, 8))
    except MemoryExhausted as error:
        return str(error)
    return "nothing"


def test_one_sample_that_does_not_fit_is_said_on_all_ranks() -> None:
    for said in run_on_ranks(_too_large, 2):
        assert said.startswith("One sample at a time (a batch of 4 in 4 parts) ran out of memory")


# ----------------------------------------------------------------------------------------- pieces of layers

MODULES = ("embedding", "layers.0.self_attn.value", "layers.1.down", "head")
MODULE_PLACES = [(name, way) for name in MODULES for way in ("forward", "backward")]
if not IS_SLOW:
    MODULE_PLACES = [("layers.1.down", "backward")]


def _full_at(model: nn.Module, device: Device) -> None:
    """The modules of MODULES ask ``device`` for memory, in forward and in backward."""

    def ask(name: str, _: Any, __: Any, output: torch.Tensor) -> None:
        size = len(output)
        device.allocate((name, "forward"), size)
        output.register_hook(lambda _: device.allocate((name, "backward"), size))

    for name in MODULES:
        model.get_submodule(name).register_forward_hook(functools.partial(ask, name))


def _train_on_mesh(place: tuple[str, str] | None, updates: int = 2, **mesh: Any) -> dict[str, Any]:
    gc.freeze()
    run = mesh_runs.accelerator(**mesh)
    model, optimizer, schedule, loader = mesh_runs.prepared(run, updates=updates)
    device = Device(place if run.is_last_process else None, 1, 1)
    _full_at(run.unwrap_model(model), device)

    def compute_loss(part: tuple[torch.Tensor, ...]) -> torch.Tensor:
        words, places, following = part
        return mesh_runs.mean_loss(model(words, places), following)

    for words, following in loader:
        places = torch.arange(mesh_runs.LENGTH).repeat(len(words), 1)
        buffers = [words, following, places]
        with (
            run.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)),
            run.accumulate(model),
        ):
            run.backward_in_parts(compute_loss, (words, places, following))
            if run.sync_gradients:
                run.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        device.micro_batch += 1
    weights = {name: value.tolist() for name, value in run.get_state_dict(model).items()}
    result = {"weights": weights, "failures": device.failures, "parts": getattr(run._micro_batches, "num_parts", 1)}
    run.free_memory()
    return result


def _all_modules(**mesh: Any) -> list[dict[str, Any]]:
    return [_train_on_mesh(place, **mesh) for place in MODULE_PLACES]


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"degrees": {"tp": 2}}),
    "cp": (2, {"fsdp": mesh_runs.V2, "degrees": {"cp": 2}}),
    "hsdp": (4, {"fsdp": mesh_runs.V2, "degrees": {"dp_replicate": 2, "dp_shard": 2}}),
    "tp x fsdp2": (4, {"fsdp": mesh_runs.V2, "degrees": {"dp_shard": 2, "tp": 2}}),
    "cp, a ring": (2, {"fsdp": mesh_runs.V2, "degrees": {"cp": 2}, "communication": "alltoall"}),
    "sp": (2, {"degrees": {"sp": 2}}),
}


@pytest.mark.parametrize("name", mostly_slow(MESHES, ["tp"], slow))
def test_ranks_that_share_samples_give_a_pass_up_too(name: str) -> None:
    count, mesh = MESHES[name]
    reference = run_on_ranks(functools.partial(mesh_runs.train, updates=2), 1)[0]["weights"]
    for place, *runs in zip(MODULE_PLACES, *run_on_ranks(functools.partial(_all_modules, **mesh), count), strict=True):
        assert [run["failures"] > 0 for run in runs] == [False] * (count - 1) + [True], place
        assert len({run["parts"] for run in runs}) == 1 and runs[0]["parts"] > 1, place
        for weight, value in reference.items():
            torch.testing.assert_close(
                torch.tensor(runs[0]["weights"][weight]),
                torch.tensor(value),
                rtol=1e-4,
                atol=1e-4,
                msg=f"{place}: {weight}",
            )
