"""The mean over what living ranks gave, without processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.errors import CollectiveError, PreparationError
from accelerate.guests.fault_tolerance.membership import Membership
from accelerate.guests.fault_tolerance.strategy import KeptReplicas


class TwoMembers:
    """Gives the gradients of this rank twice, with the weights that a test chose."""

    def __init__(self, *weights: float) -> None:
        self.weights = weights

    def add_up(self, flat: torch.Tensor, value: object) -> tuple[torch.Tensor, Mapping[int, Any]]:
        return flat * len(self.weights), {rank: [weight, 0] for rank, weight in enumerate(self.weights)}


def averaged(*weights: float) -> torch.Tensor | None:
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), 6.0)
    strategy: Any = KeptReplicas.__new__(KeptReplicas)
    strategy._membership, strategy._trained = TwoMembers(*weights), [model]
    strategy._average([weights[0], 0])
    return model.weight.grad


def test_gradients_become_the_mean_over_the_samples() -> None:
    assert torch.equal(averaged(3, 1) or torch.empty(0), torch.full((1, 1), 3.0))


def test_an_update_without_samples_changes_nothing() -> None:
    assert averaged(0, 0) is None  # the only rank that had a sample was lost; an optimizer leaves such parameters alone


def test_a_state_that_cannot_be_written_says_where_room_is_missing(tmp_path: Path) -> None:
    membership: Any = Membership.__new__(Membership)
    membership.folder, membership.rank, membership._num_states = tmp_path / "gone", 0, 0
    with pytest.raises(CollectiveError, match=r"no room for the state of a rank.*TMPDIR"):
        membership._write({})


def test_several_backwards_of_one_update_are_refused_in_the_words_of_kept_replicas() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    strategy: Any = KeptReplicas.__new__(KeptReplicas)
    strategy.retry, strategy.world, strategy.mesh = None, accelerator.world, accelerator.mesh
    accelerator.strategy = strategy
    rows = torch.ones(2, 1)
    with pytest.raises(PreparationError, match="but under --keep_replicas the ranks add up"):
        accelerator.backward_in_parts(lambda part: model(part).sum(), rows)
    accelerator.gradient_state.advance()
    with pytest.raises(PreparationError, match="several micro-batches: under --keep_replicas"):
        accelerator.backward(model(rows).sum(), weight=2)
