"""A save inside a window of gradient accumulation keeps its gradients: what goes on from it is the undisturbed run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.data_loader import ResumeWarning
from accelerate.plugins.parallelism import PipelineParallelConfig
from accelerate.state import AcceleratorState
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    set_seed,
)
from tests.multi.test_main_only import Messages
from tests.ranks import run_on_ranks
from tests.slow import mostly_slow, slow_for

STEPS = 4
NUM_BATCHES = 12
LIMIT_SECONDS = 90.0
slow = slow_for("many layouts", "meshes")


class Model(nn.Module):
    tp_plan = {"wide": "colwise", "back": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 8)
        self.back = nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.back(self.wide(rows).relu()) * self.frozen


def flat(**how: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 30, "use_orig_params": True}
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, **options | how)}


def shards(**how: Any) -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2), **how}


def mesh(**degrees: Any) -> dict[str, Any]:
    stages = PipelineParallelConfig(split_points="back") if "pp_size" in degrees else None
    return {"parallelism_config": ParallelismConfig(**degrees, pp_handler=stages)}


BF16 = {"mixed_precision": "bf16"}
KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "replicated": dict,
    "classic": lambda: {"project_config": ProjectConfiguration(checkpoint_format="classic")},
    "fsdp2": shards,
    "fsdp2 in bf16": lambda: shards(**BF16),
    "fsdp2, reduced each time": lambda: shards(reduced_each_time=True),
    "fsdp2 of tensors": lambda: shards(**mesh(tp_size=2, dp_shard_size=2)),
    "fsdp1": lambda: flat(),
    "fsdp1, flat": lambda: flat(use_orig_params=False),
    "fsdp1, reduced each time": lambda: flat() | {"reduced_each_time": True},
    "fsdp1, flat, reduced each time": lambda: flat(use_orig_params=False) | {"reduced_each_time": True},
    "fsdp1 in bf16": lambda: flat() | BF16,
    "fsdp1, gathered once": lambda: flat(reshard_after_forward="SHARD_GRAD_OP"),
    "fsdp1, one unit": lambda: flat(auto_wrap_policy="no_wrap", min_num_params=None),
    "fsdp1, whole": lambda: flat(reshard_after_forward="NO_SHARD", use_orig_params=False),
    "tensor": lambda: mesh(tp_size=2),
    "pipeline": lambda: mesh(pp_size=2),
    "pipeline of replicas": lambda: mesh(pp_size=2, dp_replicate_size=2),
    "pipeline of shards": lambda: shards(**mesh(pp_size=2, dp_shard_size=2)),
    "pipeline of shards in bf16": lambda: shards(**mesh(pp_size=2, dp_shard_size=2), **BF16),
}


def accelerator_of(kind: str, steps: int) -> Accelerator:
    options = KINDS[kind]()
    each = options.pop("reduced_each_time", False)
    plugin = GradientAccumulationPlugin(num_steps=steps, sync_each_batch=each)
    return Accelerator(cpu=True, gradient_accumulation_plugin=plugin, **options)


@dataclass(frozen=True)
class How:
    """One way to write the loop, and what it trains."""

    weighted: bool = False
    clears_first: bool = False
    evaluates: bool = False  # just before the save
    double: bool = False
    batch_size: int = 2  # of each rank
    steps: int = STEPS

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        squares = output.float().square() if output.dtype == torch.bfloat16 else output.square()
        return squares.sum() if self.weighted else squares.mean()


Outcome = tuple[dict[int, float], list[float], list[str]]


def run(kind: str, folder: str, how: How, num_samples: int, *, save_at: int | None, first: int = 0) -> Outcome:
    """The losses by micro-batch, the weights at the end, and what was said; with `first`, from the checkpoint on."""
    accelerator = accelerator_of(kind, how.steps)
    set_seed(5)
    model = Model().double() if how.double else Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    rows = [torch.randn(4, dtype=torch.float64 if how.double else torch.float32) for _ in range(num_samples)]
    loader: Any = DataLoader(cast(Any, rows), batch_size=how.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    messages, losses = Messages(), {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if first:
            accelerator.load_state(folder)
            optimizer.zero_grad()
        for number, batch in enumerate(loader, first + 1):
            with accelerator.accumulate(model):
                if how.clears_first:
                    optimizer.zero_grad()
                if "pipeline" in kind:
                    loss = accelerator.pipeline_step(model, (batch, batch), lambda output, _: how.loss(output))
                else:
                    loss = how.loss(model(batch))
                    accelerator.backward(loss, **({"weight": batch.numel()} if how.weighted else {}))
                optimizer.step()
                if not how.clears_first:
                    optimizer.zero_grad()
            losses[number] = loss.item()
            if number == save_at:
                if how.evaluates:
                    with torch.no_grad():
                        model(batch)
                accelerator.save_state(folder, asynchronous=number % 2 == 0)
    accelerator.wait_for_checkpoint()
    whole = accelerator.get_state_dict(model)
    texts = [str(one.message) for one in caught if issubclass(one.category, ResumeWarning)]
    weights = [value for name in sorted(whole) for value in whole[name].flatten().tolist()]
    return losses, weights, texts + messages.about("update")


def goes_on_exactly(kind: str, num_ranks: int, folder: Path, save_at: int, how: How | None = None) -> None:
    """Nobody saves; then somebody does; then new processes go on from there."""
    how = how or How()
    data_parallel_size = {"tensor": 1, "pipeline": 1, "fsdp2 of tensors": 2}.get(
        kind, num_ranks // (1 + ("pipeline" in kind))
    )
    num_samples = NUM_BATCHES * how.batch_size * data_parallel_size

    def whole() -> list[Outcome]:
        runs = [run(kind, str(folder), how, num_samples, save_at=None)]
        AcceleratorState._reset_state()
        return [*runs, run(kind, str(folder), how, num_samples, save_at=save_at)]

    def rest() -> Outcome:
        return run(kind, str(folder), how, num_samples, save_at=None, first=save_at)

    undisturbed = run_on_ranks(whole, num_ranks, timeout_seconds=LIMIT_SECONDS)
    again = run_on_ranks(rest, num_ranks, timeout_seconds=LIMIT_SECONDS)
    for (before, saved), (losses_again, weights_again, said_again) in zip(undisturbed, again, strict=True):
        losses, weights, said = before
        assert saved == before
        assert len(losses) == NUM_BATCHES and sorted(losses_again) == list(range(save_at + 1, NUM_BATCHES + 1))
        assert losses_again == {number: losses[number] for number in losses_again}
        assert weights_again == weights and all(map(torch.isfinite, torch.tensor(weights)))
        assert said == said_again == []


@pytest.mark.parametrize("save_at", [5, 6, 7])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_replicas_go_on_exactly(tmp_path: Path, num_ranks: int, save_at: int) -> None:
    goes_on_exactly("replicated", num_ranks, tmp_path / "ck", save_at)


PIECES = [kind for kind in KINDS if kind not in ("replicated", "classic")]
#: Each kind of pieces, and FSDP's ways to hold gradients that aren't reduced yet.
QUICK_PIECES = (
    *("fsdp2", "fsdp2 in bf16", "fsdp2, reduced each time", "fsdp1", "fsdp1, flat", "fsdp1, reduced each time"),
    *("tensor", "pipeline of shards"),
)


@pytest.mark.parametrize("kind", mostly_slow(PIECES, QUICK_PIECES, slow))
def test_pieces_go_on_exactly(tmp_path: Path, kind: str) -> None:
    num_ranks = 4 if any(word in kind for word in ("shards", "of replicas", "of tensors")) else 2
    goes_on_exactly(kind, num_ranks, tmp_path / "ck", 6)


@pytest.mark.parametrize(
    "kind",
    mostly_slow(["fsdp1", "fsdp1, flat", "fsdp2", "fsdp1, gathered once"], ["fsdp2", "fsdp1, gathered once"], slow),
)
def test_an_evaluation_before_the_save_changes_nothing(tmp_path: Path, kind: str) -> None:
    goes_on_exactly(kind, 2, tmp_path / "ck", 7, How(evaluates=True))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_classic_format_goes_on_exactly(tmp_path: Path, num_ranks: int) -> None:
    folder = tmp_path / "ck"
    goes_on_exactly("classic", num_ranks, folder, 6)
    assert (folder / "random_states_0.pkl").is_file() and not list(folder.glob("gradients*.pkl"))


@pytest.mark.parametrize("kind", ["replicated", "fsdp1", "fsdp2"])
def test_a_window_of_weighted_sums_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    goes_on_exactly(kind, 2, tmp_path / "ck", 7, How(weighted=True))


def test_a_loop_that_clears_gradients_first_goes_on_exactly(tmp_path: Path) -> None:
    goes_on_exactly("replicated", 2, tmp_path / "ck", 7, How(clears_first=True))


@pytest.mark.parametrize("weighted", [pytest.param(False, marks=slow), True])
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "save_at"),
    [((2, 4), (1, 8), 7), ((1, 8), (2, 4), 12), ((2, 6), (3, 4), 9), ((3, 4), (2, 6), 6)],  # ranks, steps
)
def test_other_ranks_complete_the_update_that_was_begun(
    tmp_path: Path, saved_by: tuple[int, int], loaded_by: tuple[int, int], save_at: int, weighted: bool
) -> None:
    """In float64, where the same samples make each update: the run that nobody disturbed, up to rounding."""
    folder, num_samples = str(tmp_path / "ck"), 96

    def how(steps: int) -> How:
        return How(double=True, weighted=weighted, steps=steps)

    (ranks, steps), (ranks_later, steps_later) = saved_by, loaded_by
    first = save_at * ranks // ranks_later
    saved = run_on_ranks(
        lambda: run("replicated", folder, how(steps), num_samples, save_at=save_at),
        ranks,
        timeout_seconds=LIMIT_SECONDS,
    )
    again = run_on_ranks(
        lambda: run("replicated", folder, how(steps_later), num_samples, save_at=None, first=first),
        ranks_later,
        timeout_seconds=LIMIT_SECONDS,
    )
    assert save_at % steps and first % steps_later
    for _, weights, said in again:
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(saved[0][1]), rtol=1e-12, atol=1e-12)
        assert not [text for text in said if "lost" in text]


def test_what_cannot_be_used_is_said_once(tmp_path: Path) -> None:
    """Half the ranks with the same number of micro-batches: another update."""
    folder = str(tmp_path / "ck")
    run_on_ranks(lambda: run("replicated", folder, How(), 48, save_at=6), 2, timeout_seconds=LIMIT_SECONDS)
    ((_, _, said),) = run_on_ranks(
        lambda: run("replicated", folder, How(), 48, save_at=None, first=12), 1, timeout_seconds=LIMIT_SECONDS
    )
    assert len([text for text in said if "first micro-batches are lost: an update is made of other" in text]) == 1


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        ("replicated", "tensor", "in another way over the ranks"),
        ("tensor", "replicated", "in another way over the ranks"),
        ("fsdp1", "fsdp1, one unit", "in other FSDP units"),
    ],
)
def test_gradients_that_lie_in_another_way_are_left_out(tmp_path: Path, before: str, now: str, reason: str) -> None:
    """The same number of ranks, and the same strategy by name."""
    folder = str(tmp_path / "ck")
    run_on_ranks(lambda: run(before, folder, How(), 48, save_at=6), 2, timeout_seconds=LIMIT_SECONDS)
    ranks = run_on_ranks(lambda: run(now, folder, How(), 48, save_at=None, first=6), 2, timeout_seconds=LIMIT_SECONDS)
    for losses, weights, _ in ranks:
        assert len(losses) >= 6 and all(map(torch.isfinite, torch.tensor(weights)))
    assert [len([text for text in said if reason in text]) for *_, said in ranks] == [1, 0]
