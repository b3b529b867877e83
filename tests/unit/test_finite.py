from __future__ import annotations

import pytest
import torch

from tests.processors import ARITHMETICS, computing_files
from tests.ranks import RankFailed, run_on_ranks


def train_into_nan() -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.tensor([1.0, float("inf"), 0.0])
    optimizer.step()
    return parameter.detach()


def test_a_test_that_trains_into_infinities_fails() -> None:
    with pytest.raises(AssertionError, match="left the finite numbers"):
        train_into_nan()


def test_a_rank_that_trains_into_infinities_fails_its_test() -> None:
    with pytest.raises(RankFailed, match="left the finite numbers"):
        run_on_ranks(train_into_nan, 1)


@pytest.mark.nonfinite
def test_a_test_of_overflows_may_say_so() -> None:
    assert not torch.isfinite(train_into_nan()).all()


def test_the_tests_that_compute_are_found_and_each_library_is_limited() -> None:
    found = computing_files()
    assert "tests/unit/checkpointing/test_save_load.py" in found and "tests/oracle/test_accumulation.py" in found
    assert "tests/unit/test_ports.py" not in found
    assert {tuple(sorted(variables)) for _, variables in ARITHMETICS.values()} == {
        ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
    }
