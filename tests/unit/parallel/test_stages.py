"""How a model is split into stages."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.distributed.mesh import Mesh
from accelerate.distributed.world import World
from accelerate.errors import MissingDependency, NotBuilt, PreparationError, SettingError
from accelerate.parallel import StrategyOptions
from accelerate.parallel.pipeline import strategy
from accelerate.parallel.pipeline.partition import balanced, choose_split_points, drop_other_stages, split
from accelerate.parallel.pipeline.strategy import Pipeline
from accelerate.plugins.parallelism import PipelineParallelConfig
from tests.sharded_runs import Network


def _largest(sizes: list[int], starts: list[int]) -> int:
    return max(sum(sizes[a:b]) for a, b in itertools.pairwise([*starts, len(sizes)]))


def test_runs_are_as_even_as_they_can_be() -> None:
    chance = random.Random(0)
    for _ in range(30):
        sizes = [chance.randint(1, 20) for _ in range(chance.randint(4, 8))]
        starts = balanced(sizes, 3)
        assert starts[0] == 0 and sorted(set(starts)) == starts
        every = ([0, *cut] for cut in itertools.combinations(range(1, len(sizes)), 2))
        assert _largest(sizes, starts) == min(_largest(sizes, other) for other in every)


def test_a_torch_whose_schedules_lack_what_is_needed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and not by a TypeError of torch's in the first step."""
    monkeypatch.setattr(strategy, "OLDEST_TORCH", "99.0")
    options: Any = None
    with pytest.raises(
        MissingDependency, match=r"\(pp_size\) needs the schedules of torch 99\.0 or newer.*set pp_size=1"
    ):
        Pipeline(World(), options)


def test_points_are_the_names_of_blocks() -> None:
    assert choose_split_points(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), 3) == ["2", "4"]
    assert choose_split_points(Network(), 2) == ["layers.1"]
    with pytest.raises(PreparationError, match="no list of blocks"):
        choose_split_points(nn.Linear(2, 2), 2)


def test_stages_of_a_traced_model_hold_its_own_parameters() -> None:
    model = Network(tied=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    forwards = [dict(module.__dict__) for module in model.modules()]
    stages = split(model, ["layers.0", "head"], [torch.zeros(2, 8)])
    assert [dict(module.__dict__) for module in model.modules()] == forwards
    held = [{names[id(parameter)] for parameter in stage.parameters()} for stage in stages]
    assert held[0] == {"entrance.weight", "entrance.bias"} and held[2] == {"entrance.weight", "head.bias"}
    x = torch.randn(5, 8)
    torch.testing.assert_close(_through(stages, x), model(x), rtol=0, atol=0)


def _through(stages: list[nn.Module], *values: Any) -> Any:
    for stage in stages[:-1]:
        handed_on = stage(*values)
        values = handed_on if isinstance(handed_on, tuple) else (handed_on,)
    return stages[-1](*values)


class Skipping(nn.Module):
    """What the first layer makes, and an input, are used in every later one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """Scores, and what they were made of."""
        wave = torch.cos(x)
        hidden = x
        for layer in self.layers:
            hidden = hidden + layer(hidden) * wave
        hidden = hidden * mask[..., None]
        return {"scores": self.head(hidden), "more": [hidden, wave]}


def test_values_that_pass_a_stage_by_travel_through_it() -> None:
    model = Skipping()
    x, mask = torch.randn(3, 4), torch.tensor([1.0, 0.0, 1.0])
    stages = split(model, ["layers.1", "layers.2", "head"], [x], {"mask": mask})
    found, expected = _through(stages, x, mask), model(x, mask)
    assert list(found) == list(expected) and isinstance(found["more"], list)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_other_stages_have_takes_no_memory() -> None:
    model = Network(tied=True)
    drop_other_stages(model, {id(parameter) for parameter in model.layers.parameters()})
    assert model.head.weight is model.entrance.weight and model.head.weight.is_meta
    assert model.get_buffer("scale").is_meta and not model.get_parameter("layers.0.up.weight").is_meta


class Branching(nn.Module):
    """Its forward depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One of two."""
        return self.layers[1](self.layers[0](x) if bool(x.sum() > 0) else x)


def test_a_forward_that_cannot_be_traced_says_so() -> None:
    with pytest.raises(PreparationError, match=r"(?s)Branching can't be traced.*Write it without branches"):
        split(Branching(), ["layers.1"], [torch.zeros(2, 2)])


def test_points_out_of_order_are_refused() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    with pytest.raises(SettingError, match="order of the model's modules"):
        split(model, ["2", "1"], None)


@pytest.mark.parametrize("axis", ["cp", "sp", "ep"])
def test_what_pipelines_are_not_combined_with_is_refused(axis: str) -> None:
    world = World.pretend(size=4)
    degrees = {"pp": 2, axis: 2}
    options = StrategyOptions(mesh=Mesh.of(world, None, **degrees))
    with pytest.raises(NotBuilt, match=rf"pp_size=2, {axis}_size=2\).*pp_size 2 \*.*or set pp_size=1"):
        Pipeline(world, options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "2f2b"}, "choose one of"),
        ({"stages_per_rank": 2}, "interleaved"),
        ({"schedule": "interleaved", "stages_per_rank": 1}, "interleaved"),
        ({"num_micro_batches": 0}, "at least 1"),
    ],
)
def test_impossible_options_name_themselves(options: dict[str, object], text: str) -> None:
    with pytest.raises(SettingError, match=text) as caught:
        PipelineParallelConfig(**options)  # pyright: ignore[reportArgumentType]
    assert next(iter(options)) in str(caught.value)
