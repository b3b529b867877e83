"""Named random number streams: seeded, captured, restored, kept apart."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from accelerate.distributed import random as seeding
from accelerate.distributed.random import (
    capture_rng_states,
    host_streams,
    restore_rng_states,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from accelerate.distributed.world import World
from accelerate.errors import SettingError
from accelerate.settings.labels import RNGType


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_a_seed_starts_every_stream_of_the_host() -> None:
    set_seed(3)
    first = draw()
    draw()
    set_seed(3)
    assert draw() == first
    set_seed(4)
    assert all(new != old for new, old in zip(draw(), first, strict=True))


def test_a_seed_may_be_larger_than_numpy_takes() -> None:
    set_seed(2**32 + 5)
    expected = float(np.random.rand())
    set_seed(5)
    assert float(np.random.rand()) == expected


def test_a_device_specific_seed_differs_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "current_world", lambda: World.pretend(rank=2, size=4))
    set_seed(3, device_specific=True)
    third = draw()
    monkeypatch.undo()
    set_seed(5)
    assert draw() == third


def test_deterministic_is_passed_on_to_torch() -> None:
    try:
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_capture_restores_every_stream_exactly() -> None:
    set_seed(1)
    torch.randn(3), random.gauss(0, 1), np.random.randn()  # leaves half-used pairs behind
    states = capture_rng_states(step=7)
    expected = [draw(), random.gauss(0, 1), np.random.randn()]
    assert states["step"] == 7
    assert restore_rng_states(states) == []
    assert [draw(), random.gauss(0, 1), np.random.randn()] == expected


def test_a_capture_is_json_values_and_tensors() -> None:
    states = capture_rng_states()
    plain = {name: state for name, state in states.items() if not isinstance(state, torch.Tensor)}
    expected = draw()
    restore_rng_states({**states, **json.loads(json.dumps(plain))})
    assert draw() == expected


@pytest.mark.parametrize(
    "states",
    [{"torch": torch.zeros(3, dtype=torch.uint8)}, {"cuda": [torch.zeros(16, dtype=torch.uint8)]}, {"dice": [1]}],
)
def test_what_cant_be_restored_is_said(states: dict[str, Any]) -> None:
    if "cuda" in states and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    missed = restore_rng_states(states)
    assert len(missed) == 1 and missed[0].startswith(next(iter(states)))


def test_a_block_of_other_streams_leaves_none_behind() -> None:
    set_seed(1)
    other = capture_rng_states()
    inside = draw()
    set_seed(2)
    expected = draw()
    set_seed(2)
    with host_streams(other):
        assert draw() == inside
    assert draw() == expected


def test_one_process_agrees_with_itself() -> None:
    generator = torch.Generator().manual_seed(1)
    set_seed(0)
    expected = (*draw(), torch.rand((), generator=torch.Generator().manual_seed(1)).item())
    set_seed(0)
    synchronize_rng_states(["torch", "python", "numpy", RNGType.GENERATOR], generator)
    assert (*draw(), torch.rand((), generator=generator).item()) == expected


def test_streams_that_arent_there_are_refused() -> None:
    with pytest.raises(AssertionError, match="generator"):
        synchronize_rng_state("generator")
    with pytest.raises(SettingError, match="dice"):
        synchronize_rng_state("dice")
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError, match="cuda"):
            synchronize_rng_state(RNGType.CUDA)
