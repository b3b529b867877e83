"""Islands train as a plain loop over several models does, bit for bit where the sums allow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.diloco.training import equal, plain, train
from tests.ranks import run_on_ranks

CASES: dict[str, dict[str, Any]] = {
    "plain": {"inner_steps": 4, "compression": "none", "fragments": 1, "overlap": False},
    "int8": {"inner_steps": 4, "compression": "int8", "fragments": 2, "overlap": False},
    "2 bits": {"inner_steps": 4, "compression": "2bit", "fragments": 1, "overlap": False, "kind": "adamw"},
    "overlap": {"inner_steps": 6, "compression": "int8", "fragments": 3, "overlap": True, "overlap_steps": 3},
    "bf16": {"inner_steps": 4, "compression": "int8", "fragments": 2, "overlap": False, "dtype": torch.bfloat16},
}


def _train(num_steps: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return train(num_steps, **arguments)


@pytest.mark.parametrize("case", CASES)
def test_islands_of_one_process_train_as_a_plain_loop(case: str) -> None:
    arguments = CASES[case]
    ranks = run_on_ranks(_train, 2, 15, arguments)
    expected = plain(15, 2, **arguments)
    for rank, found in enumerate(ranks):
        assert equal(found["inside"], expected["inside"][rank]), f"rank {rank} inside of the context"
        assert equal(found["after"], expected["after"]), f"rank {rank} after it"
    assert not equal(ranks[0]["inside"], ranks[1]["inside"])  # islands did train apart


def test_islands_of_two_processes_reduce_gradients_inside() -> None:
    arguments = CASES["int8"] | {"islands": 2}
    ranks = run_on_ranks(_train, 4, 10, arguments)
    expected = plain(10, 2, size=2, **CASES["int8"])
    for rank, found in enumerate(ranks):
        assert equal(found["inside"], ranks[rank // 2 * 2]["inside"]), "an island's replicas are equal"
        assert equal(found["after"], ranks[0]["after"])
        for own, other in zip(found["inside"], expected["inside"][rank // 2], strict=True):
            torch.testing.assert_close(own, other)
