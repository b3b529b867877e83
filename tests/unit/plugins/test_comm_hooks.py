"""Compressed gradients on real gloo ranks, against those of plain DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.errors import SettingError
from accelerate.plugins.ddp import DistributedDataParallelKwargs
from tests.ranks import run_on_ranks

#: Small enough to be quick, full rank, compressed from the first step that torch allows.
FULL_RANK = {"matrix_approximation_rank": 64, "start_powerSGD_iter": 2, "min_compression_rate": 0}
LOW_RANK = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0}
STEPS = 5


def _gradients(kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The gradients of every step, flattened, of a model whose ranks see different data."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    DistributedDataParallelKwargs(**kwargs).register_comm_hook(model)
    data = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    taken: list[torch.Tensor] = []
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(16, 6, generator=data)).square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
        taken.append(torch.cat([gradient.detach().flatten() for gradient in gradients if gradient is not None]))
    return taken


LOSSLESS: dict[str, tuple[dict[str, Any], float]] = {
    "fp16": ({"comm_hook": "fp16"}, 2e-3),
    "bf16": ({"comm_hook": "bf16"}, 1.6e-2),
    "power_sgd": ({"comm_hook": "power_sgd", "comm_state_option": FULL_RANK}, 1e-5),
    "batched": ({"comm_hook": "batched_power_sgd", "comm_state_option": FULL_RANK}, 1e-5),
    "batched in bf16": (
        {"comm_hook": "batched_power_sgd", "comm_wrapper": "bf16", "comm_state_option": FULL_RANK},
        3e-2,
    ),
    "batched in fp16": (
        {"comm_hook": "batched_power_sgd", "comm_wrapper": "fp16", "comm_state_option": FULL_RANK},
        6e-3,
    ),
}
LOSSY: dict[str, tuple[dict[str, Any], float]] = {
    f"{hook} in {wrapper}": (
        {"comm_hook": hook, "comm_wrapper": wrapper, "comm_state_option": LOW_RANK},
        {"no": 1e-6, "fp16": 2e-3, "bf16": 1.6e-2}[wrapper],
    )
    for hook in ("power_sgd", "batched_power_sgd")
    for wrapper in ("no", "fp16", "bf16")
}


@pytest.fixture(scope="module")
def measured() -> list[dict[str, torch.Tensor]]:
    """Per rank: the gradients of all steps by case, those of plain DDP as "plain"; one world for all of them."""

    def on_rank() -> dict[str, Any]:
        cases = {
            name: kwargs for name, (kwargs, _) in (LOSSLESS | {f"rank 1 {k}": v for k, v in LOSSY.items()}).items()
        }
        return {
            name: torch.stack(_gradients(kwargs)).tolist()
            for name, kwargs in {**cases, "plain": {}, "no": {"comm_hook": "no"}}.items()
        }

    return [{name: torch.tensor(value) for name, value in rank.items()} for rank in run_on_ranks(on_rank)]


@pytest.mark.parametrize("case", LOSSLESS)
def test_a_hook_that_loses_only_precision_gives_the_gradients_of_plain_ddp(
    case: str, measured: list[dict[str, torch.Tensor]]
) -> None:
    first, second = measured
    bound = LOSSLESS[case][1]
    torch.testing.assert_close(first[case], second[case], rtol=0, atol=0)  # the same gradients on every rank
    error = (first[case] - first["plain"]).norm() / first["plain"].norm()
    assert error < bound
    if bound > 1e-4:
        assert error > 0, "nothing was compressed"


@pytest.mark.parametrize("case", LOSSY)
def test_low_rank_gradients_carry_their_error_into_the_next_step(
    case: str, measured: list[dict[str, torch.Tensor]]
) -> None:
    hooked, plain = measured[0][f"rank 1 {case}"], measured[0]["plain"]
    torch.testing.assert_close(hooked, measured[1][f"rank 1 {case}"], rtol=0, atol=0)
    before = (hooked[:2] - plain[:2]).norm() / plain[:2].norm()
    assert before < LOSSY[case][1], "compressed before the chosen step"
    one_step = (hooked[2] - plain[2]).norm() / plain[2].norm()
    assert 0.02 < one_step < 1, "a rank 1 approximation loses something, and not everything"
    # What a step leaves out is sent later: the sum over steps is nearer to the truth than single steps are.
    single = torch.stack([(a - b).norm() for a, b in zip(hooked[2:], plain[2:], strict=True)]).sum()
    assert (hooked[2:].sum(0) - plain[2:].sum(0)).norm() < 0.9 * single


def test_no_hook_leaves_ddp_alone(measured: list[dict[str, torch.Tensor]]) -> None:
    torch.testing.assert_close(measured[0]["no"], measured[0]["plain"], rtol=0, atol=0)


def test_the_users_random_stream_does_not_move() -> None:
    def drawn() -> float:
        _gradients({"comm_hook": "batched_power_sgd", "comm_state_option": LOW_RANK})
        return torch.rand(()).item()

    def drawn_without() -> float:
        _gradients({})
        return torch.rand(()).item()

    assert run_on_ranks(drawn) == run_on_ranks(drawn_without)


def test_an_unknown_hook_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(SettingError, match="batched_power_sgd"):
        DistributedDataParallelKwargs(comm_hook="powersgd")


def test_full_precision_rank_around_a_wrapper_is_refused() -> None:
    with pytest.raises(SettingError, match="comm_wrapper"):
        DistributedDataParallelKwargs(comm_hook="power_sgd", comm_wrapper="power_sgd")
