"""Muon and other optimizers of whole matrices on real ranks: bit by bit the update of one process, given its gradients.

The fast part has each kind of layout once; ``RUN_SLOW=1`` has them all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate import Accelerator
from accelerate.checkpointing.sharded import gather_tensor, shard_like
from accelerate.errors import PreparationError
from accelerate.parallel import matrix_optimizer
from accelerate.parallel.matrix_optimizer import _STEPS
from accelerate.plugins.parallelism import (
    ExpertParallelConfig,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchTensorParallelConfig,
)
from accelerate.state import AcceleratorState
from tests.ranks import run_on_ranks
from tests.sharded_runs import BLOCKS, Network, plugin_of, samples
from tests.slow import slow_for
from tests.torch_needed import FSDP2_ON_CPU

pytestmark = [
    FSDP2_ON_CPU,
    # torch's own, where a test gathers a parameter that is sharded over two axes in one dimension
    pytest.mark.filterwarnings("ignore:While redistributing"),
]
slow = slow_for("many layouts", "meshes")
V2: dict[str, Any] = {"fsdp_version": 2}
FULL: dict[str, Any] = {**V2, "state_dict_type": "FULL_STATE_DICT"}
SHARDED: dict[str, Any] = {**V2, "state_dict_type": "SHARDED_STATE_DICT"}
PLAN = {"entrance": "colwise_gather_output", "head": "rowwise_split_input"}


def tensor_parallel(dp_shard_size: int = 1) -> ParallelismConfig:
    handler = TorchTensorParallelConfig(plan=PLAN)
    return ParallelismConfig(tp_size=2, dp_shard_size=dp_shard_size, tp_handler=handler)


#: By name: ranks, options of FSDP, the mesh.
LAYOUTS: dict[str, tuple[int, dict[str, Any] | None, Callable[[], ParallelismConfig] | None]] = {
    "one": (1, None, None),
    "one rank": (1, V2, None),
    "two ranks": (2, V2, None),
    "four ranks": (4, V2, None),
    "offloaded": (2, {**V2, "cpu_offload": True}, None),
    "gathered": (2, FULL, None),
    "replicas of shards": (4, V2, lambda: ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)),
    "layers cut": (2, None, tensor_parallel),
    "layers cut and shards": (4, V2, lambda: tensor_parallel(dp_shard_size=2)),
    "experts apart": (
        4,
        V2,
        lambda: ParallelismConfig(ep_size=2, dp_shard_size=2, ep_handler=ExpertParallelConfig(plan=["experts"])),
    ),
}


class Experts(nn.Module):
    """The stacked matrices of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, 6))

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the tokens; these tests give gradients."""
        return tokens


class Model(nn.Module):
    """Layers with rows for all ranks, for some and for one, and a matrix for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.entrance, self.up, self.few = nn.Linear(8, 12), nn.Linear(12, 17), nn.Linear(17, 1)
        self.head, self.experts = nn.Linear(8, 6), Experts()


class Whitened(torch.optim.Optimizer):
    """A user's optimizer: states of several shapes, a count of its own in each group, an inverse of a matrix."""

    needs_whole_matrices = True

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update along the average gradient, divided by the gradients' second moment along the rows."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                assert not isinstance(parameter, DTensor)
                if not state:
                    state["count"] = torch.tensor(0.0)
                    state["average"] = torch.zeros_like(parameter)
                    if parameter.ndim > 1:
                        state["rows"] = torch.eye(parameter.shape[-2]).expand(*parameter.shape[:-1], -1).clone()
                state["count"] += 1
                state["average"].lerp_(gradient, 0.1)
                update = state["average"]
                if parameter.ndim > 1:
                    state["rows"].add_(gradient @ gradient.mT)
                    update = torch.linalg.solve(state["rows"], update)
                parameter.sub_(update * group["lr"] / state["count"])
        return loss


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)


def whitened(model: nn.Module) -> torch.optim.Optimizer:
    return Whitened(model.parameters())


Make = Callable[[nn.Module], torch.optim.Optimizer]
MAKERS: tuple[Make, ...] = (muon, whitened)


def begin(layout: str, make: Make) -> tuple[Accelerator, nn.Module, Any]:
    _, options, config = LAYOUTS[layout]
    extra: dict[str, Any] = {} if config is None else {"parallelism_config": config()}
    AcceleratorState._reset_state()  # several runs share a world, which takes longer to form than they take
    run = Accelerator(cpu=True, fsdp_plugin=plugin_of(options), **extra)
    torch.manual_seed(0)
    model = Model()
    return run, *run.prepare(model, make(model))


def set_gradients(model: nn.Module, optimizer: Any, update: int) -> None:
    """Give every parameter of the optimizer the gradient that it has in any layout."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in trained:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {update}".encode()))
            parameter.grad = shard_like(torch.randn(parameter.shape, generator=generator), parameter)


def steps(model: nn.Module, optimizer: Any, updates: range) -> None:
    for update in updates:
        set_gradients(model, optimizer, update)
        optimizer.step()
        optimizer.zero_grad()


def everything(run: Accelerator, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return all weights and all state, as lists; empty off the main process."""
    weights = run.get_state_dict(model)
    state = run.strategy.state.access.full_optimizer_state(optimizer.optimizer, [model], bool(run.is_main_process))
    flat = {
        f"{number}.{name}": value for number, values in state.get("state", {}).items() for name, value in values.items()
    }
    groups = [{**group, "params": len(group["params"])} for group in state.get("param_groups", ())]
    found = {**weights, **flat} if run.is_main_process else {}
    return {"groups": groups, **{name: value.tolist() for name, value in found.items()}}


def train(layout: str, num_updates: int = 4) -> list[dict[str, Any]]:
    """Return the weights and states after a training by each optimizer."""
    found: list[dict[str, Any]] = []
    for make in MAKERS:
        run, model, optimizer = begin(layout, make)
        steps(model, optimizer, range(num_updates))
        found.append(everything(run, model, optimizer))
    return found


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    """The runs of one process: groups, weights and states."""
    found = run_on_ranks(train, 1, "one")[0]
    assert [len(run) for run in found] == [1 + 9 + 4, 1 + 9 + 9 * 2 + 5]
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        ["four ranks", "replicas of shards", "layers cut and shards", "experts apart"],
        pytest.param(["one rank"], marks=slow),
        pytest.param(["two ranks", "offloaded", "gathered", "layers cut"], marks=slow),
    ],
    ids=["four", "one", "two"],
)
def test_the_update_has_the_bits_of_one_process(layouts: list[str], alone: list[dict[str, Any]]) -> None:
    found = run_on_ranks(lambda: {layout: train(layout) for layout in layouts}, LAYOUTS[layouts[0]][0])[0]
    for layout in layouts:
        assert found[layout] == alone, layout


@slow
def test_stages_of_a_pipeline_are_updated_by_their_own_ranks() -> None:
    def go(in_stages: bool) -> dict[str, Any]:
        config = ParallelismConfig(
            pp_size=2, dp_shard_size=2, pp_handler=PipelineParallelConfig(num_micro_batches=2)
        ) if in_stages else None  # fmt: skip
        plugin = plugin_of({**FULL, **BLOCKS} if in_stages else None)
        run = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
        torch.manual_seed(0)
        model = Network()
        loader = torch.utils.data.DataLoader(samples(8), batch_size=4)
        model, optimizer, _ = run.prepare(model, muon(model), loader)
        steps(model, optimizer, range(3))
        return everything(run, model, optimizer)

    found, alone = run_on_ranks(go, 4, True)[0], run_on_ranks(go, 1, False)[0]
    assert len(found) > 6 and found == alone


def test_flat_parameters_are_refused() -> None:
    def go() -> str:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of({"fsdp_version": 1, **BLOCKS}))
        model = Network()
        with pytest.raises(PreparationError) as caught:
            run.prepare(model, muon(model))
        return str(caught.value)

    assert all("Muon needs whole matrices" in text and "fsdp_version=2" in text for text in run_on_ranks(go, 2))


# ------------------------------------------------------------------------------------------- what is sent


class Collectives(TorchDispatchMode):
    """The names of the collectives that are called in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func._opname:
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_step_sends_each_bucket_twice_and_owners_have_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight matrices on four ranks: in one bucket, or so that two tensors fill one, a matrix and its gradient."""

    def count(bucket_bytes: int) -> tuple[list[str], list[int]]:
        monkeypatch.setattr(matrix_optimizer, "BUCKET_BYTES", bucket_bytes)
        AcceleratorState._reset_state()
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of(V2))
        model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(8)))
        prepared: Any = run.prepare(model, muon(model))
        model, optimizer = prepared
        steps(model, optimizer, range(1))
        set_gradients(model, optimizer, 1)
        with Collectives() as collectives:
            optimizer.step()
        owners = [matrix.owner for matrix in _STEPS[optimizer.optimizer]._matrices.values()]
        return collectives.names, [owners.count(rank) for rank in range(4)]

    one = 12 * 12 * 4
    for in_one_bucket, in_eight in run_on_ranks(lambda: (count(16 * one), count(2 * one // 4)), 4):
        assert in_one_bucket == (["alltoall_base_"] * 2, [2] * 4)
        assert in_eight == (["alltoall_base_"] * (8 + 4), [2] * 4)


# ------------------------------------------------------------------------------------------- in a training


def accumulate_and_clip(options: dict[str, Any] | None) -> dict[str, Any]:
    """Train with Muon, AdamW, accumulation, clipping and a schedule, and repeat each of Muon's updates beside it."""
    run = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin_of(options))
    torch.manual_seed(0)
    model = Network()
    matrices, rest = muon(model), torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(matrices, lambda count: 0.9 ** (count // run.num_processes))
    loader = torch.utils.data.DataLoader(samples(64), batch_size=8 // run.num_processes)
    model, matrices, rest, schedule, loader = run.prepare(model, matrices, rest, schedule, loader)
    trained = [p for p in model.parameters() if p.ndim == 2]
    beside = [nn.Parameter(gather_tensor(p).clone()) for p in trained]
    reference = torch.optim.Muon(beside, lr=0.02)
    equal, losses, rates, norms = [], [], [], []
    for inputs, classes in loader:
        with run.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), classes)
            run.backward(loss)
            if run.sync_gradients:
                norms.append(float(run.clip_grad_norm_(model.parameters(), 0.1)))
                reference.param_groups[0]["lr"] = matrices.param_groups[0]["lr"]
                for whole, parameter in zip(beside, trained, strict=True):
                    whole.grad = gather_tensor(parameter.grad)  # pyright: ignore[reportArgumentType]
                reference.step()
            matrices.step()
            rest.step()
            schedule.step()
            matrices.zero_grad()
            rest.zero_grad()
        equal += [torch.equal(gather_tensor(p), whole) for p, whole in zip(trained, beside, strict=True)]
        losses.append(float(run.reduce(loss.detach(), "mean")))
        rates.append(matrices.param_groups[0]["lr"])
    return {"equal": equal, "losses": losses, "rates": rates, "norms": norms}


def test_accumulation_clipping_schedules_and_a_second_optimizer_go_on_as_ever() -> None:
    reference = run_on_ranks(accumulate_and_clip, 1, None)[0]
    for found in run_on_ranks(accumulate_and_clip, 2, {**V2, **BLOCKS}):
        assert len(found["equal"]) == 8 * 6 and all(found["equal"])
        assert found["rates"] == reference["rates"] and len(set(found["rates"])) == 5
        # Sums of gradients over ranks round differently, and Muon computes in bfloat16.
        torch.testing.assert_close(
            torch.tensor(found["losses"]), torch.tensor(reference["losses"]), rtol=1e-2, atol=1e-2
        )
        torch.testing.assert_close(torch.tensor(found["norms"]), torch.tensor(reference["norms"]), rtol=5e-2, atol=1e-3)


def test_a_group_that_needs_no_whole_matrices_is_updated_in_shards() -> None:
    def go() -> list[bool]:
        seen: list[bool] = []

        class Both(torch.optim.Optimizer):
            needs_whole_matrices = True

            def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
                seen.extend(isinstance(p, DTensor) for group in self.param_groups[1:] for p in group["params"])

        def make(model: nn.Module) -> torch.optim.Optimizer:
            matrices = [p for p in model.parameters() if p.ndim > 1]
            rest = [p for p in model.parameters() if p.ndim == 1]
            return Both([{"params": matrices}, {"params": rest, "needs_whole_matrices": False}], {})

        _, model, optimizer = begin("two ranks", make)
        steps(model, optimizer, range(1))
        return seen

    assert run_on_ranks(go, 2) == [[True] * 4] * 2


class Both(torch.optim.Optimizer):
    """A user's wrapper of two optimizers, which steps them."""

    def __init__(self, model: nn.Module) -> None:
        rest = torch.optim.SGD([p for p in model.parameters() if p.ndim != 2], lr=0.1, momentum=0.9)
        self.optimizers: list[torch.optim.Optimizer] = [muon(model), rest]
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})

    @property
    def state(self) -> Any:
        """The states of both."""
        return {parameter: state for one in self.optimizers for parameter, state in one.state.items()}

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Take nothing: torch's __init__ has none yet."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step both."""
        for one in self.optimizers:
            one.step()


def test_muon_inside_of_a_users_own_optimizer_has_whole_matrices_too() -> None:
    """Its state is saved through the user's optimizer."""

    def go(layout: str) -> dict[str, Any]:
        run, model, optimizer = begin(layout, Both)
        steps(model, optimizer, range(3))
        return everything(run, model, optimizer)

    found, alone = run_on_ranks(go, 2, "two ranks")[0], run_on_ranks(go, 1, "one")[0]
    assert len(found) == 1 + 9 + 9 and found == alone


def test_a_closure_computes_the_gradients_and_a_step_that_raises_leaves_the_parameters(
    alone: list[dict[str, Any]],
) -> None:
    def go() -> tuple[float, dict[str, Any], list[bool]]:
        run, model, optimizer = begin("two ranks", whitened)

        def closure() -> float:
            set_gradients(model, optimizer, 0)
            return 2.5

        loss = optimizer.step(closure)
        steps(model, optimizer, range(1, 2))
        fails = optimizer.optimizer.register_step_pre_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            steps(model, optimizer, range(2, 3))
        fails.remove()
        steps(model, optimizer, range(2, 4))
        parameters = {id(parameter) for parameter in model.parameters()}
        kept = [id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]]
        return loss, everything(run, model, optimizer), kept

    def _raise(*_: Any) -> None:
        raise ZeroDivisionError

    (loss, found, kept), (_, _, kept_by_the_other) = run_on_ranks(go, 2)
    assert loss == 2.5 and found == alone[1]
    assert len(kept) == 9 and all(kept) and all(kept_by_the_other)


# ---------------------------------------------------------------------------------------------- checkpoints

JOURNEYS = [
    ("four ranks", SHARDED, "two ranks", SHARDED),
    pytest.param("four ranks", SHARDED, "one", None, marks=slow),
    pytest.param("replicas of shards", FULL, "layers cut", None, marks=slow),
    pytest.param("one", None, "four ranks", FULL, marks=slow),
    pytest.param("layers cut", None, "replicas of shards", SHARDED, marks=slow),
]


@pytest.mark.parametrize(("before", "saved", "after", "loaded"), JOURNEYS)
def test_state_goes_on_in_another_layout(
    before: str,
    saved: dict[str, Any] | None,
    after: str,
    loaded: dict[str, Any] | None,
    alone: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Also when it is saved again right after it was loaded, and trained on by those who saved."""

    def begin_with(layout: str, options: dict[str, Any] | None, make: Make) -> tuple[Accelerator, nn.Module, Any]:
        ranks, _, config = LAYOUTS[layout]
        LAYOUTS[layout] = (ranks, options, config)
        return begin(layout, make)

    def save(make: Make) -> dict[str, Any]:
        run, model, optimizer = begin_with(before, saved, make)
        steps(model, optimizer, range(2))
        run.save_state(str(tmp_path / make.__name__ / "first"))
        steps(model, optimizer, range(2, 4))
        return everything(run, model, optimizer)

    def load(make: Make) -> dict[str, Any]:
        run, model, optimizer = begin_with(after, loaded, make)
        steps(model, optimizer, range(5, 6))
        run.load_state(str(tmp_path / make.__name__ / "first"))
        run.save_state(str(tmp_path / make.__name__ / "second"))
        steps(model, optimizer, range(2, 3))
        run.load_state(str(tmp_path / make.__name__ / "second"))
        steps(model, optimizer, range(2, 4))
        return everything(run, model, optimizer)

    assert run_on_ranks(lambda: list(map(save, MAKERS)), LAYOUTS[before][0])[0] == alone
    assert run_on_ranks(lambda: list(map(load, MAKERS)), LAYOUTS[after][0])[0] == alone


def test_each_owner_writes_its_own_state_and_has_no_other() -> None:
    def go() -> tuple[int, int, list[str]]:
        _, model, optimizer = begin("two ranks", muon)
        steps(model, optimizer, range(1))
        state = optimizer.state_dict()["state"]
        shapes = {tuple(values["momentum_buffer"].shape) for values in state.values()}
        whole = {tuple(parameter.shape) for parameter in model.parameters()}
        return len(state), len(shapes - whole), [type(value["momentum_buffer"]).__name__ for value in state.values()]

    found = run_on_ranks(go, 2)
    assert sum(count for count, _, _ in found) == 4 and all(count for count, _, _ in found)
    assert all(strange == 0 and set(kinds) == {"Tensor"} for _, strange, kinds in found)
