"""A model that the script compiled or wrapped itself is saved, loaded and unwrapped like any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.errors import PreparationError
from accelerate.utils import extract_model_from_parallel
from tests.ranks import run_on_ranks
from tests.sharded_runs import BLOCKS, Block, Network, plugin_of, samples
from tests.slow import slow_for

NUM_BATCHES: Final = 6
NUM_BEFORE_STOP: Final = 3  # inside of an accumulation window


class Normalized(Network):
    """The network with statistics that each batch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Scores of normalized inputs."""
        return super().forward(self.norm(inputs))


def plain(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def in_data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


def compiled_data_parallel(model: nn.Module) -> nn.Module:
    return compiled(nn.DataParallel(model))


def data_parallel_of_compiled(model: nn.Module) -> nn.Module:
    return nn.DataParallel(compiled(model))


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def compiled_ddp(model: nn.Module) -> nn.Module:
    return compiled(in_ddp(model))


def in_fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True
    )


def in_fsdp1_flat(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))


def compiled_fsdp1(model: nn.Module) -> nn.Module:
    return compiled(in_fsdp1(model))


Wrapper = Callable[[nn.Module], nn.Module]
WRAPPERS: Final[list[Wrapper]] = [compiled, in_data_parallel, compiled_data_parallel, data_parallel_of_compiled]
STRATEGIES: Final[dict[str, tuple[int, dict[str, Any] | None, list[Wrapper]]]] = {
    "one": (1, None, WRAPPERS),
    "ddp": (2, None, [*WRAPPERS, in_ddp, compiled_ddp]),
    "fsdp2": (2, {"fsdp_version": 2, **BLOCKS}, WRAPPERS),
    "fsdp2-whole-state": (2, {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT", **BLOCKS}, WRAPPERS),
    "fsdp1": (2, {"fsdp_version": 1, "use_orig_params": True, **BLOCKS}, [*WRAPPERS, in_fsdp1, compiled_fsdp1]),
    "fsdp1-flat": (2, {"fsdp_version": 1, **BLOCKS}, [*WRAPPERS, in_fsdp1_flat]),
}
#: Each wrapper of torch, and replicas and shards.
QUICK: Final = (("one", data_parallel_of_compiled), ("ddp", compiled_ddp), ("fsdp2", compiled), ("fsdp1", in_fsdp1))
SLOW: Final = slow_for("five runs of training")
CASES: Final = [
    pytest.param(
        strategy, wrapper, id=f"{strategy}-{wrapper.__name__}", marks=() if (strategy, wrapper) in QUICK else SLOW
    )
    for strategy, (_, _, wrappers) in STRATEGIES.items()
    for wrapper in wrappers
]


class Run:
    """A training run of a wrapped model, batch by batch."""

    def __init__(self, wrapper: Wrapper, options: dict[str, Any] | None, seed: int) -> None:
        torch.compiler.reset()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin_of(options))
        torch.manual_seed(seed)
        self.own = Normalized()
        wrapped = wrapper(self.own)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        loader = DataLoader(samples(8 * NUM_BATCHES), batch_size=8 // self.accelerator.num_processes)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(wrapped, optimizer, loader)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train(self, first: int, end: int) -> None:
        """Train on the batches from ``first`` to ``end``."""
        for number, (inputs, classes) in enumerate(self.loader):
            if first <= number < end:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.cross_entropy(self.model(inputs), classes)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1).item())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the weights and buffers by name, of a sharded model on the main process only."""
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}

    def num_elements(self) -> int:
        """How many elements of parameters the optimizer trains on this rank."""
        parameters: list[Any] = [one for group in self.optimizer.param_groups for one in group["params"]]
        return sum(getattr(one, "_local_tensor", one).numel() for one in parameters)


def assert_same_end(ours: Run, whole: Run, *, bit_by_bit: bool) -> None:
    """The last batches of both runs, and their weights at the end, are the same."""
    tolerances: dict[str, float] = {"rtol": 0, "atol": 0} if bit_by_bit else {}
    torch.testing.assert_close(ours.losses, whole.losses[-len(ours.losses) :], **tolerances)
    torch.testing.assert_close(ours.norms, whole.norms[-len(ours.norms) :], **tolerances)
    torch.testing.assert_close(ours.weights(), whole.weights(), **tolerances)


def stop_and_resume(wrapper: Wrapper, options: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    whole = Run(wrapper, options, seed=0)
    elements = whole.num_elements()
    whole.train(0, NUM_BEFORE_STOP)
    whole.accelerator.save_state(str(folder / "state"))
    whole.train(NUM_BEFORE_STOP, NUM_BATCHES)

    for again in (wrapper, plain):  # wrappers leave no trace in the checkpoint
        resumed = Run(again, options, seed=1)
        resumed.accelerator.load_state(str(folder / "state"))
        resumed.train(NUM_BEFORE_STOP, NUM_BATCHES)
        assert_same_end(resumed, whole, bit_by_bit=again is wrapper)

    unwrapped = Run(plain, options, seed=0)
    assert elements == unwrapped.num_elements()
    unwrapped.train(0, NUM_BATCHES)
    assert_same_end(unwrapped, whole, bit_by_bit=False)
    return check_functions(whole, is_compiled="compile" in wrapper.__name__, folder=folder)


def check_functions(run: Run, *, is_compiled: bool, folder: Path) -> dict[str, Any]:
    """Return the weights, and those that ``save_model`` wrote."""
    from safetensors.torch import load_file

    accelerator, model = run.accelerator, run.model
    for unwrapped in (
        accelerator.unwrap_model(model, keep_torch_compile=False),
        extract_model_from_parallel(model, keep_torch_compile=False),
    ):
        assert unwrapped is run.own
    kept = accelerator.unwrap_model(model)
    assert isinstance(kept, torch._dynamo.OptimizedModule) == is_compiled
    assert getattr(kept, "_orig_mod", kept) is run.own
    weights = run.weights()
    accelerator.save_model(model, str(folder / "model"))
    accelerator.wait_for_everyone()
    return {"weights": weights, "saved": load_file(folder / "model" / "model.safetensors")}


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize(("strategy", "wrapper"), CASES)
def test_a_wrapped_model_goes_on_bit_by_bit(strategy: str, wrapper: Wrapper, tmp_path: Path) -> None:
    num_ranks, options, _ = STRATEGIES[strategy]
    found = run_on_ranks(stop_and_resume, num_ranks, wrapper, options, tmp_path, timeout_seconds=170)[0]
    assert list(found["weights"]) == list(Normalized().state_dict())
    torch.testing.assert_close(found["saved"], found["weights"], rtol=0, atol=0)


def refuse() -> None:
    accelerator = Accelerator(cpu=True)
    wrapped = nn.Sequential(in_fsdp1(Network()))
    with pytest.raises(PreparationError, match="The module '0' is in FullyShardedDataParallel, but this run"):
        accelerator.prepare(wrapped)
    for parameter in wrapped.parameters():
        parameter.requires_grad_(False)
    assert accelerator.prepare(wrapped) is wrapped


def test_flat_parameters_without_fsdp1_are_refused_on_all_ranks() -> None:
    run_on_ranks(refuse, 2)


def evaluate(wrapper: Wrapper, folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    first, other = Normalized(), Normalized()
    model = accelerator.prepare_model(wrapper(first), evaluation_mode=True)
    accelerator.save_state(str(folder))
    saved = accelerator.get_state_dict(model)
    accelerator.free_memory()
    accelerator.prepare_model(wrapper(other), evaluation_mode=True)
    accelerator.load_state(str(folder))
    torch.testing.assert_close(other.state_dict(), dict(saved), rtol=0, atol=0)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_for_evaluation_is_loaded(wrapper: Wrapper, tmp_path: Path) -> None:
    run_on_ranks(evaluate, 1, wrapper, tmp_path / "state")
